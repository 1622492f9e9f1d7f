"""Loads a quantised checkpoint: kept, or with plain weights; the log tells their bytes."""

from __future__ import annotations

import copy
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch
from transformers.utils import cached_file

from nanovllm.errors import UnsupportedModelError
from nanovllm.features.engine_config import QUANTISED_ON_LOAD, EngineConfig
from nanovllm.features.headless import Reader
from nanovllm.models.headers import INDEX, SINGLE, read_headers
from nanovllm.models.quantised.stored_config import Checkpoint, checkpoint_of

logger = logging.getLogger("nanovllm")


def keeping(
    model_class: Any, source: str, model_config: Any, *, keeps: bool = True, is_asked: bool = True, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """(module, report of its load) of a checkpoint with weights that stay quantised where kernels multiply them.

    Args:
        keeps: False to dequantise all weights.
        is_asked: False if nobody asked for that: its bytes are a warning.
        options: arguments of `from_pretrained`.

    Raises UnsupportedModelError for tensors of no layout, before any weight is read.
    """
    from nanovllm.models.quantised.checkpoint import settings_of
    from nanovllm.models.quantised.reader import config_to_keep, why_not_read

    if (reason := why_not_read(settings_of(model_config.quantization_config))) is not None:
        raise UnsupportedModelError(f"the weights of {source} are not read: {reason}.")
    config = copy.deepcopy(model_config)
    config.quantization_config = config_to_keep(settings_of(model_config.quantization_config), keeps=keeps)
    found: tuple[Any, dict[str, Any]] = model_class.from_pretrained(source, config=config, **options)
    if not keeps:
        stored = sum(tensor.num_bytes for tensor in read_headers(folder_of(source, options)).values())
        num_bytes = sum(parameter.nbytes for parameter in found[0].parameters())
        logger.log(
            logging.INFO if is_asked else logging.WARNING,
            "the weights of %s (%s) are dequantised: %.2f GB stored, %.2f GB in %s",
            source, checkpoint_of(model_config), stored / 1e9, num_bytes / 1e9,
            str(found[0].dtype).removeprefix("torch."),
        )  # fmt: skip
    return found


def dequantising(
    source: str, folder: Path, model_config: Any, checkpoint: Checkpoint, config: EngineConfig, options: dict[str, Any]
) -> Reader:
    """Loads plain weights of a checkpoint, which is checked by its headers now; logs its bytes, stored and plain.

    Args:
        options: arguments of `from_pretrained`.

    Raises MissingLibraryError and ModelLoadError.
    """
    from nanovllm.models.quantised.dequantised import StoredWeights, load_plain

    weights = StoredWeights(source, folder, checkpoint)
    dtype = _dtype_of(model_config, config)
    num_bytes = weights.num_weights * dtype.itemsize
    name = str(dtype).removeprefix("torch.")
    if config.quantization in QUANTISED_ON_LOAD:
        logger.info(
            "the weights of %s (%s, %.2f GB) are dequantised, and quantised to %s as they are loaded",
            source, checkpoint, weights.num_stored_bytes / 1e9, config.quantization,
        )  # fmt: skip
    else:
        level = logging.WARNING if config.quantization is None else logging.INFO
        logger.log(
            level, "the weights of %s (%s) are dequantised: %.2f GB stored, %.2f GB in %s",
            source, checkpoint, weights.num_stored_bytes / 1e9, num_bytes / 1e9, name,
        )  # fmt: skip
    if weights.num_unused:
        logger.info(
            "%s has %d scales of activations, K and V, which are not used: none is quantised by a fixed scale here",
            source, weights.num_unused,
        )  # fmt: skip
    return lambda model_class: load_plain(model_class, source, weights, model_config, dtype, options)


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
        return Path(cached_file(source, SINGLE, **lookups)).parent
    from huggingface_hub import snapshot_download

    names = set(json.loads(Path(index).read_bytes())["weight_map"].values())
    return Path(snapshot_download(source, allow_patterns=[INDEX, *sorted(names)], **lookups))
