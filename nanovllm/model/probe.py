"""A probe of the attention layers in one small forward pass; unsupported features are refused by name."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.attention.operator import AttentionLayer
from nanovllm.errors import UnsupportedModelError

PROBE_NAME = "nanovllm-probe"
PROBE_ARGUMENT = "nanovllm_probe"  # among the model's keyword arguments, to see which layers get them

# Keyword arguments of the attention interface that change nothing here: dropout is off in eval mode, and positions
# and masks come from the engine.
_HARMLESS = {
    "cache_position", "dropout", "is_causal", "logits_to_keep", "output_attentions", "output_hidden_states",
    "output_router_logits", "past_key_values", "position_embeddings", "position_ids", "return_dict", "use_cache",
}  # fmt: skip
_BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}


@dataclass(slots=True)
class Probe:
    """Records what each attention layer passes on in one forward pass, and refuses what is not implemented."""

    layers: list[AttentionLayer] = field(default_factory=list)
    window: int | None = None
    passes_keywords: bool = True  # whether the model's keyword arguments reach every attention layer

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
        self.passes_keywords &= PROBE_ARGUMENT in kwargs
        window = kwargs.pop("sliding_window", None)
        if window:
            self.window = min(window, self.window or window)
        for argument, given in kwargs.items():
            is_off = given is None or (isinstance(given, (bool, int, float)) and not given)
            if not is_off and argument not in _HARMLESS:
                raise UnsupportedModelError(
                    f"{name} passes {argument!r} to attention, which is not implemented (soft-capping, sinks and other "
                    "extensions are refused rather than ignored)."
                )
        self.layers.append(AttentionLayer(module, query.shape[1], key.shape[1], query.shape[3], key.dtype, scaling))


def probe_model(model: Any, probing: Probing) -> Probe:
    """The attention layers of a causal language model; raises UnsupportedModelError."""
    name = type(model).__name__
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) != 1:
        raise UnsupportedModelError(f"{name} is on several devices ({', '.join(devices)}); put it on one.")
    refuse_batch_dependent_rope(model)
    if model.get_output_embeddings() is None:
        raise UnsupportedModelError(f"{name} has no language model head, so it has no logits over tokens.")
    text_config = model.config.get_text_config(decoder=True)
    probe, expected = Probe(window=window_of_masks(name, text_config)), text_config.num_hidden_layers
    parameters = inspect.signature(model.forward).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    failure: Exception | None = None
    with probing(probe):
        try:
            model(
                input_ids=torch.zeros(1, 2, dtype=torch.long, device=devices[0]),
                position_ids=torch.arange(2, device=devices[0])[None],
                use_cache=False,
                logits_to_keep=1,
                return_dict=True,
                **({PROBE_ARGUMENT: None} if takes_any else {}),
            )
        except UnsupportedModelError:
            raise
        except Exception as error:
            failure = error
    if len(probe.layers) != expected and (failure is None or not probe.layers):
        failed = "" if failure is None else f", and the probe of two tokens ended with an error ({failure})"
        raise UnsupportedModelError(
            f"{name} cannot be served: {len(probe.layers)} of {expected} layers reached the attention interface of "
            f"`transformers`{failed}. The others compute attention in code of their own or keep another state, which "
            "paged attention cannot replace."
        )
    if failure is not None:
        raise UnsupportedModelError(f"{name} could not run a probe of two tokens: {failure}") from failure
    shapes = {(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in probe.layers}
    if len(shapes) > 1:
        raise UnsupportedModelError(f"{name} has attention layers of different shapes: {sorted(shapes)}.")
    return probe


def positions_of(config: Any) -> int | None:
    """How many positions a text model has; None if its config does not say."""
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length"):
        limit = getattr(config, name, None)
        if limit:
            return int(limit)
    return None


def window_of_masks(name: str, text_config: Any) -> int | None:
    """The window that the library's masks alone apply, which paged attention does not read.

    Attention in chunks counts as one: within a chunk it is plain causal attention.
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


@dataclass(slots=True)
class StateProbe:
    """Records the q, k and v of each attention layer: name to states [num_rows, heads, head_dim]."""

    states: dict[str, Tensor] = field(default_factory=dict)

    def record(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> None:
        layer = len(self.states) // 3
        for name, tensor in (("queries", query), ("keys", key), ("values", value)):
            self.states[f"{name} of layer {layer}"] = tensor[0].transpose(0, 1).clone()


AnyProbe = Probe | StateProbe
Probing = Callable[[AnyProbe], AbstractContextManager[None]]  # replaces a model's attention by a probe

_current = threading.local()


@contextmanager
def probing_with(probe: AnyProbe) -> Iterator[None]:
    """Attention layers of this thread report to `probe`."""
    _current.probe = probe
    try:
        yield
    finally:
        _current.probe = None


def probe_function(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Replaces attention: each token attends to itself alone."""
    if attention_mask is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} computes an attention mask of its own, which paged attention would ignore."
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    _current.probe.record(module, query, key, value, scaling, dict(kwargs))
    own = value.transpose(1, 2)
    return own.repeat_interleave(query.shape[1] // value.shape[1], dim=2), None
