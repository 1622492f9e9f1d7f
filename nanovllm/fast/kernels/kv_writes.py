"""Writes to the KV cache on a GPU: a step's K and V, and zeros for new blocks.

torch.compile would write K and V two bytes at a time, since it does not know that a row's elements share a slot; and
plain indexing clears the caches of all layers in dozens of kernels, once they exceed 2^31 elements.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from nanovllm.fast.kernels.operators import define_operator

_CLEARED_AT_ONCE = 8192  # elements


@cache
def _kernels() -> tuple[Any, Any]:
    import triton  # part of PyTorch's GPU builds
    import triton.language as tl

    @triton.jit
    def store_states(
        keys,
        values,
        key_cache,
        value_cache,
        slot_mapping,
        key_row,
        key_head,
        value_row,
        value_head,
        head_dim: tl.constexpr,
        width: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        elements = tl.arange(0, BLOCK)
        head, dim, is_there = elements // head_dim, elements % head_dim, elements < width
        to = tl.load(slot_mapping + row) * width + elements
        key = tl.load(keys + row * key_row + head * key_head + dim, mask=is_there)
        value = tl.load(values + row * value_row + head * value_head + dim, mask=is_there)
        tl.store(key_cache + to, key, mask=is_there)
        tl.store(value_cache + to, value, mask=is_there)

    @triton.jit
    def clear_blocks(caches, blocks, cache_size, block_size: tl.constexpr, BLOCK: tl.constexpr):
        block, number = tl.load(blocks + tl.program_id(0)), tl.program_id(1).to(tl.int64)
        elements = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        zeros = tl.zeros((BLOCK,), caches.dtype.element_ty)
        tl.store(caches + number * cache_size + block * block_size + elements, zeros, mask=elements < block_size)

    return store_states, clear_blocks


def _store_states(key: Tensor, value: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """See `attention.write_states`."""
    _, num_heads, num_rows, head_dim = key.shape
    key, value = (part if part.stride(3) == 1 else part.contiguous() for part in (key, value))
    width = num_heads * head_dim
    strides = key.stride(2), key.stride(1), value.stride(2), value.stride(1)
    with torch.cuda.device(key.device):
        _kernels()[0][(num_rows,)](
            key, value, cache[0], cache[1], slot_mapping, *strides, head_dim, width, 1 << (width - 1).bit_length()
        )


store_states = define_operator("nanovllm::store_states", _store_states, lambda *_: None, mutates=("cache",))


def clear_blocks(caches: Tensor, blocks: Tensor, block_size: int) -> None:
    """Zero some blocks of several caches.

    Args:
        caches: [num_caches, num_slots, num_kv_heads, head_dim], contiguous.
        blocks: [num_cleared] int64.
        block_size: slots of a block.
    """
    elements = block_size * caches.stride(1)
    grid = (len(blocks), len(caches), -(-elements // _CLEARED_AT_ONCE))
    with torch.cuda.device(caches.device):
        _kernels()[1][grid](caches, blocks, caches.stride(0), elements, _CLEARED_AT_ONCE)
