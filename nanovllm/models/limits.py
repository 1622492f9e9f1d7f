"""Refuses options that contradict a model's config, before its weights are read; without torch."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nanovllm.config import first_field, positions_of
from nanovllm.errors import ModelLoadError, UnsupportedModelError
from nanovllm.features.engine_config import ABOUT_CHECKPOINTS, EngineConfig
from nanovllm.models.exact_activations import check_exact_activations
from nanovllm.models.source import is_gguf


def check_limits(config: Any, options: EngineConfig) -> None:
    """Check the options against a text model's config; fields that it lacks are not checked.

    Raises ValueError for a limit that exceeds the model's or contradicts another, UnsupportedModelError if the number
    of heads is not divisible among the ranks.
    """
    positions = positions_of(config)
    if positions is not None:  # no contradiction depends on the device
        options.resolve_limits("cpu", positions)
    heads = first_field(config, "num_attention_heads", "n_head")
    size = options.tensor_parallel_size
    if heads is not None and heads % size:
        keys = first_field(config, "num_key_value_heads") or heads
        possible = [n for n in range(1, heads + 1) if heads % n == 0 and (keys % n == 0 or n % keys == 0)]
        raise UnsupportedModelError(
            f"tensor_parallel_size is {size}, but the model has {heads} attention heads, {keys} key and value heads, "
            f"which do not divide among so many ranks. It can be at most one of {', '.join(map(str, possible))}."
        )


def check_stored_limits(source: str, options: EngineConfig) -> None:
    """As `check_limits`, for a config on disk: of a folder, GGUF file or cached hub model; skipped if there is none.

    An option about quantised weights that contradicts the config is refused too.
    """
    found = _stored_config(source, options)
    is_known = isinstance(found, dict)
    if options.exact_activations:
        check_exact_activations(options, source, stored=found if is_known and not is_gguf(source) else None)
    if is_known:
        if options.quantization in ABOUT_CHECKPOINTS and not is_gguf(source):
            from nanovllm.models.quantised.stored_config import check_contradiction, checkpoint_of

            check_contradiction(source, checkpoint_of(found), options.quantization)
        text = found.get("text_config")
        check_limits(SimpleNamespace(**(text if isinstance(text, dict) else found)), options)


def _stored_config(source: str, options: EngineConfig) -> Any:
    """The config on disk; None if there is none."""
    if is_gguf(source):
        from nanovllm.models.gguf.config import read_config
        from nanovllm.models.gguf.file import open_gguf

        return read_config(open_gguf(source))
    path = Path(source) / "config.json"
    if not path.is_file():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(source, "config.json", revision=options.revision)
        if not isinstance(cached, str):
            return None
        path = Path(cached)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"the model {source!r} could not be loaded: {path} is not JSON: {error}") from None
