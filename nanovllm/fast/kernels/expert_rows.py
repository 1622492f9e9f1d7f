"""Products of routed experts for few rows on a GPU. PyTorch's `grouped_mm` reads their weights at two thirds of the
memory's rate.

A row's results do not depend on other rows: one program sums each up over the depth, in order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_PAIRS = 1024  # most pairs of a row and one of its experts; `grouped_mm` serves more, bound by arithmetic
_BLOCK_PAIRS = 16  # pairs of one expert in a program: the fewest rows of a matrix instruction


class Tiles(NamedTuple):
    """Sizes of a program: outputs and depth at a time, loads on their way, warps."""

    outputs: int
    depth: int
    num_stages: int
    num_warps: int


TILES = Tiles(64, 128, 3, 4)  # the fastest of `6dc43fb:bench/machines/expert_rows.py --sweep`, or within 1 % of it


@triton.jit
def _load_experts(ids, slots, pairs, num_pairs, num_slots, top_k, NONE: tl.constexpr):
    """Experts of pairs; `NONE` for padding rows and beyond all pairs."""
    experts = tl.load(ids + pairs, mask=pairs < num_pairs, other=NONE)
    rows = pairs // top_k
    places = tl.load(slots + rows, mask=(pairs < num_pairs) & (rows < num_slots), other=0)
    return tl.where(places == 0, NONE, experts)


@triton.jit(do_not_specialize=["num_pairs", "num_slots", "top_k"])
def _sort_pairs(
    ids, slots, order, ends, num_pairs, num_slots, top_k,
    num_experts: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A stable counting sort: a pair's rank is the number of pairs before it. Each program ranks some pairs."""
    others, own = tl.arange(0, PAIRS), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    other_ids = _load_experts(ids, slots, others, num_pairs, num_slots, top_k, num_experts)
    own_ids = _load_experts(ids, slots, own, num_pairs, num_slots, top_k, num_experts)
    is_before = other_ids[None, :] < own_ids[:, None]
    is_before |= (other_ids[None, :] == own_ids[:, None]) & (others[None, :] < own[:, None])
    rank = tl.sum(is_before.to(tl.int32), 1)
    tl.store(order + rank, own.to(tl.int64), mask=own < num_pairs)
    end = tl.sum((other_ids[None, :] <= own[:, None]).to(tl.int32), 1)
    tl.store(ends + own, end, mask=own < num_experts)


@triton.jit(do_not_specialize=["num_pairs", "top_k"])
def _multiply(
    rows, weight, bias, output, ids, order, ends, num_pairs, top_k, num_outputs: tl.constexpr, depth: tl.constexpr,
    num_experts: tl.constexpr, GATHERS: tl.constexpr, IS_TRANSPOSED: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr, BLOCK_DEPTH: tl.constexpr, BLOCK_PAIRS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Some outputs of pairs of one expert, from this program's pair on, if that is the first of its tile."""
    place = tl.program_id(1)
    num_real = tl.load(ends + num_experts - 1)
    is_real = place < num_real  # others are padding's, and get zeros
    expert = tl.where(is_real, tl.load(ids + tl.load(order + place)), 0)
    start = tl.where(is_real, tl.load(ends + expert - 1, mask=expert > 0, other=0), num_real)
    end = tl.where(is_real, tl.load(ends + expert), num_pairs)
    if (place - start) % BLOCK_PAIRS != 0:
        return
    outputs = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    places = place + tl.arange(0, BLOCK_PAIRS)
    is_own = places < end
    pairs = tl.load(order + places, mask=is_own, other=0)
    sources = pairs // top_k if GATHERS else places.to(tl.int64)
    targets = places.to(tl.int64) if GATHERS else pairs
    steps = tl.arange(0, BLOCK_DEPTH)
    sums = tl.zeros((BLOCK_OUTPUTS, BLOCK_PAIRS), tl.float32)
    first = weight + expert * num_outputs * depth
    for at in tl.range(0, tl.where(is_real, depth, 0), BLOCK_DEPTH, num_stages=NUM_STAGES):
        deep = at + steps
        is_within = deep < depth
        if IS_TRANSPOSED:
            tile = tl.load(
                first + deep[:, None] * num_outputs + outputs[None, :],
                mask=is_within[:, None] & (outputs < num_outputs)[None, :], other=0.0,
            ).trans()  # fmt: skip
        else:
            tile = tl.load(
                first + outputs[:, None] * depth + deep[None, :],
                mask=(outputs < num_outputs)[:, None] & is_within[None, :], other=0.0,
            )  # fmt: skip
        inputs = tl.load(
            rows + sources[None, :] * depth + deep[:, None], mask=is_own[None, :] & is_within[:, None], other=0.0
        )
        sums = tl.dot(tile, inputs, sums)
    if HAS_BIAS:
        own = tl.load(bias + expert * num_outputs + outputs, mask=outputs < num_outputs, other=0.0)
        sums = sums.to(output.dtype.element_ty).to(tl.float32) + own.to(tl.float32)[:, None]
    sums = tl.where(is_real, sums, 0.0)
    to = output + targets[None, :] * num_outputs + outputs[:, None]
    tl.store(to, sums.to(output.dtype.element_ty), mask=is_own[None, :] & (outputs < num_outputs)[:, None])


def sort_by_expert(expert_ids: Tensor, num_experts: int, top_k: int, slots: Tensor | None) -> tuple[Tensor, Tensor]:
    """Pairs of rows and experts in the order of their experts, otherwise as given.

    Up to `MAX_PAIRS`, pairs of padding rows come last and belong to no expert.

    Args:
        expert_ids: [num_pairs] int64, each below `num_experts`; `top_k` for each row.
        slots: int64, of the rows' K and V; 0 for padding, as are further rows. None if no row is padding.

    Returns the pairs in order, [num_pairs] int64, and the end of each expert's pairs, [num_experts] int32.
    """
    num_pairs = len(expert_ids)
    if num_pairs > MAX_PAIRS:
        in_order, order = torch.sort(expert_ids, stable=True)
        experts = torch.arange(num_experts, device=expert_ids.device)
        return order, torch.searchsorted(in_order, experts, right=True, out_int32=True)
    order = torch.empty_like(expert_ids)
    ends = torch.empty(num_experts, dtype=torch.int32, device=expert_ids.device)
    if slots is None:
        slots = expert_ids.new_ones(num_pairs // top_k)
    with torch.cuda.device(expert_ids.device):
        _sort_pairs[(-(-max(num_pairs, num_experts) // _BLOCK_PAIRS),)](
            expert_ids, slots, order, ends, num_pairs, len(slots), top_k, num_experts, MAX_PAIRS, _BLOCK_PAIRS
        )  # fmt: skip
    return order, ends


@torch.library.custom_op("nanovllm::expert_products", mutates_args=())
def expert_products(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    expert_ids: Tensor,
    order: Tensor,
    ends: Tensor,
    is_transposed: bool,
    top_k: int,
) -> Tensor:
    """The product of each pair's row with its expert's weight, [num_pairs, num_outputs].

    Args:
        rows: [num_rows, depth], each the row of `top_k` consecutive pairs of `expert_ids`, for results in the order of
            the experts; or, if `top_k` is 0, [num_pairs, depth] in that order, for results in the order of the pairs.
        weight: [num_experts, num_outputs, depth], or [num_experts, depth, num_outputs] if `is_transposed`.
        bias: [num_experts, num_outputs].
        expert_ids, order, ends: results of `sort_by_expert`. Pairs of no expert get zeros.
    """
    num_pairs = len(expert_ids)
    if num_pairs > MAX_PAIRS:
        return _grouped(rows, weight, bias, expert_ids, order, ends, is_transposed, top_k)
    depth, num_outputs = weight.shape[1:] if is_transposed else weight.shape[:0:-1]
    rows, weight = rows.contiguous(), weight.contiguous()
    output = rows.new_empty(num_pairs, num_outputs)
    with torch.cuda.device(rows.device):
        _multiply[(-(-num_outputs // TILES.outputs), num_pairs)](
            rows, weight, rows if bias is None else bias, output, expert_ids, order, ends, num_pairs, top_k,
            num_outputs, depth, len(weight), top_k > 0, is_transposed, bias is not None,
            TILES.outputs, TILES.depth, _BLOCK_PAIRS, TILES.num_stages, num_warps=TILES.num_warps,
        )  # fmt: skip
    return output


@expert_products.register_fake
def _(rows, weight, bias, expert_ids, order, ends, is_transposed, top_k):
    return rows.new_empty(len(expert_ids), weight.shape[2 if is_transposed else 1])


def _grouped(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    expert_ids: Tensor,
    order: Tensor,
    ends: Tensor,
    is_transposed: bool,
    top_k: int,
) -> Tensor:
    """Products of many pairs, by PyTorch."""
    output: Tensor = torch.nn.functional.grouped_mm(
        rows[order // top_k] if top_k else rows, weight if is_transposed else weight.transpose(1, 2), offs=ends
    )
    if bias is not None:
        output.add_(bias[expert_ids[order]])
    if top_k:
        return output
    in_pairs = torch.empty_like(output)
    in_pairs[order] = output
    return in_pairs
