"""The Triton side of `paged_decode`: one kernel cuts a step's contexts into pieces, the other attends to one each.

::

    pieces    [1 + num_pieces, 8] int32
    row 0     how many pieces there are
    others    decode, first token, end, start of its block table, its first place in the workspace, number among the
              decode's pieces, how many those are

A decode of one piece is finished by the program that reads it. Of several, each leaves its output and the logarithm of
its sum of exponentials in the workspace, and the last to arrive (an atomic counter finds it) merges them in their
order, so a step gives the same bits whatever the order in which they ran. Splits and their merge: flash-decoding, Dao
et al. 2023.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
    do_not_specialize=["num_rows", "most_pieces", "least_tiles"],
    do_not_specialize_on_alignment=["table_starts", "block_counts", "positions"],
)
def cut_contexts(
    table_starts,
    block_counts,
    positions,
    pieces,
    num_rows,
    most_pieces,
    least_tiles,
    TILE: tl.constexpr,
    ENTRY: tl.constexpr,
    LANES: tl.constexpr,
    OWN: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Each program cuts OWN decodes; pieces are as long as it takes for at most most_pieces + num_rows of them."""
    lanes, own = tl.arange(0, LANES), tl.program_id(0) * OWN
    total = 0
    for first in range(0, num_rows, LANES):
        total += tl.sum(_num_tiles(block_counts, positions, first + lanes, num_rows, TILE))
    length = tl.maximum((total + most_pieces - 1) // most_pieces, least_tiles)
    total, before, before_split = 0, 0, 0
    for first in range(0, num_rows, LANES):
        rows = first + lanes
        counts = _num_pieces(_num_tiles(block_counts, positions, rows, num_rows, TILE), rows, num_rows, length)
        total += tl.sum(counts)
        counts = tl.where(rows < own, counts, 0)
        before += tl.sum(counts)
        before_split += tl.sum(tl.where(counts > 1, counts, 0))
    if own == 0:
        tl.store(pieces, total)

    rows = own + tl.arange(0, OWN)
    tiles = _num_tiles(block_counts, positions, rows, num_rows, TILE)
    counts = _num_pieces(tiles, rows, num_rows, length)
    split = tl.where(counts > 1, counts, 0)
    places = before + tl.cumsum(counts, 0) - counts
    slots = before_split + tl.cumsum(split, 0) - split
    contexts = tl.load(positions + rows, mask=tiles > 0, other=-1).to(tl.int32) + 1
    tables = tl.load(table_starts + rows, mask=rows < num_rows, other=0)
    divisor = tl.maximum(counts, 1)[:, None]
    for first in range(0, tl.max(counts, 0), WIDTH):
        number = first + tl.arange(0, WIDTH)[None, :]
        is_there = number < counts[:, None]
        to = pieces + (1 + places[:, None] + number) * ENTRY
        start = number * tiles[:, None] // divisor * TILE
        end = tl.minimum((number + 1) * tiles[:, None] // divisor * TILE, contexts[:, None])
        tl.store(to, tl.broadcast_to(rows[:, None], (OWN, WIDTH)), mask=is_there)
        tl.store(to + 1, start, mask=is_there)
        tl.store(to + 2, end, mask=is_there)
        tl.store(to + 3, tl.broadcast_to(tables[:, None], (OWN, WIDTH)), mask=is_there)
        tl.store(to + 4, tl.broadcast_to(slots[:, None], (OWN, WIDTH)), mask=is_there)
        tl.store(to + 5, tl.broadcast_to(number, (OWN, WIDTH)), mask=is_there)
        tl.store(to + 6, tl.broadcast_to(counts[:, None], (OWN, WIDTH)), mask=is_there)


@triton.jit
def _attend_piece(
    query,
    key_cache,
    value_cache,
    table,
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
    block = tl.load(table + start // BLOCK_SIZE)
    # Loads of K and V are on their way `num_stages` tiles ahead, as long as the loop does not compute their addresses
    # from another load of the same round: so a block's number comes from the round before.
    for first in range(start, end, TILE):
        slots = block.to(tl.int64) * BLOCK_SIZE + first % BLOCK_SIZE + lanes
        block = tl.load(table + tl.minimum(first + TILE, end - 1) // BLOCK_SIZE)
        is_seen = first + lanes < end
        at = slots[:, None] * (NUM_KV_HEADS * HEAD_DIM) + dims[None, :]
        is_there = is_seen[:, None] & (dims < HEAD_DIM)[None, :]
        keys = tl.load(key_cache + at, mask=is_there, other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights, decay = tl.exp2(scores - new_top[:, None]), tl.exp2(top - new_top)
        # Slots that are not seen are not read either: whatever lies there would enter the product as 0 times it.
        values = tl.load(value_cache + at, mask=is_there, other=0.0)
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
):
    """The pieces of one decode and KV head, in their order; returns [ROWS, DIMS]."""
    rows, dims, parts = tl.arange(0, ROWS), tl.arange(0, DIMS), tl.arange(0, AT_ONCE)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    output = tl.zeros((ROWS, DIMS), tl.float32)
    for first in tl.range(0, count, AT_ONCE, num_stages=3):
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
):
    """A program attends to one piece for the query heads of one KV head."""
    number, head = tl.program_id(0) // NUM_KV_HEADS, tl.program_id(0) % NUM_KV_HEADS
    piece = pieces + (1 + number) * ENTRY
    row, start, end, table = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2), tl.load(piece + 3)
    slot, part, count = tl.load(piece + 4), tl.load(piece + 5), tl.load(piece + 6)
    if number >= tl.load(pieces):
        return
    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
    at = rows[:, None] * HEAD_DIM + dims[None, :]
    is_there = (rows < GROUPS)[:, None] & (dims < HEAD_DIM)[None, :]
    heads = (row * NUM_KV_HEADS + head).to(tl.int64) * (GROUPS * HEAD_DIM)
    queries = tl.load(query + heads + at, mask=is_there, other=0.0)
    attended, logarithm = _attend_piece(
        queries, key_cache + head * HEAD_DIM, value_cache + head * HEAD_DIM, tables + table, start, end,
        scaling * 1.4426950408889634, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE,
    )  # fmt: skip
    if count == 1:
        tl.store(output + heads + at, attended.to(output.dtype.element_ty), mask=is_there)
    else:
        first = slot * NUM_KV_HEADS + head  # of the decode's pieces, in the workspace
        own = (first + part * NUM_KV_HEADS) * GROUPS
        tl.store(outputs + own * HEAD_DIM + at, attended, mask=is_there)
        tl.store(logarithms + own + rows, logarithm, mask=rows < GROUPS)
        tl.debug_barrier()  # all threads have stored before one of them says so
        if tl.atomic_add(arrivals + first, 1, sem="acq_rel", scope="gpu") == count - 1:
            merged = _merge(
                outputs + first * (GROUPS * HEAD_DIM), logarithms + first * GROUPS, count,
                NUM_KV_HEADS, GROUPS, HEAD_DIM, MERGED_ROWS, DIMS, AT_ONCE,
            )  # fmt: skip
            own_rows = tl.arange(0, MERGED_ROWS)
            to = own_rows[:, None] * HEAD_DIM + dims[None, :]
            is_real = (own_rows < GROUPS)[:, None] & (dims < HEAD_DIM)[None, :]
            tl.store(output + heads + to, merged.to(output.dtype.element_ty), mask=is_real)
            tl.store(arrivals + first, 0)  # for the next layer
