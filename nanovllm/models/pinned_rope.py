"""Pins rotary embeddings that depend on the batch's longest sequence to one set of frequencies per engine.

`transformers` chooses frequencies by the batch's largest position and writes them into the module. In a flat batch a
request's result would then depend on its neighbours, and cached keys on the batch that computed them.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanovllm.features.unsupported import unsupported
from nanovllm.model import Change, Rope, lock_of

logger = logging.getLogger("nanovllm")

_BATCH_DEPENDENT = ("dynamic", "longrope")


class PinnedRope(Rope):
    """Pinned frequencies of a model, as patches that are applied while a step runs; the owner's buffers stay.

    `choice` is "long", "short" or "" (no choice).
    """

    def __init__(self, model: nn.Module) -> None:
        self._name, self._lock = type(model).__name__, lock_of(model)
        self.changes: list[Change] = []
        with self._lock:  # another engine's step patches the module
            self._found = [(module, kinds) for module in model.modules() if (kinds := _batch_dependent_kinds(module))]
            self.pin(None)

    def pin(self, max_model_len: int | None) -> None:
        """Choose the frequencies for sequences of up to max_model_len tokens; None for a probe's few.

        "longrope" (Phi-3): as in vLLM, the short factors if max_model_len is within the original length, else the long
        ones for all sequences. "dynamic": the plain frequencies; raises UnsupportedModelError if max_model_len exceeds
        the original length, since beyond it each length has other frequencies.
        """
        with self._lock:
            self.changes = []
            chosen: set[str] = set()
            for module, kinds in self._found:
                for layer_type, kind in kinds.items():
                    if kind == "longrope":
                        original = int(_parameters(module, layer_type)["original_max_position_embeddings"])
                        is_long = max_model_len is not None and max_model_len > original
                        self.choice = "long" if is_long else "short"
                        chosen.add(f"the {self.choice} factors (original length {original})")
                        self.changes += _pinned(module, layer_type, is_long=is_long, original=original)
                    else:
                        self._check_dynamic(module, max_model_len)
                        self.changes += _pinned(module, layer_type, is_long=False, original=0)
                self.changes.append((vars(module), "rope_type", _plain_kinds(module)))
        if max_model_len is not None and chosen:
            logger.info(
                "rotary embeddings of %s: %s at every length, since max_model_len is %d",
                self._name, " and ".join(sorted(chosen)), max_model_len,
            )  # fmt: skip

    def _check_dynamic(self, module: Any, max_model_len: int | None) -> None:
        original = int(module.original_max_seq_len)
        if max_model_len is not None and max_model_len > original:
            seen = f"beyond {original} tokens, so that a request's result would depend on its neighbours; "
            raise unsupported("dynamic rope", self._name, f"{seen}max_model_len ({max_model_len})")


def _batch_dependent_kinds(module: Any) -> dict[str | None, str]:
    """Batch-dependent rope types of a rotary module, by layer type (None: all layers)."""
    kinds = getattr(module, "rope_type", None)
    by_layer_type = kinds if isinstance(kinds, dict) else {None: kinds}
    return {
        layer_type: name
        for layer_type, kind in by_layer_type.items()
        for name in _BATCH_DEPENDENT
        if isinstance(kind, str) and name in kind
    }


def _plain_kinds(module: Any) -> Any:
    """The module's `rope_type`, with "default" for batch-dependent types."""
    if not isinstance(module.rope_type, dict):
        return "default"
    return module.rope_type | dict.fromkeys(_batch_dependent_kinds(module), "default")


def _parameters(module: Any, layer_type: str | None) -> dict[str, Any]:
    parameters: dict[str, Any] = module.config.rope_parameters
    return parameters if layer_type is None else parameters[layer_type]


def _pinned(module: Any, layer_type: str | None, *, is_long: bool, original: int) -> list[Change]:
    prefix = "" if layer_type is None else f"{layer_type}_"
    frequencies: Tensor = getattr(module, f"{prefix}original_inv_freq")
    device = module._buffers[f"{prefix}inv_freq"].device
    if is_long:
        compute = ROPE_INIT_FUNCTIONS["longrope"]
        frequencies, _ = compute(module.config, device, seq_len=original + 1, layer_type=layer_type)
    with torch.inference_mode(False):  # an inference tensor would serve only inside a caller's inference mode
        frequencies = frequencies.detach().to(device, copy=True)
    changes: list[Change] = [(module._buffers, f"{prefix}inv_freq", frequencies)]
    return changes + _pinned_scale(module, is_long=is_long)


def _pinned_scale(module: Any, *, is_long: bool) -> list[Change]:
    """Changes for a module that computes frequencies in each pass, scaled by the longest sequence (Phi-3.5-MoE)."""
    compute = vars(module).get("rope_init_fn")
    if compute is None:
        return []
    frequencies, scale = compute(module.config)
    scale = module.config.rope_parameters.get("long_mscale" if is_long else "short_mscale", scale)
    config = copy.copy(module.config)
    config.rope_parameters = module.config.rope_parameters | {"rope_type": "default"}
    return [
        (vars(module), "config", config),
        (vars(module), "rope_init_fn", lambda config: (frequencies, scale)),
    ]
