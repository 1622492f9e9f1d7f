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

from nanovllm.attention.operator import SINKS, AttentionLayer
from nanovllm.errors import UnsupportedModelError
from nanovllm.layer_traits import LayerTraits, Sight
from nanovllm.model.mask_probe import MaskProbe, sizes_of

PROBE_NAME = "nanovllm-probe"
PROBE_ARGUMENT = "nanovllm_probe"  # among the model's keyword arguments, to see which layers get them

# Keyword arguments of the attention interface that change nothing here: dropout is off in eval mode, and positions
# and masks come from the engine.
_HARMLESS = {
    "cache_position", "dropout", "is_causal", "logits_to_keep", "output_attentions", "output_hidden_states",
    "output_router_logits", "past_key_values", "position_embeddings", "position_ids", "return_dict", "use_cache",
}  # fmt: skip
_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
_BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


@dataclass(slots=True)
class Probe:
    """Records what each attention layer passes on in one forward pass, and refuses what is not implemented."""

    masks: MaskProbe = field(default_factory=MaskProbe)
    layers: list[AttentionLayer] = field(default_factory=list)
    passes_keywords: bool = True  # whether the model's keyword arguments reach every attention layer
    _states: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # K and V of each layer

    def record(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        mask: Tensor | None,
        kwargs: dict[str, Any],
    ) -> None:
        """Raises UnsupportedModelError, which names the layer and what no attention backend computes."""
        name = f"layer {len(self.layers)} ({type(module).__name__})"
        if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
            raise UnsupportedModelError(f"{name} attends in both directions; only causal decoders are supported.")
        if any(layer.module is module for layer in self.layers):
            raise UnsupportedModelError(f"{name} attends more than once per forward pass; its layers share modules.")
        if key.shape[:3] != value.shape[:3]:
            raise UnsupportedModelError(
                f"{name} has keys of {tuple(key.shape)} and values of {tuple(value.shape)}; they must be of as many "
                "heads and tokens."
            )
        if query.shape[2] != key.shape[2]:
            raise UnsupportedModelError(f"{name} attends to other keys than its own tokens' (cross-attention).")
        self.passes_keywords &= PROBE_ARGUMENT in kwargs
        window, softcap, sinks = (kwargs.pop(extra, None) for extra in ("sliding_window", "softcap", SINKS))
        for argument, given in kwargs.items():
            is_off = given is None or (isinstance(given, (bool, int, float)) and not given)
            if not is_off and argument not in _HARMLESS:
                raise UnsupportedModelError(
                    f"{name} passes {argument!r} to attention, which no attention backend computes, and it is refused "
                    "rather than ignored. Use the model's own generate()."
                )
        if sinks is not None and sinks.shape != query.shape[1:2]:
            raise UnsupportedModelError(
                f"{name} has attention sinks of {tuple(sinks.shape)}; one for each of its {query.shape[1]} heads is "
                "implemented."
            )
        sight = self._sight(name, mask, window or None)
        traits = LayerTraits(
            query.shape[1], key.shape[1], query.shape[3], value.shape[3], *sight, softcap or None, sinks is not None,
            self._shared_with(key, value),
        )  # fmt: skip
        self._states.append((key, value))
        self.layers.append(AttentionLayer(module, traits, key.dtype, scaling))

    def _sight(self, name: str, mask: Tensor | None, window: int | None) -> Sight:
        """What the layer's mask lets it see, which the window that it names must not contradict."""
        sight = self.masks.sight(mask)
        if sight is None:
            raise UnsupportedModelError(
                f"{name} has an attention mask that is neither causal nor a sliding window nor in chunks, and no "
                "attention backend computes another. Use the model's own generate()."
            )
        if window is not None and sight.window != window:
            raise UnsupportedModelError(
                f"{name} names a sliding window of {window} tokens, but its attention mask has "
                f"{'none' if sight.window is None else sight.window}, so that its result depends on the attention "
                "implementation. Use the model's own generate()."
            )
        return sight

    def _shared_with(self, key: Tensor, value: Tensor) -> int | None:
        """The earlier layer that passed on the very same K and V."""
        for index, states in enumerate(self._states):
            if all(one.data_ptr() == other.data_ptr() for one, other in zip(states, (key, value), strict=True)):
                return self.layers[index].traits.shares_of(index)
        return None


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
    refuse_unknown_layer_types(name, text_config)
    probe, expected = Probe(MaskProbe(sizes_of(text_config))), text_config.num_hidden_layers
    parameters = inspect.signature(model.forward).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    failure: Exception | None = None
    with probing(probe):
        try:
            model(
                input_ids=torch.zeros(1, 2, dtype=torch.long, device=devices[0]),
                position_ids=torch.arange(2, device=devices[0])[None],
                use_cache=False,
                logits_to_keep=torch.ones(1, dtype=torch.long, device=devices[0]),  # the last row, named as in steps
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
    return probe


def positions_of(config: Any) -> int | None:
    """How many positions a text model has; None if its config does not say."""
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length"):
        limit = getattr(config, name, None)
        if limit:
            return int(limit)
    return None


def refuse_unknown_layer_types(name: str, text_config: Any) -> None:
    unknown = sorted(set(getattr(text_config, "layer_types", None) or ()) - _LAYER_TYPES)
    if unknown:
        raise UnsupportedModelError(f"{name} has layers of type {unknown[0]!r}, which are not implemented.")


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
    _current.probe, _current.masks = probe, probe.masks if isinstance(probe, Probe) else MaskProbe()
    try:
        yield
    finally:
        _current.probe = _current.masks = None


def probe_function(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Replaces attention: each token attends to itself alone."""
    if attention_mask is not None and not _current.masks.knows(attention_mask):
        raise UnsupportedModelError(
            f"{type(module).__name__} computes an attention mask of its own, which paged attention would ignore."
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    _current.probe.record(module, query, key, value, scaling, attention_mask, dict(kwargs))
    own = value.transpose(1, 2)
    return own.repeat_interleave(query.shape[1] // value.shape[1], dim=2), None


def probe_mask(*, q_length: int, kv_length: int, mask_function: Any, device: torch.device, **kwargs: Any) -> Tensor:
    """What `transformers` calls for each mask while a probe replaces attention."""
    return _current.masks.make(mask_function, q_length, kv_length, device=device)
