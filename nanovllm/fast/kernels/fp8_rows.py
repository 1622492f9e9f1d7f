"""K and V as 8-bit floats on a GPU: rows are rounded as they are written, and widened for the attention of chunks.

features/kv_fp8/fp8_format.py describes the cache. Rounding is done in integers, so that it is the same in Triton's
interpreter; `paged_decode_triton` reads the values as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.attention import row_values
from nanovllm.fast.kernels.operators import define_operator
from nanovllm.fast.kernels.paged_decode import scales_of, values_of
from nanovllm.layout import LayerTraits

_ELEMENTS_AT_ONCE = 1024  # elements of K, or of V, that a program rounds
_WIDENED_SLOTS = 32  # slots that a program widens at once
_PROGRAMS = 4  # programs per multiprocessor that widen
_LANES = 256


@triton.jit
def _rounded_bytes(values):
    """float32 values of at most 448 as e4m3, to nearest even."""
    bits = values.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # The exponent's bias is 7 instead of 127, and 3 of 23 bits of the fraction are left.
    whole = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Numbers below 2^-6 become multiples of 2^-9, as all float32 numbers from 2^14 to 2^15 are.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, tl.minimum(whole, 0x7E))
    code = tl.where(size > 0x7F800000, 0x7F, code)  # NaN
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def store_heads(
    states, heads, dims, is_there, cache, scales, slot, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    IS_VALUE: tl.constexpr,
):  # fmt: skip
    """Round heads [heads, dims] of a token, float32 and 0 where nothing is, and store them to its slot.

    scales: the cache as float32.
    """
    group, number = slot // 16, slot % 16
    largest = tl.maximum(tl.max(tl.abs(states), 1), 7.888609052210118e-31)  # 2^-100
    rounded = _rounded_bytes(states * tl.div_rn(tl.full(largest.shape, 448.0, tl.float32), largest)[:, None])
    to = cache + group * (16 * KV_HEADS * (HEAD_DIM + 4))
    if IS_VALUE:  # those of 16 slots side by side
        to += number
        elements = heads[:, None] * (16 * HEAD_DIM) + 16 * dims[None, :]
    else:
        to += number * (KV_HEADS * HEAD_DIM)
        elements = heads[:, None] * HEAD_DIM + dims[None, :]
    tl.store(to + elements, rounded, mask=is_there)
    to = scales + group * (4 * KV_HEADS * (HEAD_DIM + 4)) + 4 * KV_HEADS * HEAD_DIM + number
    tl.store(to + heads * 16, largest * 0.002232142857142857, mask=heads < KV_HEADS)  # 1 / 448


@triton.jit
def _store_part(
    states, row_stride, head_stride, cache, scales, slot, row, heads, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr, IS_VALUE: tl.constexpr,
):  # fmt: skip
    dims = tl.arange(0, DIMS)
    is_there = (heads < KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    at = row * row_stride + heads[:, None] * head_stride + dims[None, :]
    own = tl.load(states + at, mask=is_there, other=0.0).to(tl.float32)
    store_heads(own, heads, dims, is_there, cache, scales, slot, KV_HEADS, HEAD_DIM, IS_VALUE)


@triton.jit
def store_rows(
    keys, values, key_cache, key_scales, value_cache, value_scales, slot_mapping, key_row, key_head, value_row,
    value_head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DIMS: tl.constexpr,
    VALUE_DIMS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """A program rounds and stores AT_ONCE heads of K and V of one token."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    slot = tl.load(slot_mapping + row)
    _store_part(keys, key_row, key_head, key_cache, key_scales, slot, row, heads, KV_HEADS, HEAD_DIM, DIMS, False)
    _store_part(
        values, value_row, value_head, value_cache, value_scales, slot, row, heads, KV_HEADS, VALUE_DIM, VALUE_DIMS,
        True,
    )  # fmt: skip


@triton.jit
def _widen(
    cache, scales, to, first, head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, SLOTS: tl.constexpr, IS_VALUE: tl.constexpr,
):  # fmt: skip
    """Widen a head's rows of SLOTS slots, `first` a multiple of 16, to the same slots of a cache of plain values."""
    lanes, dims = tl.arange(0, SLOTS), tl.arange(0, DIMS)
    group, number = first // 16 + lanes // 16, lanes % 16
    is_there = (lanes >= 0)[:, None] & (dims < HEAD_DIM)[None, :]
    at = group * (16 * KV_HEADS * (HEAD_DIM + 4))
    if IS_VALUE:
        elements = (at + head * (16 * HEAD_DIM) + number)[:, None] + 16 * dims[None, :]
    else:
        elements = (at + (number * KV_HEADS + head) * HEAD_DIM)[:, None] + dims[None, :]
    rows = tl.load(cache + elements, mask=is_there, other=0.0).to(tl.float32)
    at = group * (4 * KV_HEADS * (HEAD_DIM + 4)) + 4 * KV_HEADS * HEAD_DIM + head * 16 + number
    rows = (rows * tl.load(scales + at)[:, None]).to(to.dtype.element_ty)
    at = ((first + lanes) * KV_HEADS + head) * HEAD_DIM
    tl.store(to + at[:, None] + dims[None, :], rows, mask=is_there)


@triton.jit(
    do_not_specialize=["num_tiles"],
    do_not_specialize_on_alignment=["tables", "tile_tables", "tile_blocks", "tile_is_used"],
)
def widen_blocks(
    key_cache, key_scales, value_cache, value_scales, keys, values, tables, tile_tables, tile_blocks, tile_is_used,
    num_tiles,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DIMS: tl.constexpr,
    VALUE_DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr, SLOTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """A program widens one head of every n-th block of the chunks' block tables, which lie one after the other.

    The null block is widened once, since masked rows of it are read: in place of the entry before the first.
    """
    lanes = tl.arange(0, LANES)
    begin, end = tl.full((), 0x7FFFFFFF, tl.int32), tl.full((), 0, tl.int32)
    for tile in range(0, num_tiles, LANES):
        is_used = tl.load(tile_is_used + tile + lanes, mask=tile + lanes < num_tiles, other=0) > 0
        starts = tl.load(tile_tables + tile + lanes, mask=is_used, other=0x7FFFFFFF)
        ends = starts + tl.load(tile_blocks + tile + lanes, mask=is_used, other=0) + 1
        begin = tl.minimum(begin, tl.min(starts))
        end = tl.maximum(end, tl.max(tl.where(is_used, ends, 0)))
    begin = tl.minimum(begin, end)  # a step of padding alone has no entries
    head = tl.program_id(1)
    for entry in range(begin - 1 + tl.program_id(0), end, tl.num_programs(0)):
        block = tl.load(tables + entry, mask=entry >= begin, other=0).to(tl.int64)
        if (block > 0) | (entry < begin):
            for slot in range(0, BLOCK_SIZE, SLOTS):
                first = block * BLOCK_SIZE + slot
                _widen(key_cache, key_scales, keys, first, head, KV_HEADS, HEAD_DIM, DIMS, SLOTS, False)
                _widen(value_cache, value_scales, values, first, head, KV_HEADS, VALUE_DIM, VALUE_DIMS, SLOTS, True)


def _store_rounded(key: Tensor, value: Tensor, cache: Tensor, value_cache: Tensor | None, slot_mapping: Tensor) -> None:
    """See `attention.write_states`; cache: K and V in one tensor [2, ...], or in two."""
    keys, values = cache if value_cache is None else (cache, value_cache)
    _, num_heads, num_rows, head_dim = key.shape
    key, value = (part if part.stride(3) == 1 else part.contiguous() for part in (key, value))
    strides = key.stride(2), key.stride(1), value.stride(2), value.stride(1)
    dims, value_dims = power_of_two(head_dim), power_of_two(value.shape[3])
    at_once = min(power_of_two(num_heads), max(1, _ELEMENTS_AT_ONCE // max(dims, value_dims)))
    with torch.cuda.device_of(key):
        store_rows[(num_rows, -(-num_heads // at_once))](
            key, value, keys, scales_of(keys), values, scales_of(values), slot_mapping, *strides, num_heads, head_dim,
            value.shape[3], dims, value_dims, at_once,
        )  # fmt: skip


store_rounded = define_operator(
    "nanovllm::store_rounded", _store_rounded, lambda *_: None, mutates=("cache", "value_cache")
)


class WidenedChunks:
    """K and V of a step's chunks in the model's dtype, at the slots of the cache, for one layer after the other.

    Args:
        kinds, num_slots: traits of each kind of layers, and slots of its caches.
        dtype: dtype of the model.
    """

    def __init__(
        self,
        kinds: Sequence[LayerTraits],
        num_slots: Sequence[int],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._block_size = block_size
        sizes = [
            count * kind.num_kv_heads * (kind.head_dim + kind.value_dim)
            for kind, count in zip(kinds, num_slots, strict=True)
        ]
        with torch.inference_mode(False):
            self._memory = torch.zeros(max(sizes), dtype=dtype, device=device)
        self._num_programs = 1
        if device.type == "cuda":
            properties: Any = torch.cuda.get_device_properties(device)
            self._num_programs = _PROGRAMS * properties.multi_processor_count

    def of_step(self, key_cache: Tensor, value_cache: Tensor, step: Any) -> tuple[Tensor, Tensor]:
        """K and V of the chunks of a step, `StepTables`: [num_slots, num_kv_heads, head_dim or value_dim]."""
        num_slots, num_heads, _ = key_cache.shape
        block_size = self._block_size
        dims = row_values(key_cache), row_values(value_cache)
        end = num_slots * num_heads * dims[0]
        keys = self._memory[:end].view(num_slots, num_heads, dims[0])
        values = self._memory[end : end + num_slots * num_heads * dims[1]].view(num_slots, num_heads, dims[1])
        with torch.cuda.device_of(key_cache):
            widen_blocks[(-(-self._num_programs // num_heads), num_heads)](
                values_of(key_cache), scales_of(key_cache), values_of(value_cache), scales_of(value_cache), keys,
                values, step.tables, step.tile_tables, step.tile_blocks, step.tile_is_used, len(step.tile_blocks),
                num_heads, *dims, *map(power_of_two, dims), block_size, min(block_size, _WIDENED_SLOTS), _LANES,
            )  # fmt: skip
        return keys, values


def power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
