"""Hooks a `transformers` module to paged attention, and leaves it exactly as it was when unhooked.

A probe pass at construction learns what each layer hands to attention; what cannot be served is refused by name.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from nanovllm.attention.flex import own_code
from nanovllm.attention.operator import ATTENTION_NAME, KEY_CACHE, STEP_HANDLE, VALUE_CACHE, attention_function

PROBE_NAME = "nanovllm-probe"
PROBE_ARGUMENT = "nanovllm_probe"

# Keyword arguments of the attention interface that change nothing here: dropout is off in eval mode, and positions
# and masks come from the engine.
_HARMLESS = {
    "cache_position", "dropout", "is_causal", "logits_to_keep", "output_attentions", "output_hidden_states",
    "output_router_logits", "past_key_values", "position_embeddings", "position_ids", "return_dict", "use_cache",
}  # fmt: skip
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


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


@dataclass(slots=True)
class _Probe:
    layers: list[AttentionLayer] = field(default_factory=list)
    window: int | None = None

    def record(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> None:
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
        self.layers.append(AttentionLayer(module, query.shape[1], key.shape[1], query.shape[3], key.dtype))


def _probe_function(module, query, key, value, attention_mask, scaling=None, **kwargs):
    probe = kwargs.get(PROBE_ARGUMENT)
    if probe is None:
        raise UnsupportedModelError(f"{type(module).__name__} does not receive the model's keyword arguments.")
    if attention_mask is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} computes an attention mask of its own, which paged attention would ignore."
        )
    probe.record(module, query, key, value, dict(kwargs))
    return query.new_zeros(1, query.shape[2], query.shape[1], query.shape[3]), None


# No mask function is registered for these names, so the library builds no mask and never inspects positions.
AttentionInterface.register(ATTENTION_NAME, attention_function)
AttentionInterface.register(PROBE_NAME, _probe_function)

_handles = itertools.count()


class ModelBinding:
    """A model, its attention layers, and the means to put paged attention in force for the length of a step.

    Args:
        model: a causal language model of `transformers`, not copied and not changed outside of `installed`.
        is_live: True for a module that its owner goes on using (training): everything is undone after each step.
    """

    def __init__(self, model: Any, *, is_live: bool) -> None:
        self.model = model
        self.is_live = is_live
        self.handle = next(_handles)
        with torch.inference_mode(False):
            self._handle_tensor = torch.tensor([self.handle])  # read inside the operator, on the host
        self._caches: list[tuple[Tensor, Tensor]] = []
        self._compiled_layer: Any = None
        self._undo: list[tuple[dict[str, Any], str, Any]] = []
        self._weights: list[tuple[int, int, int]] = []
        self.layers, self.window = self._probe()
        self._layer_modules = self._decoder_layers()
        self.weights_changed()

    # ---------------------------------------------------------------------------------------------------- probe

    def _probe(self) -> tuple[list[AttentionLayer], int | None]:
        name = type(self.model).__name__
        for module in self.model.modules():
            rope_type = getattr(module, "rope_type", None)
            if rope_type in _BATCH_DEPENDENT_ROPE:
                raise UnsupportedModelError(
                    f"{name} uses {rope_type!r} rotary embeddings, whose frequencies depend on the longest sequence of "
                    "the batch; a request's result would depend on its neighbours."
                )
        if self.model.get_output_embeddings() is None:
            raise UnsupportedModelError(f"{name} has no language model head, so it gives no logits over tokens.")
        # Attention in chunks reaches layers through the mask alone; within one chunk it is plain causal attention.
        text_config = self.model.config.get_text_config(decoder=True)
        probe = _Probe(window=getattr(text_config, "attention_chunk_size", None))
        configs = self._configs()
        with self._patched([(vars(config), "_attn_implementation_internal", PROBE_NAME) for config in configs]):
            try:
                inputs = torch.zeros(1, 2, dtype=torch.long, device=self.device)
                self.forward(inputs, torch.arange(2, device=self.device)[None], None, **{PROBE_ARGUMENT: probe})
            except UnsupportedModelError:
                raise
            except Exception as error:
                raise UnsupportedModelError(f"{name} could not run a probe of two tokens: {error}") from error
        reached, expected = len(probe.layers), text_config.num_hidden_layers
        if reached != expected:
            raise UnsupportedModelError(
                f"{name}: {reached} of {expected} layers reached the attention interface of `transformers`; layers "
                "that keep their state elsewhere cannot be served."
            )
        shapes = {(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in probe.layers}
        if len(shapes) > 1:
            raise UnsupportedModelError(f"{name} has attention layers of different shapes: {sorted(shapes)}.")
        return probe.layers, probe.window

    def _configs(self) -> list[Any]:
        """Every config that an attention layer may read its implementation from."""
        configs = {id(module.config): module.config for module in self.model.modules() if hasattr(module, "config")}
        return [config for config in configs.values() if hasattr(config, "_attn_implementation_internal")]

    def _decoder_layers(self) -> list[nn.Module]:
        """The module around each attention layer that is an item of a list of layers: the unit of compilation."""
        by_name = dict(self.model.named_modules())
        name_of = {id(module): name for name, module in by_name.items()}
        found = []
        for layer in self.layers:
            parts = name_of[id(layer.module)].split(".")
            for end in range(len(parts), 0, -1):
                if isinstance(by_name[".".join(parts[: end - 1])], nn.ModuleList):
                    found.append(by_name[".".join(parts[:end])])
                    break
        return found

    # ---------------------------------------------------------------------------------------------------- facts

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0].dtype

    def cache_bytes(self, num_tokens: int) -> int:
        """Bytes of K and V for this many tokens over all layers."""
        per_token = sum(2 * layer.num_kv_heads * layer.head_dim * layer.dtype.itemsize for layer in self.layers)
        return per_token * num_tokens

    def weights_changed(self) -> bool:
        """Whether any parameter or buffer was written or replaced since the last call (by version and storage)."""
        state = [
            (id(tensor), tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)
            for module in self.model.modules()  # walked each time: submodules may be replaced, adapters injected
            for tensors in (module._parameters, module._buffers)
            for tensor in tensors.values()
            if tensor is not None
        ]
        changed, self._weights = state != self._weights, state
        return changed

    # ------------------------------------------------------------------------------------------------ in force

    def allocate_caches(self, num_slots: int) -> None:
        """Zeroed K and V caches of [num_slots, num_kv_heads, head_dim] per layer: zero, so that no slot is ever NaN."""
        self._caches = [(self._zeros(layer, num_slots), self._zeros(layer, num_slots)) for layer in self.layers]

    def _zeros(self, layer: AttentionLayer, num_slots: int) -> Tensor:
        with torch.inference_mode(False):  # else a cache made within somebody's inference mode could be used only there
            return torch.zeros(num_slots, layer.num_kv_heads, layer.head_dim, dtype=layer.dtype, device=self.device)

    def compile_layers(self) -> None:
        """Compile the decoder layers: one function for all of them, with only the token count dynamic."""

        def layer_call(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return layer._call_impl(*args, **kwargs)

        self._compiled_layer = torch.compile(own_code(layer_call), fullgraph=True, dynamic=True)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Paged attention, eval mode and compiled layers in force; for a live module, undone on leaving."""
        if not self._undo:
            self._install()
        try:
            with torch.no_grad():
                yield
        finally:
            if self.is_live:
                self.uninstall()

    def _install(self) -> None:
        changes: list[tuple[dict[str, Any], str, Any]] = []
        changes += [(vars(module), "training", False) for module in self.model.modules() if module.training]
        changes += [(vars(config), "_attn_implementation_internal", ATTENTION_NAME) for config in self._configs()]
        for layer, (key_cache, value_cache) in zip(self.layers, self._caches, strict=True):
            changes += [(vars(layer.module), KEY_CACHE, key_cache), (vars(layer.module), VALUE_CACHE, value_cache)]
        if self._compiled_layer is not None:
            for module in self._layer_modules:
                changes.append((vars(module), "_compiled_call_impl", partial(self._compiled_layer, module)))
        self._apply(changes)

    def uninstall(self) -> None:
        """Give the module back as it was before `installed`."""
        for attributes, name, before in reversed(self._undo):
            if before is _ABSENT:
                del attributes[name]
            else:
                attributes[name] = before
        self._undo = []

    def _apply(self, changes: list[tuple[dict[str, Any], str, Any]]) -> None:
        # Straight into the attribute dictionaries: nothing that wraps a module's __setattr__ should see this.
        for attributes, name, value in changes:
            self._undo.append((attributes, name, attributes.get(name, _ABSENT)))
            attributes[name] = value

    @contextmanager
    def _patched(self, changes: list[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
        training = [(vars(module), "training", False) for module in self.model.modules() if module.training]
        self._apply(changes + training)
        try:
            with torch.no_grad():
                yield
        finally:
            self.uninstall()

    def forward(self, token_ids: Tensor, positions: Tensor, sample_rows: Tensor | None, **kwargs: Any) -> Tensor:
        """Logits [num_samples, vocab] of the sampled rows of one flat batch.

        Args:
            token_ids, positions: [1, num_rows] int64.
            sample_rows: [num_samples] int64; None for the last row.
        """
        keep = 1 if sample_rows is None else sample_rows
        output = self.model(
            input_ids=token_ids,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=keep,
            return_dict=True,
            **kwargs,
        )
        return output.logits[0]

    def forward_step(self, token_ids: Tensor, positions: Tensor, sample_rows: Tensor) -> Tensor:
        """`forward` over the paged caches; the step must have been entered under this binding's handle."""
        return self.forward(token_ids, positions, sample_rows, **{STEP_HANDLE: self._handle_tensor})

    def release_caches(self) -> None:
        self.uninstall()
        self._caches = []

    def close(self) -> None:
        self.release_caches()
        self._compiled_layer = None


_ABSENT = object()
