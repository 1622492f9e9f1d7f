"""What attention layers hand over, learnt in one small forward pass; what cannot be served is refused by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

PROBE_NAME = "nanovllm-probe"
PROBE_ARGUMENT = "nanovllm_probe"

# Keyword arguments of the attention interface that change nothing here: dropout is off in eval mode, and positions
# and masks come from the engine.
_HARMLESS = {
    "cache_position", "dropout", "is_causal", "logits_to_keep", "output_attentions", "output_hidden_states",
    "output_router_logits", "past_key_values", "position_embeddings", "position_ids", "return_dict", "use_cache",
}  # fmt: skip
_BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}


class UnsupportedModelError(ValueError):
    """The model does something in attention that the engine does not implement; the message names it."""


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One attention module and what it hands over."""

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scaling: float  # of the scores


@dataclass(slots=True)
class Probe:
    """Notes what each attention layer hands over in one forward pass, and refuses what is not implemented."""

    layers: list[AttentionLayer] = field(default_factory=list)
    window: int | None = None

    def record(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float, kwargs: dict[str, Any]
    ) -> None:
        name = type(module).__name__
        if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
            raise UnsupportedModelError(f"{name} attends in both directions; only causal decoders are supported.")
        if any(layer.module is module for layer in self.layers):
            raise UnsupportedModelError(f"{name} attends more than once per forward pass; its layers share modules.")
        if key.shape != value.shape:
            raise UnsupportedModelError(
                f"{name} has keys of {tuple(key.shape)} and values of {tuple(value.shape)}; they must be alike."
            )
        if query.shape[2] != key.shape[2]:
            raise UnsupportedModelError(f"{name} attends to other keys than its own tokens' (cross-attention).")
        window = kwargs.pop("sliding_window", None)
        if window:
            self.window = min(window, self.window or window)
        for argument, given in kwargs.items():
            if (
                argument in _HARMLESS
                or argument == PROBE_ARGUMENT
                or given is None
                or (isinstance(given, (bool, int, float)) and not given)
            ):
                continue
            raise UnsupportedModelError(
                f"{name} passes {argument!r} to attention, which is not implemented (soft-capping, sinks and other "
                "extensions are refused rather than ignored)."
            )
        shape = (query.shape[1], key.shape[1], query.shape[3])
        self.layers.append(AttentionLayer(module, *shape, key.dtype, scaling))


def window_of_masks(name: str, text_config: Any) -> int | None:
    """The window that reaches attention layers through the library's masks alone, which paged attention never sees.

    Attention in chunks counts as one too: within one chunk it is plain causal attention.
    """
    layer_types = set(getattr(text_config, "layer_types", None) or ())
    unknown = sorted(layer_types - _LAYER_TYPES)
    if unknown:
        raise UnsupportedModelError(f"{name} has layers of type {unknown[0]!r}, which are not implemented.")
    slides = "sliding_attention" in layer_types if layer_types else getattr(text_config, "use_sliding_window", True)
    windows = [getattr(text_config, "sliding_window", None)] if slides else []
    windows.append(getattr(text_config, "attention_chunk_size", None))
    return min((window for window in windows if window), default=None)


def refuse_batch_dependent_rope(model: nn.Module) -> None:
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)  # one, or one for each type of layer
        batch_dependent = _BATCH_DEPENDENT_ROPE.intersection(
            rope_type.values() if isinstance(rope_type, dict) else [rope_type]
        )
        if batch_dependent:
            raise UnsupportedModelError(
                f"{type(model).__name__} uses {min(batch_dependent)!r} rotary embeddings, whose frequencies depend on "
                "the longest sequence of the batch; a request's result would depend on its neighbours."
            )


def probe_function(module, query, key, value, attention_mask, scaling=None, **kwargs):
    probe = kwargs.get(PROBE_ARGUMENT)
    if probe is None:
        raise UnsupportedModelError(f"{type(module).__name__} does not receive the model's keyword arguments.")
    if attention_mask is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} computes an attention mask of its own, which paged attention would ignore."
        )
    probe.record(module, query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling, dict(kwargs))
    return query.new_zeros(1, query.shape[2], query.shape[1], query.shape[3]), None
