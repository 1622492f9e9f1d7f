"""Refuses options that contradict a model's config, before its weights are read; without torch."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nanovllm.core.config import EngineConfig
from nanovllm.core.errors import ModelLoadError, UnsupportedModelError
from nanovllm.model.exact_activations import check_exact_activations
from nanovllm.model.source import is_gguf


def positions_of(config: Any) -> int | None:
    """Number of positions of a text model; None if its config has no such field."""
    return _first(config, "max_position_embeddings", "n_positions", "max_sequence_length")


def check_limits(config: Any, options: EngineConfig) -> None:
    """Check the options against a text model's config; fields that it lacks are not checked.

    Raises ValueError for a limit that exceeds the model's or contradicts another, UnsupportedModelError if the number
    of heads is not divisible among the ranks.
    """
    positions = positions_of(config)
    if positions is not None:  # no contradiction depends on the device
        options.resolve_limits("cpu", positions)
    heads, size = _first(config, "num_attention_heads", "n_head"), options.tensor_parallel_size
    if heads is not None and heads % size:
        keys = _first(config, "num_key_value_heads") or heads
        possible = [n for n in range(1, heads + 1) if heads % n == 0 and (keys % n == 0 or n % keys == 0)]
        raise UnsupportedModelError(
            f"tensor_parallel_size is {size}, but the model has {heads} attention heads, {keys} key and value heads, "
            f"which do not divide among so many ranks. It can be at most one of {', '.join(map(str, possible))}."
        )


def check_stored_limits(source: str, options: EngineConfig) -> None:
    """As `check_limits`, for a config on disk: of a folder, GGUF file or cached hub model; skipped if there is none."""
    if options.exact_activations:
        check_exact_activations(options, source)
    if is_gguf(source):
        from nanovllm.model.gguf.config import read_config
        from nanovllm.model.gguf.file import open_gguf

        found: Any = read_config(open_gguf(source))
    else:
        path = Path(source) / "config.json"
        if not path.is_file():
            from huggingface_hub import try_to_load_from_cache

            cached = try_to_load_from_cache(source, "config.json", revision=options.revision)
            if not isinstance(cached, str):
                return
            path = Path(cached)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ModelLoadError(f"the model {source!r} could not be loaded: {path} is not JSON: {error}") from None
    if isinstance(found, dict):
        text = found.get("text_config")
        check_limits(SimpleNamespace(**(text if isinstance(text, dict) else found)), options)


def _field(config: Any, name: str) -> Any:
    """A field of a config; None for one that it lacks, or that differs by layer, for which `transformers` raises."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None


def _first(config: Any, *names: str) -> int | None:
    values = (_field(config, name) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)
