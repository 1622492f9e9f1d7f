"""Loads model, config and tokenizer from a GGUF file, under the engine's options."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import PreTrainedConfig

from nanovllm.errors import ModelLoadError, UnsupportedModelError
from nanovllm.features.engine_config import QUANTISED_ON_LOAD, EngineConfig
from nanovllm.models.exact_activations import check_exact_activations
from nanovllm.models.gguf.file import open_gguf
from nanovllm.models.gguf.tokenizer import build_tokenizer
from nanovllm.models.gguf.weights import dtype_of, load_model, model_config

logger = logging.getLogger("nanovllm")


def load_module(source: str, config: EngineConfig, device: torch.device, *, is_sharded: bool) -> Any:
    """Load the file's model on the CPU.

    Weights stay in blocks for an unsharded engine on a device with kernels for them, unless they are to be dequantised:
    a shard could cut one.

    Raises ModelLoadError and UnsupportedModelError, and ValueError for options that contradict a GGUF file.
    """
    if config.quantization in QUANTISED_ON_LOAD:
        raise ValueError(
            f"quantization is {config.quantization!r}, but a GGUF file's weights are quantised as they are in it. "
            "Leave quantization out."
        )
    if config.trust_remote_code:
        raise ValueError("trust_remote_code is about code that comes with a model; a GGUF file has none. Leave it out.")
    file = open_gguf(source)
    if config.exact_activations:
        check_exact_activations(config, source, device.type)
    keeps_blocks = why_not_blocks(device) is None and not is_sharded and config.quantization != "dequantize"
    if config.quantization == "keep" and not keeps_blocks:
        raise ValueError(
            "quantization is 'keep', but blocks of a GGUF file have kernels in one process alone, on a CPU and on GPUs "
            f"of capability 9.0 and later; the device is {device}{', of several ranks' if is_sharded else ''}. "
            "Set it to 'dequantize', leave it out, or set device='cpu'."
        )
    dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
    try:
        with torch.inference_mode(False):
            return load_model(file, dtype, keeps_blocks=keeps_blocks)
    except (KeyError, RuntimeError) as error:
        raise ModelLoadError(f"the model {source!r} could not be loaded: {error}") from error


def why_not_blocks(device: torch.device) -> str | None:
    """Why a device has no kernels for blocks; None if it has."""
    if device.type == "cpu":
        return None
    from nanovllm.models.quantised.tiled import why_not_packed

    return why_not_packed(device)


def config_of(source: str) -> PreTrainedConfig:
    """The config of the file's model, with its dtype; raises ModelLoadError and UnsupportedModelError."""
    file = open_gguf(source)
    config = model_config(file)
    config.dtype = dtype_of(file)
    return config


def load_tokenizer(source: str) -> Any:
    """The file's tokenizer; raises ModelLoadError."""
    try:
        return build_tokenizer(open_gguf(source))
    except (ModelLoadError, UnsupportedModelError):
        raise
    except Exception as error:  # `tokenizers` raises bare Exceptions, with many lines
        reason = str(error).partition("\n")[0]
        raise ModelLoadError(f"{source} has a damaged tokenizer: {reason}. Pass tokenizer=...") from error
