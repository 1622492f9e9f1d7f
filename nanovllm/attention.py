"""The attention function of every layer: it writes this step's K and V to their slots, then attends over the blocks.

Attention is one operator, opaque to the compiler: a layer compiles once for any backend, with only the token count
dynamic. All of a layer's writes come before its reads, so requests of one step may share a prefix computed in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nanovllm.device import find_kernel
from nanovllm.layout import BatchLayout, LayerTraits

LayerCache = Tensor | tuple[Tensor, Tensor]  # K first


def write_states(key: Tensor, value: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
    """Write key and value [1, num_kv_heads, num_tokens, head_dim] to their slots.

    Args:
        cache: [2, num_slots, num_kv_heads, head_dim], K first; a tensor each where their widths differ.
        slot_mapping: [num_tokens] int64; padding goes to the null block.
    """
    cache[0].index_copy_(0, slot_mapping, key[0].transpose(0, 1))
    cache[1].index_copy_(0, slot_mapping, value[0].transpose(0, 1))


_write_on_gpu: Callable[[Tensor, Tensor, Any, Tensor], None] = write_states


def write_states_compiled(key: Tensor, value: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
    """`write_states` within compiled code: on a GPU by the kernel, once `use_write_kernel` has found it."""
    write = _write_on_gpu if key.is_cuda and isinstance(cache, Tensor) else write_states
    write(key, value, cache, slot_mapping)


def use_write_kernel() -> None:
    """Compiled code on a GPU writes K and V by the kernel, if it exists; the same for every engine."""
    global _write_on_gpu
    _write_on_gpu = find_kernel("kv_writes", "store_states") or write_states


ATTENTION_NAME = "nanovllm"
# Attributes of an attention module (its cache, its engine's handle) and keyword arguments of the model (the step's
# handle and slot mapping). Where a model does not pass these down, they are found by the engine's handle.
LAYER_CACHE, LAYER_ENGINE = "nanovllm_cache", "nanovllm_engine"
# Further ones: which of the engine's kinds of layers it is; whether its K and V are another's. Every layer has them,
# since a module takes two microseconds to find out that an attribute is missing.
LAYER_KIND, LAYER_SHARES = "nanovllm_kind", "nanovllm_shares"
STEP_HANDLE, STEP_SLOT_MAPPING = "nanovllm_step", "nanovllm_slot_mapping"
SINKS = "s_aux"  # keyword argument of attention in `transformers`


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One attention module with the sizes of its states."""

    module: nn.Module
    traits: LayerTraits
    dtype: torch.dtype
    scaling: float  # of the scores

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V."""
        return self.traits.token_values * self.dtype.itemsize


class AttentionBackend(Protocol):
    """Attention of one engine's rows over the KV cache; one instance serves all layers.

    One that may refuse a layer has a static `supports(traits) -> str | None`: the trait that it lacks, in words.
    """

    reads_whole_blocks: bool  # masked slots too, which must then hold finite values

    def plan(self, layout: BatchLayout) -> AttentionPlan:
        """The masks of one step, shared by all layers."""
        ...


class AttentionPlan(Protocol):
    """One step's attention by one backend."""

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scaling: float,
        kind: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of all rows over the caches, which hold this step's K and V already.

        Args:
            query: [num_tokens, num_heads, head_dim].
            key_cache, value_cache: [num_slots, num_kv_heads, head_dim] and [num_slots, num_kv_heads, value_dim].
            kind: which of the engine's kinds of layers; the backend was built with their traits.
            sinks: [num_heads], the layer's own parameter; None for a kind without.

        Returns [num_tokens, num_heads, value_dim].
        """
        ...


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """One step's attention, shared by all layers."""

    plan: AttentionPlan
    num_tokens: int  # rows of the plan; the dense layers may pad them at the end
    slots: Tensor | None = None  # of the rows' K and V, for each kind of layers; 0 for padding. None if not known


# An opaque operator takes tensors alone, so a tensor with its engine's handle names a step, while the engine runs it.
steps_in_force: dict[int, AttentionStep] = {}
# Handle and slot mapping by engine. Compiled layers take tensors of a plain dictionary as inputs of any shape; a tensor
# attribute of a module would be compiled for its one shape.
_step_tensors: dict[int, tuple[Tensor, Tensor]] = {}


@contextmanager
def step_in_force(handle: int, step: AttentionStep, tensors: tuple[Tensor, Tensor] | None = None) -> Iterator[None]:
    """Args: tensors: handle and slot mapping, for a model that does not pass its keyword arguments to attention."""
    steps_in_force[handle] = step
    if tensors is not None:
        _step_tensors[handle] = tensors
    try:
        yield
    finally:
        steps_in_force.pop(handle, None)
        _step_tensors.pop(handle, None)


def running_step(handle: Tensor) -> AttentionStep:
    return steps_in_force[int(handle)]


def attend_in_step(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    handle: Tensor,
    scaling: float,
    kind: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of the step that `handle` [1] int64 names.

    Args:
        query: [1, num_heads, T, head_dim], T at least the step's `num_tokens`.
        key_cache, value_cache, kind, sinks: as of `AttentionPlan.attend`.

    Returns [1, T, num_heads, value_dim], zero in the padding rows.
    """
    step = steps_in_force[int(handle)]
    rows = query[0].transpose(0, 1)[: step.num_tokens].contiguous()
    attended = step.plan.attend(rows, key_cache, value_cache, scaling, kind, sinks)
    if len(rows) == query.shape[2]:
        return attended[None]
    output = query.new_zeros(1, query.shape[2], *attended.shape[1:])
    output[0, : len(rows)] = attended
    return output


# Caches of compiled code know an operator only by its name, and an older version's code passes the older arguments: a
# new schema needs a new name, so the number goes up with each change.
paged_attention = torch.library.custom_op("nanovllm::paged_attention_2", attend_in_step, mutates_args=())


@paged_attention.register_fake
def _(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    handle: Tensor,
    scaling: float,
    kind: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value_cache.shape[2])


def step_tensors(module: nn.Module, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Handle and slot mapping of the running step, for an attention module that was called with `kwargs`."""
    if STEP_HANDLE in kwargs:
        return kwargs[STEP_HANDLE], kwargs[STEP_SLOT_MAPPING]
    return _step_tensors[getattr(module, LAYER_ENGINE)]


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Called by `transformers` in each attention layer during an engine's step."""
    handle, slot_mapping = step_tensors(module, kwargs)
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    # One tensor for both, since the compiler copies all of a cache where two arguments that change share their memory.
    cache = getattr(module, LAYER_CACHE)
    kind, sinks = getattr(module, LAYER_KIND), kwargs.get(SINKS)
    if slot_mapping.dim() == 2:  # layers form several cache groups: a row for each kind of layer
        slot_mapping = slot_mapping[kind]
    is_compiled = torch.compiler.is_compiling()
    if not getattr(module, LAYER_SHARES):
        (write_states_compiled if is_compiled else write_states)(key, value, cache, slot_mapping)
    # Uncompiled, the dispatcher would only add its overhead to every layer.
    attend = paged_attention if is_compiled else attend_in_step
    return attend(query, cache[0], cache[1], handle, scaling, kind, sinks), None
