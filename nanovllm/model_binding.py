"""Hooks a `transformers` module to paged attention, and leaves it exactly as it was when unhooked.

A probe pass at construction learns what each layer hands to attention; what cannot be served is refused by name.
"""

from __future__ import annotations

import itertools
import math
import mmap
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
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


def _window_of_masks(name: str, text_config: Any) -> int | None:
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
# Several engines may serve one module, from several threads: while one has it hooked, the others wait.
_module_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


_PACKED_DTYPES = (torch.float32, torch.bfloat16)


class _PackedLinear:
    """What a linear layer's `forward` becomes when its weight is packed (oneDNN's blocked format)."""

    def __init__(self, linear: nn.Linear) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self._bias = linear.bias

    def __call__(self, states: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(states, self._weight, self._bias, "none", [], "")


_Change = tuple[dict[str, Any], str, Any]  # an object's attributes, a name among them, a value


class _TensorState:
    """What tells that a tensor was written to or replaced.

    An address alone tells nothing, since the memory of weights that were replaced is used again for the next ones; but
    while the storage that was seen there lives, no other can have its address.
    """

    __slots__ = ("_address", "_storage", "_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._address = tensor.data_ptr()
        self._version = _version(tensor)

    def is_of(self, tensor: Tensor) -> bool:
        return (
            self._tensor() is tensor
            and self._version == _version(tensor)
            and self._address == tensor.data_ptr()
            and not self._storage.expired()
        )


def _modules(model: nn.Module) -> list[nn.Module]:
    """All submodules, each once, in no particular order: `model.modules()` without its nested generators.

    A live module is walked in every step, so this is a good part of a step's host time.
    """
    found: dict[int, nn.Module] = {}
    pending = [model]
    while pending:
        module = pending.pop()
        if id(module) not in found:
            found[id(module)] = module
            pending += [child for child in module._modules.values() if child is not None]
    return list(found.values())


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


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
            # read inside the operator, on the host, whatever the owner's default device is
            self._handle_tensor = torch.tensor([self.handle], device="cpu")
        self._lock = _module_locks.setdefault(model, threading.RLock())
        self._caches: list[tuple[Tensor, Tensor]] = []
        self._compiled_layer: Any = None
        self._undo: list[_Change] = []
        self._is_installed = False
        self._weights: list[_TensorState] = []
        self.layers, self.window = self._probe()
        self._layer_modules = self._decoder_layers()
        self.note_weights()

    # ---------------------------------------------------------------------------------------------------- probe

    def _probe(self) -> tuple[list[AttentionLayer], int | None]:
        name = type(self.model).__name__
        devices = sorted({str(parameter.device) for parameter in self.model.parameters()})
        if len(devices) != 1:
            raise UnsupportedModelError(f"{name} lies on several devices ({', '.join(devices)}); put it on one.")
        for module in self.model.modules():
            rope_type = getattr(module, "rope_type", None)  # one, or one for each type of layer
            batch_dependent = _BATCH_DEPENDENT_ROPE.intersection(
                rope_type.values() if isinstance(rope_type, dict) else [rope_type]
            )
            if batch_dependent:
                raise UnsupportedModelError(
                    f"{name} uses {min(batch_dependent)!r} rotary embeddings, whose frequencies depend on the longest "
                    "sequence of the batch; a request's result would depend on its neighbours."
                )
        if self.model.get_output_embeddings() is None:
            raise UnsupportedModelError(f"{name} has no language model head, so it gives no logits over tokens.")
        text_config = self.model.config.get_text_config(decoder=True)
        probe = _Probe(window=_window_of_masks(name, text_config))
        with self._probing():
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
        found = (vars(module).get("config") for module in _modules(self.model))
        configs = {id(config): config for config in found if hasattr(config, "_attn_implementation_internal")}
        return list(configs.values())

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

    def note_weights(self) -> bool:
        """Whether any parameter or buffer was written or replaced since the last call (by version and storage)."""
        tensors = [
            tensor
            for module in _modules(self.model)  # walked each time: submodules may be replaced, adapters injected
            for tensors in (module._parameters, module._buffers)
            for tensor in tensors.values()
            if tensor is not None
        ]
        known = self._weights
        if len(known) == len(tensors) and all(map(_TensorState.is_of, known, tensors)):
            return False
        self._weights = [_TensorState(tensor) for tensor in tensors]
        return True

    # ------------------------------------------------------------------------------------------------ in force

    def allocate_caches(self, num_slots: int) -> None:
        """Zeroed K and V caches of [num_slots, num_kv_heads, head_dim] per layer: zero, so that no slot is ever NaN."""
        self._caches = [(self._zeros(layer, num_slots), self._zeros(layer, num_slots)) for layer in self.layers]

    def _zeros(self, layer: AttentionLayer, num_slots: int) -> Tensor:
        shape = (num_slots, layer.num_kv_heads, layer.head_dim)
        with torch.inference_mode(False):  # else a cache made within somebody's inference mode could be used only there
            if self.device.type != "cpu":
                return torch.zeros(shape, dtype=layer.dtype, device=self.device)
            # Fresh pages of the system are zero, and take memory and time only when they are first written to: writing
            # zeros to the default pool took 5 s of start-up.
            pages = mmap.mmap(-1, math.prod(shape) * layer.dtype.itemsize)
            with suppress(OSError, AttributeError):  # not everywhere to be had
                pages.madvise(mmap.MADV_HUGEPAGE)
            return torch.frombuffer(pages, dtype=layer.dtype).view(shape)

    def pack_weights(self) -> None:
        """Bring the linear layers' weights into the order that the CPU's matrix products read fastest.

        Products of few rows take half the time. Only for a model of our own: a packed copy would not follow an owner's
        updates. The plain copy is let go, unless another module holds it too (tied embeddings).
        """
        if self.is_live or not torch.backends.mkldnn.is_available() or self.dtype not in _PACKED_DTYPES:
            return
        linears = [module for module in self.model.modules() if type(module) is nn.Linear]
        owners = Counter(id(p) for module in self.model.modules() for p in module._parameters.values())
        for linear in linears:
            vars(linear)["forward"] = _PackedLinear(linear)
            if owners[id(linear.weight)] == 1:
                linear.weight.data = linear.weight.data.new_empty(0)

    def compile_layers(self) -> None:
        """Compile the decoder layers: one function for all of them, with only the token count dynamic."""

        def layer_call(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return layer._call_impl(*args, **kwargs)

        self._compiled_layer = torch.compile(own_code(layer_call), fullgraph=True, dynamic=True)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Paged attention, eval mode and compiled layers in force; for a live module, undone on leaving."""
        with self._lock:
            try:
                if not self._is_installed:
                    self.uninstall()  # what an interrupt may have left half done
                    self._install()
                with self._plain_arithmetic():
                    yield
            finally:
                if self.is_live:
                    self.uninstall()

    def _install(self) -> None:
        changes = self._quieting()
        changes += [(vars(config), "_attn_implementation_internal", ATTENTION_NAME) for config in self._configs()]
        for layer, (key_cache, value_cache) in zip(self.layers, self._caches, strict=True):
            changes += [(vars(layer.module), KEY_CACHE, key_cache), (vars(layer.module), VALUE_CACHE, value_cache)]
        if self._compiled_layer is not None:
            for module in self._layer_modules:
                changes.append((vars(module), "_compiled_call_impl", partial(self._compiled_layer, module)))
        self._apply(changes)
        self._is_installed = True

    def uninstall(self) -> None:
        """Give the module back as it was before `installed`; may be called again if it was interrupted."""
        with self._lock:
            self._is_installed = False
            while self._undo:
                attributes, name, before = self._undo[-1]
                if before is _ABSENT:
                    attributes.pop(name, None)
                else:
                    attributes[name] = before
                self._undo.pop()

    def _quieting(self) -> list[_Change]:
        """Eval mode, and none of the owner's compiled calls, which would be compiled again for our passes."""
        changes: list[_Change] = []
        for module in _modules(self.model):
            attributes = vars(module)
            if attributes["training"]:
                changes.append((attributes, "training", False))
            if attributes.get("_compiled_call_impl") is not None:
                changes.append((attributes, "_compiled_call_impl", None))
        return changes

    def _apply(self, changes: list[_Change]) -> None:
        # Straight into the attribute dictionaries: nothing that wraps a module's __setattr__ should see this.
        for attributes, name, value in changes:
            self._undo.append((attributes, name, attributes.get(name, _ABSENT)))
            attributes[name] = value

    @contextmanager
    def _probing(self) -> Iterator[None]:
        """The probe in place of attention."""
        changes = [(vars(config), "_attn_implementation_internal", PROBE_NAME) for config in self._configs()]
        with self._lock:
            try:
                self._apply(self._quieting() + changes)
                with self._plain_arithmetic():
                    yield
            finally:
                self.uninstall()

    @contextmanager
    def _plain_arithmetic(self) -> Iterator[None]:
        """No gradients, and the module's own dtype, whatever the caller's context says."""
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            yield

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
