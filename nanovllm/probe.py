"""Probes the attention layers in one small forward pass; refuses unsupported features by name."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from nanovllm.attention import SINKS, AttentionLayer
from nanovllm.errors import UnsupportedModelError
from nanovllm.layout import FULL, LayerTraits, Sight

PROBE_NAME = "nanovllm-probe"
PROBE_ARGUMENT = "nanovllm_probe"  # a keyword argument of the model, to see which layers receive it

# Ignored keyword arguments of the attention interface: dropout is off in eval mode, and the engine provides positions
# and masks.
_HARMLESS = {
    "cache_position", "dropout", "is_causal", "logits_to_keep", "output_attentions", "output_hidden_states",
    "output_router_logits", "past_key_values", "position_embeddings", "position_ids", "return_dict", "use_cache",
}  # fmt: skip
ATTENTION_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}  # attention's, among types of layers

MaskFunction = Callable[..., Tensor]  # (batch, head, query, key indices) -> whether the query sees the key


def refused(reason: str, subject: str, detail: str = "") -> UnsupportedModelError:
    """The error of an unsupported trait.

    Args:
        reason: key of `nanovllm.features.unsupported.REASONS`, which explains it.
        subject: the model, or its layer.
        detail: the observation, put in parentheses.
    """
    seen = f" ({detail})" if detail else ""
    return UnsupportedModelError(f"{subject} is not supported: {reason}{seen}.", reason=reason)


class Masks:
    """Masks of one forward pass: by default each row sees all earlier positions, and no layer has a window."""

    def make(self, mask_function: MaskFunction, *shape: int, device: torch.device) -> Tensor:
        """A placeholder [1, 1, num_queries, num_keys] for a mask."""
        return torch.zeros(1, 1, *shape, dtype=torch.bool, device=device)

    def check(self, layer: str, mask: Tensor) -> None:
        """Refuse a tensor that is neither a placeholder nor a view of one."""

    def sight(self, layer: str, mask: Tensor | None, window: int | None) -> Sight:
        """The positions that a layer's mask shows; refuses other masks, and another window in `sliding_window`."""
        if window is not None:
            raise refused("window of the mask", layer, f"a sliding window of {window} tokens")
        return FULL


@dataclass
class PassProbe:
    """One forward pass in which a probe replaces attention; records nothing.

    logits: [num_samples, vocab_size], set after the pass.
    """

    logits: Tensor = field(default_factory=partial(torch.empty, 0, 0))
    masks: Masks = field(default_factory=Masks)

    def record(self, *arguments: Any, **_: Any) -> None:
        """Record the next layer: module, query, key, value, scaling, mask and further arguments."""


@dataclass
class Probe(PassProbe):
    """Records the arguments of each attention layer in one forward pass, and refuses unimplemented features.

    Attributes:
        token_ids: tokens of the pass, at positions 0, 1, 2 and so on.
        sample_rows: rows with logits.
        attending: indices of layers with attention; None if the config does not tell.
        is_mixed: True if some layers may keep states instead of K and V.
        refused: function that makes the error of an unsupported trait, such as `refused`.
    """

    token_ids: Sequence[int] = (0, 0)
    sample_rows: Sequence[int] = (1,)
    attending: Sequence[int] | None = None
    is_mixed: bool = False
    refused: Callable[..., UnsupportedModelError] = refused
    layers: list[AttentionLayer] = field(default_factory=list)
    passes_keywords: bool = True  # True if keyword arguments of the model reach every attention layer
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
        """Record a layer; raises UnsupportedModelError, which names the layer and the unsupported feature."""
        name = f"layer {len(self.layers)} ({type(module).__name__})"
        if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
            raise self.refused("both directions", name)
        if any(layer.module is module for layer in self.layers):
            raise self.refused("repeated layers", name)
        if key.shape[:3] != value.shape[:3]:
            raise self.refused("uneven keys", name, f"{tuple(key.shape)} and {tuple(value.shape)}")
        if query.shape[2] != key.shape[2]:
            raise self.refused("other keys", name)
        self.passes_keywords &= PROBE_ARGUMENT in kwargs
        window, softcap, sinks = (kwargs.pop(extra, None) for extra in ("sliding_window", "softcap", SINKS))
        for argument, given in kwargs.items():
            is_off = given is None or (isinstance(given, (bool, int, float)) and not given)
            if not is_off and argument not in _HARMLESS:
                raise self.refused("unknown argument", name, repr(argument))
        if sinks is not None and sinks.shape != query.shape[1:2]:
            raise self.refused("unknown argument", name, f"sinks of {tuple(sinks.shape)}, not one a head")
        sight = self.masks.sight(name, mask, window or None)
        traits = LayerTraits(
            query.shape[1], key.shape[1], query.shape[3], value.shape[3], sight, softcap or None, sinks is not None,
            self._shared_with(key, value),
        )  # fmt: skip
        self._states.append((key, value))
        self.layers.append(AttentionLayer(module, traits, key.dtype, scaling))

    def _shared_with(self, key: Tensor, value: Tensor) -> int | None:
        """The earlier layer with the same K and V tensors, or None."""
        for index, states in enumerate(self._states):
            if all(one.data_ptr() == other.data_ptr() for one, other in zip(states, (key, value), strict=True)):
                return self.layers[index].traits.shares_of(index)
        return None


def plain_probe(model: Any) -> Probe:
    """The probe of a model in which every layer attends; refuses others by their type in the config."""
    text_config = model.config.get_text_config(decoder=True)
    for index, layer_type in enumerate(getattr(text_config, "layer_types", None) or ()):
        if layer_type not in ATTENTION_TYPES:
            layer = f"layer {index} of {type(model).__name__}"
            raise refused("layer type", layer, f"{layer_type!r} is not attention, such as a recurrent state")
    num_layers = getattr(text_config, "num_hidden_layers", None)
    return Probe(attending=None if num_layers is None else range(num_layers))


def probe_model(
    model: Any,
    probing: Probing,
    probe_for: Callable[[Any], Probe],
) -> Probe:
    """Probe a causal language model's attention layers with one batch; raises UnsupportedModelError.

    Args:
        probe_for: function that makes the probe of a model.
    """
    name = type(model).__name__
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) != 1:
        raise UnsupportedModelError(f"{name} is on several devices ({', '.join(devices)}); put it on one.")
    if model.get_output_embeddings() is None:
        raise UnsupportedModelError(f"{name} has no language model head, so it has no logits over tokens.")
    probe = probe_for(model)
    expected = None if probe.attending is None else len(probe.attending)
    parameters = inspect.signature(model.forward).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    failure: Exception | None = None
    token_ids, sample_rows = (torch.tensor(ids, device=devices[0]) for ids in (probe.token_ids, probe.sample_rows))
    with probing(probe):
        try:
            output = model(
                input_ids=token_ids[None],
                position_ids=torch.arange(len(token_ids), device=devices[0])[None],
                use_cache=False,
                logits_to_keep=sample_rows,  # steps pass it by this name, too
                return_dict=True,
                **({PROBE_ARGUMENT: None} if takes_any else {}),
            )
            probe.logits = output.logits[0].clone()
        except UnsupportedModelError:
            raise
        except Exception as error:
            failure = error
    if len(probe.layers) != expected and not probe.is_mixed and (failure is None or not probe.layers):
        failed = "" if failure is None else f", and a probe of {len(token_ids)} tokens failed ({failure})"
        seen = f"{len(probe.layers)} of {expected} layers reached the attention interface of `transformers`{failed}"
        raise probe.refused("own attention", f"{name} cannot be served: a layer of it", seen)
    if failure is not None:
        seen = f"could not run a probe of {len(token_ids)} tokens: {failure}"
        raise probe.refused("more inputs than tokens", name, seen) from failure
    return probe


Probing = Callable[[PassProbe], AbstractContextManager[None]]  # replaces a model's attention by a probe

_current = threading.local()


@contextmanager
def probing_with(probe: PassProbe) -> Iterator[None]:
    """Let attention layers of this thread report to `probe`."""
    _current.probe = probe
    try:
        yield
    finally:
        _current.probe = None


def probe_function(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Replaces attention: each token attends to itself alone."""
    if attention_mask is not None:
        _current.probe.masks.check(f"a layer of attention ({type(module).__name__})", attention_mask)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    _current.probe.record(module, query, key, value, scaling, attention_mask, dict(kwargs))
    own = value.transpose(1, 2)
    return own.repeat_interleave(query.shape[1] // value.shape[1], dim=2), None


def probe_mask(*, q_length: int, kv_length: int, mask_function: Any, device: torch.device, **kwargs: Any) -> Tensor:
    """Mask function for `transformers` during a probe: returns a placeholder."""
    return _current.probe.masks.make(mask_function, q_length, kv_length, device=device)


AttentionInterface.register(PROBE_NAME, probe_function)
AttentionMaskInterface.register(PROBE_NAME, probe_mask)
