"""Loads a quantised checkpoint: kept, or with plain weights; the log tells their bytes."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.utils import cached_file

from nanovllm.errors import UnsupportedModelError
from nanovllm.features.engine_config import QUANTISED_ON_LOAD, EngineConfig
from nanovllm.features.headless import Reader
from nanovllm.models.headers import INDEX, SINGLE
from nanovllm.models.quantised.stored import StoredWeights
from nanovllm.models.quantised.stored_config import Checkpoint

logger = logging.getLogger("nanovllm")


def reading(
    source: str,
    folder: Path,
    model_config: Any,
    checkpoint: Checkpoint,
    config: EngineConfig,
    options: dict[str, Any],
    *,
    is_kept: bool,
    is_sharded: bool = False,
) -> Reader:
    """Reads a checkpoint, which is checked by its headers now; logs the bytes of one that is dequantised.

    Args:
        options: arguments of `from_pretrained`.
        is_kept: weights stay quantised where kernels multiply them.
        is_sharded: they are cut among ranks first.

    Raises ModelLoadError, and UnsupportedModelError for weights that are to be kept and cannot be.
    """
    from nanovllm.models.quantised.reader import load

    weights = StoredWeights(source, folder, checkpoint)
    dtype = _dtype_of(model_config, config)
    keeps = is_kept and weights.kept[0] > 0
    if config.quantization == "keep" and not keeps:
        name, weight = next(iter(weights.quantised.items()))
        reason = weight.layout.why_not_kept or "no kernel multiplies it"
        raise UnsupportedModelError(
            f"quantization is 'keep', but no weight of {source} ({checkpoint}) has a quantised form here; {name}: "
            f"{reason}. Set it to 'dequantize', or leave it out."
        )
    if not keeps:
        _log_bytes(source, checkpoint, weights, dtype, config.quantization)
    if weights.num_unused:
        logger.info(
            "%s has %d scales of activations, K and V, which are not used: none is quantised by a fixed scale here",
            source, weights.num_unused,
        )  # fmt: skip
    return partial(
        load, source=source, weights=weights, config=model_config, dtype=dtype, options=options, keeps=keeps,
        is_sharded=is_sharded,
    )  # fmt: skip


def check_split(source: str, folder: Path, checkpoint: Checkpoint, names: Iterable[str], config: EngineConfig) -> None:
    """Check that ranks cut the inputs of kept layers in whole runs; one log line counts the layers they dequantise.

    Args:
        names: layers with sharded inputs, or the parameters of several experts.

    Raises UnsupportedModelError for one of another size, if all are to be kept.
    """
    quantised = StoredWeights(source, folder, checkpoint).quantised
    reasons = {}
    for name in names:
        path, _, last = name.rpartition(".")
        found = [each for each in (f"{name}.weight", name, f"{path}.0.{last}.weight") if each in quantised]
        layout = quantised[found[0]].layout if found else None
        if layout is not None and not layout.why_not_kept:
            width = layout.form.width // config.tensor_parallel_size
            reason = "its inputs are sorted (act-order)" if layout.order is not None else ""
            if reason := reason or layout.form.why_not_split(width, 2 * width):
                reasons[name] = reason
    if not reasons:
        return
    name = next(iter(reasons))
    message = f"tensor_parallel_size is {config.tensor_parallel_size}, and {name} cannot be cut so: {reasons[name]}"
    if config.quantization == "keep":
        raise UnsupportedModelError(
            f"quantization is 'keep', but {message}. Leave it out, or set tensor_parallel_size to 1."
        )
    logger.warning("%d layers of %s are dequantised: %s", len(reasons), source, message)


def _log_bytes(
    source: str, checkpoint: Checkpoint, weights: StoredWeights, dtype: torch.dtype, option: str | None
) -> None:
    """Log the bytes of weights that are dequantised: a warning if nobody asked for it."""
    if option in QUANTISED_ON_LOAD:
        logger.info(
            "the weights of %s (%s, %.2f GB) are dequantised, and quantised to %s as they are loaded",
            source, checkpoint, weights.num_stored_bytes / 1e9, option,
        )  # fmt: skip
        return
    logger.log(
        logging.WARNING if option is None else logging.INFO,
        "the weights of %s (%s) are dequantised: %.2f GB stored, %.2f GB in %s",
        source, checkpoint, weights.num_stored_bytes / 1e9, weights.num_weights * dtype.itemsize / 1e9,
        str(dtype).removeprefix("torch."),
    )  # fmt: skip


def _dtype_of(model_config: Any, config: EngineConfig) -> torch.dtype:
    """The dtype of the plain weights; "auto" is the config's own, bfloat16 without one."""
    if config.dtype != "auto":
        dtype: torch.dtype = getattr(torch, config.dtype)
        return dtype
    stated = getattr(model_config, "dtype", None)
    if not isinstance(stated, torch.dtype):
        stated = getattr(model_config.get_text_config(decoder=True), "dtype", None)
    return stated if stated in (torch.float32, torch.float16, torch.bfloat16) else torch.bfloat16


def folder_of(source: str, options: dict[str, Any]) -> Path:
    """The folder with a model's weights, which are fetched for a hub id."""
    if os.path.isdir(source):
        return Path(source)
    lookups = {key: options[key] for key in ("local_files_only", "revision") if key in options}
    silent = dict.fromkeys(("_raise_exceptions_for_missing_entries", "_raise_exceptions_for_connection_errors"), False)
    index = cached_file(source, INDEX, **silent, **lookups)
    if index is None:
        single = cached_file(source, SINGLE, **silent, **lookups)
        return Path(single or cached_file(source, "config.json", **lookups)).parent
    from huggingface_hub import snapshot_download

    names = set(json.loads(Path(index).read_bytes())["weight_map"].values())
    return Path(snapshot_download(source, allow_patterns=[INDEX, *sorted(names)], **lookups))
