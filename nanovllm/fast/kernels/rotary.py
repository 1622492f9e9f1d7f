"""One GPU kernel for a layer's norms of q and k, rotary embedding and KV write.

torch.compile makes two kernels of them, so short that most of their time is launch overhead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.fast.kernels.fp8_rows import store_heads
from nanovllm.fast.kernels.operators import define_operator
from nanovllm.fast.kernels.paged_decode import scales_of

_ELEMENTS_AT_ONCE = 512  # elements per iteration of a program
_MANY_ROWS = 1024  # number of rows from which on one warp per program is faster than two


@triton.jit
def rotated(
    states, weight, at, other_at, cos, sin, epsilon, is_there, dims,
    HEAD_DIM: tl.constexpr, HAS_NORMS: tl.constexpr,
):  # fmt: skip
    """Normalised and rotated heads, [heads, dims]; `other_at`: offsets of each element's partner in its pair."""
    own = tl.load(states + at, mask=is_there, other=0.0).to(tl.float32)
    other = tl.load(states + other_at, mask=is_there, other=0.0).to(tl.float32)
    if HAS_NORMS:
        factor = tl.rsqrt(tl.sum(own * own, 1) / HEAD_DIM + epsilon)[:, None]
        partner = (dims + HEAD_DIM // 2) % HEAD_DIM
        own *= factor * tl.load(weight + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
        other *= factor * tl.load(weight + partner, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
    sign = tl.where(dims < HEAD_DIM // 2, -1.0, 1.0)[None, :]
    return own * cos + sign * other * sin


@triton.jit
def rotate_and_store_heads(
    products, query_weight, key_weight, cosines, sines, slot_mapping, query, key_cache, value_cache, key_scales,
    value_scales, epsilon,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, AT_ONCE: tl.constexpr,
    HAS_NORMS: tl.constexpr, SCALED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program processes AT_ONCE heads of one row: of the queries, or of keys and values.

    SCALED: K and V are stored as 8-bit floats, with scales as `fp8_rows` has them.
    """
    if OVERLAPS:  # this kernel may start before the previous one ends, and the next before this one ends
        gdc_wait()
        gdc_launch_dependents()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims, heads = tl.arange(0, DIMS), part * AT_ONCE + tl.arange(0, AT_ONCE)
    is_dim = dims < HEAD_DIM
    cos = tl.load(cosines + row * HEAD_DIM + dims, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sines + row * HEAD_DIM + dims, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    partner = (dims + HEAD_DIM // 2) % HEAD_DIM
    states = products + row * ((HEADS + 2 * KV_HEADS) * HEAD_DIM)
    if part < tl.cdiv(HEADS, AT_ONCE):
        is_there = (heads < HEADS)[:, None] & is_dim[None, :]
        at, other_at = heads[:, None] * HEAD_DIM + dims[None, :], heads[:, None] * HEAD_DIM + partner[None, :]
        turned = rotated(states, query_weight, at, other_at, cos, sin, epsilon, is_there, dims, HEAD_DIM, HAS_NORMS)
        tl.store(query + row * (HEADS * HEAD_DIM) + at, turned.to(query.dtype.element_ty), mask=is_there)
    else:
        heads -= tl.cdiv(HEADS, AT_ONCE) * AT_ONCE
        is_there = (heads < KV_HEADS)[:, None] & is_dim[None, :]
        at, other_at = heads[:, None] * HEAD_DIM + dims[None, :], heads[:, None] * HEAD_DIM + partner[None, :]
        slot = tl.load(slot_mapping + row)
        keys = states + HEADS * HEAD_DIM
        value = tl.load(keys + KV_HEADS * HEAD_DIM + at, mask=is_there, other=0.0)
        turned = rotated(keys, key_weight, at, other_at, cos, sin, epsilon, is_there, dims, HEAD_DIM, HAS_NORMS)
        if SCALED:
            turned = tl.where(is_there, turned.to(value.dtype).to(tl.float32), 0.0)
            store_heads(turned, heads, dims, is_there, key_cache, key_scales, slot, KV_HEADS, HEAD_DIM, False)
            value = value.to(tl.float32)
            store_heads(value, heads, dims, is_there, value_cache, value_scales, slot, KV_HEADS, HEAD_DIM, True)
        else:
            slot *= KV_HEADS * HEAD_DIM
            tl.store(key_cache + slot + at, turned.to(key_cache.dtype.element_ty), mask=is_there)
            tl.store(value_cache + slot + at, value, mask=is_there)


def _rotate_and_store(
    products: Tensor,
    cosines: Tensor,
    sines: Tensor,
    norms: list[Tensor],
    epsilon: float,
    cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """Write a step's K and V to their slots; returns its queries [num_rows, num_heads, head_dim].

    Args:
        products: outputs of the q, k and v projections, [1, num_rows, width].
        cosines, sines: [1, num_rows, head_dim].
        norms: weights [head_dim] of the RMS norms of q's and k's heads, or empty.
        cache: [2, num_slots, num_kv_heads, head_dim], K first, or in 8-bit floats.
        slot_mapping: [num_rows] int64.
    """
    num_kv_heads, head_dim = cache.shape[2], cosines.shape[2]
    num_rows, num_heads = _sizes(products, cosines, cache)
    is_scaled = cache.dtype != products.dtype
    scales = [scales_of(part) if is_scaled else part for part in cache]
    products, cosines, sines = products.contiguous(), cosines.contiguous(), sines.contiguous()
    query = products.new_empty(num_rows, num_heads, head_dim)
    dims = 1 << (head_dim - 1).bit_length()
    at_once = max(1, _ELEMENTS_AT_ONCE // dims)
    grid = (num_rows, -(-num_heads // at_once) - (-num_kv_heads // at_once))
    query_weight, key_weight = norms or (products, products)
    overlaps = products.is_cuda and torch.cuda.get_device_capability(products.device) >= (9, 0)
    with torch.cuda.device(products.device):
        rotate_and_store_heads[grid](
            products, query_weight, key_weight, cosines, sines, slot_mapping, query, cache[0], cache[1], *scales,
            epsilon, num_heads, num_kv_heads, head_dim, dims, at_once, bool(norms), is_scaled, overlaps,
            launch_pdl=overlaps, num_warps=2 if num_rows < _MANY_ROWS else 1,
        )  # fmt: skip
    return query


def _fake_queries(products, cosines, sines, norms, epsilon, cache, slot_mapping):
    return products.new_empty(*_sizes(products, cosines, cache), cosines.shape[2])


def _sizes(products: Tensor, cosines: Tensor, cache: Tensor) -> tuple[int, int]:
    """(number of rows, number of query heads)."""
    return products.shape[1], products.shape[2] // cosines.shape[2] - 2 * cache.shape[2]


rotate_and_store = define_operator("nanovllm::rotate_and_store", _rotate_and_store, _fake_queries, mutates=("cache",))
