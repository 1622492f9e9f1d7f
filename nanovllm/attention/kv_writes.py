"""Writes a step's K and V to their slots in the KV cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from nanovllm.process.device import find_kernel

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
