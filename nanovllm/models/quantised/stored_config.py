"""Quantised checkpoints by their config alone: formats, and whether they are kept or dequantised; without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm.errors import UnsupportedModelError
from nanovllm.features.engine_config import QUANTISED_ON_LOAD

# Methods that are read; their weights are kept where kernels multiply them.
METHODS = ("compressed-tensors", "fp8", "mxfp8", "fbgemm_fp8", "modelopt", "gptq", "awq", "mxfp4")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's config about its stored weights.

    method: quant_method, such as "compressed-tensors". settings: the whole quantization_config.
    """

    method: str
    settings: Mapping[str, Any]

    def __str__(self) -> str:
        """Method, format and bits, as for the log: "compressed-tensors pack-quantized, 4 bits"."""
        bits = " and ".join(map(str, sorted(_bits_of(self.settings))))
        form = self.settings.get("format") or self.settings.get("quant_algo") or ""
        named = self.method if not isinstance(form, str) or not form else f"{self.method} {form}"
        return f"{named}, {bits} bits" if bits else named

    @property
    def is_read(self) -> bool:
        return self.method in METHODS


_BITS_OF_METHODS = {"fp8": 8, "mxfp8": 8, "fbgemm_fp8": 8, "mxfp4": 4}


def _bits_of(settings: Mapping[str, Any]) -> set[int]:
    groups = settings.get("config_groups")
    if isinstance(groups, Mapping):
        weights = [group.get("weights") for group in groups.values() if isinstance(group, Mapping)]
        found = [each.get("num_bits") for each in weights if isinstance(each, Mapping)]
    else:
        found = [settings.get("bits") or _BITS_OF_METHODS.get(str(settings.get("quant_method")))]
    return {bits for bits in found if isinstance(bits, int)}


def checkpoint_of(config: Any) -> Checkpoint | None:
    """The quantisation that a config names, a mapping or an object of the library; None for plain weights."""
    settings = config.get("quantization_config") if isinstance(config, Mapping) else None
    if not isinstance(config, Mapping):
        settings = getattr(config, "quantization_config", None)
    if not settings:
        return None
    settings = settings if isinstance(settings, Mapping) else vars(settings)
    method = settings.get("quant_method")
    if method is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        method = "bitsandbytes"
    return Checkpoint(str(getattr(method, "value", method)), settings)


def keeps(source: str, model_config: Any, option: str | None, device: str) -> bool:
    """Whether a checkpoint's weights may stay quantised; False for plain and for dequantised ones.

    Args:
        model_config: config of the model, a mapping or an object of the library.
        option: value of `quantization`.
        device: type of the device.

    Raises ValueError for an option that contradicts the checkpoint, and UnsupportedModelError for weights that are to
    be kept and cannot be.
    """
    checkpoint = checkpoint_of(model_config)
    check_contradiction(source, checkpoint, option)
    if checkpoint is None or option == "dequantize" or option in QUANTISED_ON_LOAD:
        return False
    has_kernels = device in ("cpu", "cuda") and checkpoint.method in METHODS
    if option == "keep" and not has_kernels:
        raise UnsupportedModelError(
            f"quantization is 'keep', but the weights of {source} ({checkpoint}) have no quantised form here on "
            f"{device}. Set it to 'dequantize', or leave it out."
        )
    return has_kernels


def check_contradiction(source: str, checkpoint: Checkpoint | None, option: str | None) -> None:
    """Raise ValueError for an option about quantised checkpoints where the checkpoint is not quantised."""
    if checkpoint is None and option in ("keep", "dequantize"):
        raise ValueError(
            f"quantization is {option!r}, but the weights of {source} are not quantised (its config.json has no "
            "quantization_config). Leave it out, or set 'int8' or 'int4', which quantise them as they are loaded."
        )
