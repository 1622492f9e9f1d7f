"""Low-rank products of adapters, added to a layer's product in place: one launch by `down`, one by `up`.

A program computes a tile of rows with one adapter, as in Punica's SGMV (Chen et al. 2023), so that any mix of adapters
costs about one tile each. With few rows, programs divide the depth; its parts are added in the second launch, in a
fixed order, so that no row depends on others.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_FEW_ROWS = 256
COMPILED_ROWS = 1, _FEW_ROWS + 1  # numbers of rows that all code is compiled for


class _Options(NamedTuple):
    """Rows of a program, its ranks and depth in the first launch, outputs in the second; parts of the depth; warps."""

    rows: int
    columns: int
    depth: int
    splits: int
    outputs: int
    warps: int


_FEW = _Options(16, 16, 64, 8, 64, 1)
_MANY = _Options(64, 32, 64, 2, 128, 4)


@triton.jit
def _tile(order, starts, number, SLOTS: tl.constexpr, ROWS: tl.constexpr):
    """(slot, places in `order`, which of them are there, rows) of a tile; the slot is SLOTS beyond the last tile."""
    at = tl.arange(0, SLOTS)
    begin, end = tl.load(starts + at), tl.load(starts + at + 1)
    tiles = (end - begin + ROWS - 1) // ROWS
    last = tl.cumsum(tiles, 0)
    slot = tl.sum((last <= number).to(tl.int32), 0)
    first = tl.sum(tl.where(at == slot, begin + (number - last + tiles) * ROWS, 0), 0)
    places = first + tl.arange(0, ROWS)
    is_there = places < tl.sum(tl.where(at == slot, end, 0), 0)
    return slot, places, is_there, tl.load(order + places, mask=is_there, other=0)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["order", "starts"])
def _shrink(
    states, down, order, starts, shrunk, num_rows, stride, size, width, piece,
    SLOTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    slot, places, is_there, rows = _tile(order, starts, tl.program_id(0), SLOTS, ROWS)
    if slot < SLOTS:
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        split = tl.program_id(2)
        first = split * piece
        end = tl.minimum(first + piece, size)
        weights = down + slot.to(tl.int64) * width * size + columns[None, :] * size
        of_rows = states + rows.to(tl.int64)[:, None] * stride
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in tl.range(first, end, DEPTH):
            at = start + tl.arange(0, DEPTH)
            some = tl.load(of_rows + at[None, :], mask=is_there[:, None] & (at < end)[None, :], other=0.0)
            is_factor = (columns < width)[None, :] & (at < end)[:, None]
            factors = tl.load(weights + at[:, None], mask=is_factor, other=0.0)
            sums = tl.dot(some, factors, sums, input_precision="ieee")
        to = shrunk + (split * num_rows + places)[:, None] * width + columns[None, :]
        tl.store(to, sums, mask=is_there[:, None] & (columns < width)[None, :])


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["order", "starts"])
def _expand_and_add(
    shrunk, up, blocks, order, starts, output, num_rows, rank, total, width,
    SLOTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    slot, places, is_there, rows = _tile(order, starts, tl.program_id(0), SLOTS, ROWS)
    if slot < SLOTS:
        block = blocks + tl.program_id(1) * 3
        begin, end, part = tl.load(block), tl.load(block + 1), tl.load(block + 2)
        columns = begin + tl.arange(0, COLUMNS)
        is_output = is_there[:, None] & (columns < end)[None, :]
        to = output + rows.to(tl.int64)[:, None] * total + columns[None, :]
        sums = tl.load(to, mask=is_output, other=0.0).to(tl.float32)
        for start in tl.range(0, rank, RANK):
            at = start + tl.arange(0, RANK)
            some = tl.zeros((ROWS, RANK), tl.float32)
            for split in tl.static_range(SPLITS):
                place = (split * num_rows + places)[:, None] * width + (part * rank + at)[None, :]
                some += tl.load(shrunk + place, mask=is_there[:, None], other=0.0)
            of_slot = up + (slot.to(tl.int64) * rank + at)[:, None] * total + columns[None, :]
            factors = tl.load(of_slot, mask=(columns < end)[None, :], other=0.0)
            sums = tl.dot(some.to(up.dtype.element_ty), factors, sums, input_precision="ieee")
        tl.store(to, sums.to(output.dtype.element_ty), mask=is_output)


@cache
def _blocks(spans: tuple[tuple[int, int], ...], outputs: int, device: torch.device) -> Tensor:
    """First output, end and part of each program [num_blocks, 3] int32; it keeps its address, which graphs read."""
    found = [
        (begin, min(begin + outputs, end), part)
        for part, (first, end) in enumerate(spans)
        for begin in range(first, end, outputs)
    ]
    with torch.inference_mode(False):
        return torch.tensor(found, dtype=torch.int32, device=device)


def add_low_rank(product: Tensor, states: Tensor, factors: Any, slots: Any) -> Tensor:
    """A product [..., num_outputs] with the low-rank products of its states [..., size] added, in place if it can be.

    Args:
        factors: `fast.layers.adapted_layers.Factors`.
        slots: `fast.layers.adapted_layers.RowsBySlot`.

    Raises ValueError for another number of rows.
    """
    down, up, spans = factors
    order, starts, _ = slots
    _, parts, rank, size = down.shape
    rows, output, width = states.reshape(-1, size), product.contiguous(), parts * rank
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    num_rows = len(rows)
    if num_rows != len(order):
        raise ValueError(f"a product of {num_rows} rows in a step of {len(order)} has no slots of adapters.")
    options = _FEW if num_rows <= _FEW_ROWS else _MANY
    num_slots = len(starts) - 1
    tiles = num_rows // options.rows + min(num_slots, num_rows)
    piece = -(-size // (options.splits * options.depth)) * options.depth
    blocks = _blocks(spans, options.outputs, down.device)
    shrunk = torch.empty(options.splits, num_rows, width, dtype=torch.float32, device=down.device)
    with torch.cuda.device(down.device):
        _shrink[(tiles, -(-width // options.columns), options.splits)](
            rows, down, order, starts, shrunk, num_rows, rows.stride(0), size, width, piece,
            num_slots, options.rows, options.columns, options.depth, num_warps=options.warps, num_stages=3,
        )  # fmt: skip
        _expand_and_add[(tiles, len(blocks))](
            shrunk, up, blocks, order, starts, output, num_rows, rank, up.shape[2], width,
            num_slots, options.rows, options.outputs, min(64, rank & -rank), options.splits,
            num_warps=options.warps, num_stages=1,
        )  # fmt: skip
    return output
