"""Checks by one request, before anything is loaded, whether the Hugging Face hub has a model; without torch."""

from __future__ import annotations

import difflib
import time
from functools import lru_cache

from nanovllm.errors import ModelLoadError
from nanovllm.models.default_model import DEFAULT_MODEL

KNOWN_SECONDS = 60.0  # lifetime of a cached answer of the hub


def is_reachable(
    name: str, revision: str | None = None, *, file: str = "config.json", is_cached: bool | None = None
) -> bool:
    """Whether the hub is reachable for a model; False means that its files must come from the hub's local cache.

    The libraries would retry each file six times, half a minute each, even if it is in the cache.

    Args:
        file: its presence in the cache means that the model is cached.
        is_cached: True if the cache has the model; None: it has it if it has `file`.

    Raises ModelLoadError for an invalid name, a model or revision unknown to the hub, and a model that is not cached
    while the hub is unreachable.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        if is_cached is None:
            is_cached = isinstance(try_to_load_from_cache(name, file, revision=revision), str)
        validate_repo_id(name)
    except HFValidationError as error:
        raise ModelLoadError(f"{name!r} is no folder, and no id of the hub either: {error}") from None
    refusal, failure = _ask(name, revision, file, int(time.monotonic() / KNOWN_SECONDS))
    if is_cached or not (refusal or failure):
        return failure is None
    reason = f"the hub refuses it: {refusal}" if refusal else _unreachable(failure)
    raise ModelLoadError(
        f"there is no folder {name!r}, and no such model in the hub's cache; {reason}.{near(name)} `nanovllm models` "
        "lists what is there."
    )


@lru_cache(maxsize=32)
def _ask(name: str, revision: str | None, file: str, period: int) -> tuple[str | None, str | None]:
    """(refusal of the hub, reason why it is unreachable), each or None; asked once a `period`."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        get_hf_file_metadata(hf_hub_url(name, file, revision=revision))
    except EntryNotFoundError:
        pass  # a model without this file: its reader reports that
    except GatedRepoError:
        return f"its owner grants access by request; ask for it at https://hf.co/{name}, and set HF_TOKEN", None
    except RepositoryNotFoundError:
        return "there is none of this name, or it is private and needs HF_TOKEN", None
    except RevisionNotFoundError:
        return f"it has no revision {revision!r}", None
    except Exception as error:  # depends on the HTTP client that this release of the library uses
        return None, str(error).partition("\n")[0]
    return None, None


def _unreachable(failure: str | None) -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return f"HF_HUB_OFFLINE forbids a download (cache: {constants.HF_HUB_CACHE})"
    return f"the hub cannot be reached ({failure})"


def near(name: str) -> str:
    """A hint that names local models with a similar name."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cached = [repo.repo_id for repo in scan_cache_dir().repos if repo.repo_type == "model"]
    except CacheNotFound:
        cached = []
    is_begin = "/" not in name and DEFAULT_MODEL.startswith(name.lower())
    near = [DEFAULT_MODEL] if is_begin else difflib.get_close_matches(name, [DEFAULT_MODEL, *cached], n=2, cutoff=0.6)
    return f" Did you mean {' or '.join(near)}?" if near else ""
