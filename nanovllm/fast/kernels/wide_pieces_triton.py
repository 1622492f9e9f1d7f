"""Triton kernel of `paged_decode` for wide groups: many decodes with a long common prefix fill tensor cores.

A bundle has 16 rows (query heads of its members), so a prefix of 256 decodes is read 32 times, and each tile of keys
serves one small matrix product. Here a program has up to 128 rows. The host cuts wide groups into pieces::

    wide_pieces  [num_pieces, 8] int32, 0 for padding
                 index of the first member, number of members, first token, end, start of the block table,
                 index among the pieces of its members

The results go to the workspace, as a bundle's do, and are merged with the members' own pieces. The kernel runs before
`attend_pieces`, and only in steps with a wide group: a graph of decodes that share less does not contain it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nanovllm.fast.kernels.paged_decode_triton import attend_for_members


@triton.jit(do_not_specialize_on_alignment=["tables", "wide_pieces", "members"])
def attend_wide_pieces(
    query,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    tables,
    wide_pieces,
    members,
    splits,
    outputs,
    logarithms,
    arrivals,
    scaling,
    NUM_KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ENTRY: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    VALUE_DIMS: tl.constexpr,
    MERGES: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
):
    """A program attends to one piece for the query heads of one KV head of its members.

    MERGES: True if `attend_pieces` merges in the program that arrives last.
    """
    number, head = tl.program_id(0) // NUM_KV_HEADS, tl.program_id(0) % NUM_KV_HEADS
    piece = wide_pieces + number * ENTRY
    first, num_members, start, end = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2), tl.load(piece + 3)
    table, part = tables + tl.load(piece + 4), tl.load(piece + 5)
    if num_members == 0:
        return
    if SCALED:  # a head's values are those of 16 slots
        value_cache += head * (15 * VALUE_DIM)
        key_scales += head * 16
        value_scales += head * 16
    attend_for_members(
        query, key_cache + head * HEAD_DIM, value_cache + head * VALUE_DIM, key_scales, value_scales, table,
        tl.load(table + start // BLOCK_SIZE), start, end, scaling * 1.4426950408889634, members + first, num_members,
        splits, part, head, outputs, logarithms, NUM_KV_HEADS, GROUPS, HEAD_DIM, VALUE_DIM, BLOCK_SIZE, TILE, ROWS,
        DIMS, VALUE_DIMS, SOFTCAP, True, SCALED,
    )  # fmt: skip
    if MERGES:
        rows = tl.arange(0, ROWS)
        is_used = rows // GROUPS < num_members
        decodes = tl.load(members + first + rows // GROUPS, mask=is_used, other=0)
        at = tl.load(splits + 2 * decodes, mask=is_used, other=0) * (NUM_KV_HEADS * GROUPS)
        at += head * GROUPS + rows % GROUPS
        tl.atomic_add(arrivals + at, 1, mask=is_used, sem="relaxed", scope="gpu")
