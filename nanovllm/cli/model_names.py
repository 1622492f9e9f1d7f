"""What can be said of a model's name before torch is imported: a folder that lacks something, a name nearly right."""

from __future__ import annotations

import difflib

from nanovllm.core.errors import ModelLoadError
from nanovllm.model.default_model import DEFAULT_MODEL
from nanovllm.model.source import find_folder


def check_model_exists(model: str, tokenizer: str | None = None) -> None:
    """Raise ModelLoadError for a folder that holds no model, and for a hub id that cannot be one or be fetched."""
    if model == DEFAULT_MODEL or find_folder(model, needs_tokenizer=tokenizer is None) is not None:
        return
    from huggingface_hub import constants, scan_cache_dir, try_to_load_from_cache
    from huggingface_hub.errors import CacheNotFound, HFValidationError

    try:
        if try_to_load_from_cache(model, "config.json") is not None:
            return
    except HFValidationError as error:
        raise ModelLoadError(f"{model!r} is no folder, and no id of the hub either: {error}") from None
    try:
        cached = [repo.repo_id for repo in scan_cache_dir().repos if repo.repo_type == "model"]
    except CacheNotFound:
        cached = []
    near = [DEFAULT_MODEL] if "/" not in model and DEFAULT_MODEL.startswith(model.lower()) else []
    near = near or difflib.get_close_matches(model, [DEFAULT_MODEL, *cached], n=2, cutoff=0.6)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    if constants.HF_HUB_OFFLINE:
        raise ModelLoadError(
            f"there is no folder {model!r}, and no such model in the hub's cache ({constants.HF_HUB_CACHE}); "
            f"HF_HUB_OFFLINE forbids a download.{hint} `nanovllm models` lists what is there."
        )
    if near and near[0] == DEFAULT_MODEL:
        raise ModelLoadError(f"there is no folder {model!r}, and no such model in the hub's cache.{hint}")
