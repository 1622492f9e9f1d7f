"""The Triton side of `paged_decode`: one kernel cuts a step's contexts into pieces, another attends to one each.

::

    pieces    [1 + num_pieces, 8] int32
    row 0     how many pieces there are
    others    decode, first token, end, start of its block table, its decode's first slot in the workspace, number among
              the decode's pieces, how many those are, first block

A decode of one piece is finished by the program that reads it. Of several, each leaves its output and the logarithm of
its sum of exponentials in the workspace. They are merged in their order, whatever the order in which they ran, so a
step gives the same bits each time: by a third kernel, or with many decodes, where few are split, by the last to arrive,
which an atomic counter finds. Splits and their merge: flash-decoding, Dao et al. 2023.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ENTRY = 8  # numbers of a piece


@triton.jit
def _num_tiles(block_counts, positions, rows, num_rows, TILE: tl.constexpr):
    """Tiles of the contexts of some decodes; 0 for padding."""
    is_used = tl.load(block_counts + rows, mask=rows < num_rows, other=0) > 0
    positions = tl.load(positions + rows, mask=is_used, other=0).to(tl.int32)
    return tl.where(is_used, (positions + TILE) // TILE, 0)


@triton.jit
def _num_pieces(tiles, rows, num_rows, length):
    """Padding has one piece too, which is empty."""
    return tl.where(rows < num_rows, tl.maximum((tiles + length - 1) // length, 1), 0)


@triton.jit(
    do_not_specialize=["num_rows", "least_pieces", "most_pieces"],
    do_not_specialize_on_alignment=["tables", "table_starts", "block_counts", "positions"],
)
def cut_contexts(
    tables,
    table_starts,
    block_counts,
    positions,
    pieces,
    splits,
    num_rows,
    least_pieces,
    most_pieces,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ENTRY: tl.constexpr,
    LANES: tl.constexpr,
    OWN: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Each program cuts OWN decodes. The pieces of a step are as many as its decodes, within bounds.

    So decodes of even contexts have one each, where they are enough to fill the GPU.
    """
    lanes, own = tl.arange(0, LANES), tl.program_id(0) * OWN
    total, num_used = 0, 0
    for first in range(0, num_rows, LANES):
        tiles = _num_tiles(block_counts, positions, first + lanes, num_rows, TILE)
        total += tl.sum(tiles)
        num_used += tl.sum((tiles > 0).to(tl.int32))
    num_pieces = tl.minimum(tl.maximum(num_used, least_pieces), most_pieces)
    length = tl.maximum((total + num_pieces - 1) // num_pieces, 1)
    total, before, before_split = 0, 0, 0
    for first in range(0, num_rows, LANES):
        rows = first + lanes
        tiles = _num_tiles(block_counts, positions, rows, num_rows, TILE)
        counts = _num_pieces(tiles, rows, num_rows, length)
        total += tl.sum(counts)
        counts = tl.where(rows < own, counts, 0)
        before += tl.sum(counts)
        before_split += tl.sum(tl.where(counts > 1, counts, 0))
    if own == 0:
        tl.store(pieces, total)

    own_rows = own + tl.arange(0, OWN)
    own_tiles = _num_tiles(block_counts, positions, own_rows, num_rows, TILE)
    own_counts = _num_pieces(own_tiles, own_rows, num_rows, length)
    split = tl.where(own_counts > 1, own_counts, 0)
    places = before + tl.cumsum(own_counts, 0) - own_counts
    slots = before_split + tl.cumsum(split, 0) - split
    contexts = tl.load(positions + own_rows, mask=own_tiles > 0, other=-1).to(tl.int32) + 1
    starts = tl.load(table_starts + own_rows, mask=own_rows < num_rows, other=0)
    tl.store(splits + 2 * own_rows, slots, mask=own_rows < num_rows)
    tl.store(splits + 2 * own_rows + 1, own_counts, mask=own_rows < num_rows)
    divisor = tl.maximum(own_counts, 1)[:, None]
    for first in range(0, tl.max(own_counts, 0), WIDTH):
        number = first + tl.arange(0, WIDTH)[None, :]
        is_there = number < own_counts[:, None]
        start = number * own_tiles[:, None] // divisor * TILE
        end = tl.minimum((number + 1) * own_tiles[:, None] // divisor * TILE, contexts[:, None])
        is_read = is_there & (own_tiles > 0)[:, None]
        block = tl.load(tables + starts[:, None] + start // BLOCK_SIZE, mask=is_read, other=0)
        to = pieces + (1 + places[:, None] + number) * ENTRY
        tl.store(to, tl.broadcast_to(own_rows[:, None], (OWN, WIDTH)), mask=is_there)
        tl.store(to + 1, start, mask=is_there)
        tl.store(to + 2, end, mask=is_there)
        tl.store(to + 3, tl.broadcast_to(starts[:, None], (OWN, WIDTH)), mask=is_there)
        tl.store(to + 4, tl.broadcast_to(slots[:, None], (OWN, WIDTH)), mask=is_there)
        tl.store(to + 5, tl.broadcast_to(number, (OWN, WIDTH)), mask=is_there)
        tl.store(to + 6, tl.broadcast_to(own_counts[:, None], (OWN, WIDTH)), mask=is_there)
        tl.store(to + 7, block, mask=is_there)


@triton.jit
def _attend_piece(
    query,
    key_cache,
    value_cache,
    table,
    block,
    start,
    end,
    scale,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """query [ROWS, DIMS], a tensor; the caches begin at this KV head, the table at this decode's first block.

    Returns the output [ROWS, DIMS] and the binary logarithm of the sum of exponentials [ROWS].
    """
    ROWS: tl.constexpr = query.shape[0]
    DIMS: tl.constexpr = query.shape[1]
    lanes, dims = tl.arange(0, TILE), tl.arange(0, DIMS)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    output = tl.zeros((ROWS, DIMS), tl.float32)
    offsets = lanes[:, None] * (NUM_KV_HEADS * HEAD_DIM) + dims[None, :]
    # Loads of K and V are on their way `num_stages` tiles ahead, as long as the loop does not compute their addresses
    # from another load of the same round: so a block's number comes from the round before.
    for first in range(start, end, TILE):
        tile = (block.to(tl.int64) * BLOCK_SIZE + first % BLOCK_SIZE) * (NUM_KV_HEADS * HEAD_DIM)
        block = tl.load(table + tl.minimum(first + TILE, end - 1) // BLOCK_SIZE)
        is_seen = first + lanes < end
        is_there = is_seen[:, None] & (dims < HEAD_DIM)[None, :]
        keys = tl.load(key_cache + tile + offsets, mask=is_there, other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights, decay = tl.exp2(scores - new_top[:, None]), tl.exp2(top - new_top)
        # Slots that are not seen are not read either: whatever lies there would enter the product as 0 times it.
        values = tl.load(value_cache + tile + offsets, mask=is_there, other=0.0)
        output = tl.dot(weights.to(values.dtype), values, output * decay[:, None], input_precision="ieee")
        total = total * decay + tl.sum(weights, 1)
        top = new_top
    is_empty = total == 0.0
    return output / tl.where(is_empty, 1.0, total)[:, None], tl.where(is_empty, top, top + tl.log2(total))


@triton.jit
def _merge(
    outputs,
    logarithms,
    count,
    NUM_KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    MERGE_STAGES: tl.constexpr,
):
    """The pieces of one decode and KV head, in their order; returns [ROWS, DIMS]."""
    rows, dims, parts = tl.arange(0, ROWS), tl.arange(0, DIMS), tl.arange(0, AT_ONCE)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    output = tl.zeros((ROWS, DIMS), tl.float32)
    for first in tl.range(0, count, AT_ONCE, num_stages=MERGE_STAGES):
        is_there = (first + parts < count)[:, None] & (rows < GROUPS)[None, :]
        at = (first + parts)[:, None] * (NUM_KV_HEADS * GROUPS) + rows[None, :]
        other = tl.where(rows < GROUPS, float("-inf"), 0.0)[None, :]
        scale = tl.load(logarithms + at, mask=is_there, other=other, cache_modifier=".cg")
        is_there = is_there[:, :, None] & (dims < HEAD_DIM)[None, None, :]
        part = tl.load(
            outputs + at[:, :, None] * HEAD_DIM + dims[None, None, :], mask=is_there, other=0.0, cache_modifier=".cg"
        )
        new_top = tl.maximum(top, tl.max(scale, 0))
        weights, decay = tl.exp2(scale - new_top[None, :]), tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, 0)
        output = output * decay[:, None] + tl.sum(weights[:, :, None] * part, 0)
        top = new_top
    return output / total[:, None]


@triton.jit(do_not_specialize_on_alignment=["tables"])
def attend_pieces(
    query,
    key_cache,
    value_cache,
    tables,
    pieces,
    output,
    outputs,
    logarithms,
    arrivals,
    scaling,
    NUM_KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ENTRY: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    MERGED_ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    MERGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """A program attends to one piece for the query heads of one KV head."""
    if OVERLAPS:  # with the end of the kernel before and the beginning of the one behind
        gdc_wait()
        gdc_launch_dependents()
    number, head = tl.program_id(0) // NUM_KV_HEADS, tl.program_id(0) % NUM_KV_HEADS
    piece = pieces + (1 + number) * ENTRY
    row, start, end, table = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2), tl.load(piece + 3)
    slot, part, count, block = tl.load(piece + 4), tl.load(piece + 5), tl.load(piece + 6), tl.load(piece + 7)
    if number >= tl.load(pieces):
        return
    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
    at = rows[:, None] * HEAD_DIM + dims[None, :]
    is_there = (rows < GROUPS)[:, None] & (dims < HEAD_DIM)[None, :]
    heads = (row * NUM_KV_HEADS + head).to(tl.int64) * (GROUPS * HEAD_DIM)
    queries = tl.load(query + heads + at, mask=is_there, other=0.0)
    attended, logarithm = _attend_piece(
        queries, key_cache + head * HEAD_DIM, value_cache + head * HEAD_DIM, tables + table, block, start, end,
        scaling * 1.4426950408889634, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE,
    )  # fmt: skip
    if count == 1:
        tl.store(output + heads + at, attended.to(output.dtype.element_ty), mask=is_there)
    else:
        first = slot * NUM_KV_HEADS + head  # of the decode's pieces, in the workspace
        own = (first + part * NUM_KV_HEADS) * GROUPS
        tl.store(outputs + own * HEAD_DIM + at, attended, mask=is_there)
        tl.store(logarithms + own + rows, logarithm, mask=rows < GROUPS)
        if MERGES:
            tl.debug_barrier()  # all threads have stored before one of them says so
            if tl.atomic_add(arrivals + first, 1, sem="acq_rel", scope="gpu") == count - 1:
                merged = _merge(
                    outputs + first * (GROUPS * HEAD_DIM), logarithms + first * GROUPS, count,
                    NUM_KV_HEADS, GROUPS, HEAD_DIM, MERGED_ROWS, DIMS, AT_ONCE, 3,
                )  # fmt: skip
                own_rows = tl.arange(0, MERGED_ROWS)
                to = own_rows[:, None] * HEAD_DIM + dims[None, :]
                is_real = (own_rows < GROUPS)[:, None] & (dims < HEAD_DIM)[None, :]
                tl.store(output + heads + to, merged.to(output.dtype.element_ty), mask=is_real)
                tl.store(arrivals + first, 0)  # for the next layer


@triton.jit
def merge_pieces(
    splits,
    outputs,
    logarithms,
    output,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """A program merges the pieces of one decode and query head, where there are several."""
    row, head = tl.program_id(0) // NUM_HEADS, tl.program_id(0) % NUM_HEADS
    slot, count = tl.load(splits + 2 * row), tl.load(splits + 2 * row + 1)
    if OVERLAPS:
        gdc_wait()
    if count > 1:
        first = slot * NUM_HEADS + head
        merged = _merge(
            outputs + first * HEAD_DIM, logarithms + first, count, NUM_HEADS, 1, HEAD_DIM, 1, DIMS, AT_ONCE, 1
        )
        dims = tl.arange(0, DIMS)[None, :]
        to = output + (row * NUM_HEADS + head).to(tl.int64) * HEAD_DIM
        tl.store(to + dims, merged.to(output.dtype.element_ty), mask=dims < HEAD_DIM)
