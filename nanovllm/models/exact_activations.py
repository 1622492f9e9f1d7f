"""Refuses `exact_activations` where no weights are multiplied as bytes; without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanovllm.features.engine_config import QUANTISED_ON_LOAD, EngineConfig
from nanovllm.features.refusals import TENSOR_PARALLEL, refuse
from nanovllm.models.source import is_gguf


def _stays_quantised(config: EngineConfig, source: str, stored: Mapping[str, Any] | None) -> bool:
    """Whether weights that are stored quantised are computed with."""
    from nanovllm.models.quantised.stored_config import METHODS, checkpoint_of

    checkpoint = None if stored is None else checkpoint_of(stored)
    is_kept = checkpoint is not None and checkpoint.method in METHODS
    return config.quantization != "dequantize" and (is_gguf(source) or is_kept)


def check_exact_activations(
    config: EngineConfig, source: str | None, device: str | None = None, *, stored: Mapping[str, Any] | None = None
) -> None:
    """Raise ValueError if the option, set in `config`, changes nothing, as far as is known before the model is loaded.

    Args:
        source: model source as `find` returns it; None for a loaded module.
        device: device of the weights where it is known; None takes the one in `config`.
        stored: the model's config.json, where it is known.
    """
    if config.tensor_parallel_size > 1:
        refuse("exact_activations", TENSOR_PARALLEL)
    device = device or config.device
    if source is None:
        reason = "the model is a loaded module"
        remedy = "save it (save_pretrained), pass the folder, set quantization"
    elif device.startswith("cuda"):
        reason = f"the device is {device!r}"
        remedy = "set device='cpu'"
    elif config.attention_backend not in ("auto", "cpp"):
        reason = f"attention_backend is {config.attention_backend!r}"
        remedy = "set attention_backend='cpp'"
    elif config.enforce_eager:
        reason = "enforce_eager is True"
        remedy = "drop enforce_eager"
    elif config.quantization == "fp8":
        reason = "quantization is 'fp8', whose products are a GPU's"
        remedy = "set quantization='int8' or 'int4'"
    elif config.quantization not in QUANTISED_ON_LOAD and not _stays_quantised(config, source, stored):
        reason = f"the weights of {source} are not quantised"
        remedy = "set quantization='int8' or 'int4'"
    else:
        return
    raise ValueError(
        f"exact_activations is True, but {reason}, so no weights are multiplied as bytes. Leave it out, or {remedy}."
    )
