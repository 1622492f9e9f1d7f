"""Triton kernels of `paged_decode` for attention: one program per piece, see `decode_pieces_triton`.

The program of a decode's only piece writes the result. With several pieces each program writes its output and
log-sum-exp to the workspace, for a bundle's piece once per member. They are merged in a fixed order, so that results
are deterministic: by a separate kernel, or with many decodes (few of them split) by the program that arrives last,
found by atomic counters. Split and merge as in flash-decoding, Dao et al. 2023.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _offsets(lanes, dims, NUM_KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, SCALED: tl.constexpr):
    """Offsets of a tile's rows [TILE, dims] of one head; scales follow every 16 slots of 8-bit floats."""
    offsets = lanes[:, None] * (NUM_KV_HEADS * WIDTH) + dims[None, :]
    if SCALED:
        offsets += (lanes // 16 * (64 * NUM_KV_HEADS))[:, None]
    return offsets


@triton.jit
def _value_offsets(lanes, dims, NUM_KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, SCALED: tl.constexpr):
    """As `_offsets`; 8-bit floats are transposed: [dims, TILE], since those of 16 slots lie side by side."""
    if SCALED:
        groups = lanes // 16 * (16 * NUM_KV_HEADS * (WIDTH + 4))
        offsets = dims[:, None] * 16 + (groups + lanes % 16)[None, :]
    else:
        offsets = _offsets(lanes, dims, NUM_KV_HEADS, WIDTH, False)
    return offsets


@triton.jit
def _value_mask(is_dim, is_seen, WHOLE: tl.constexpr, SCALED: tl.constexpr):
    """Elements of a tile of values to read.

    Slots out of sight are not read: NaN or infinity in them would survive the product with 0. 8-bit floats are read in
    runs of 16 slots, of which an engine keeps those out of sight finite (`BatchLayout.blocks_to_clear`).
    """
    if SCALED:
        is_there = is_dim[:, None]
    elif WHOLE:
        is_there = is_dim[None, :]
    else:
        is_there = is_seen[:, None] & is_dim[None, :]
    return is_there


@triton.jit
def _load_scales(scales, slot, lanes, is_seen, NUM_KV_HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Scales [TILE] of a tile from `slot` on, a multiple of 16; `scales` starts at this KV head."""
    groups = slot // 16 + lanes // 16
    at = groups * (4 * NUM_KV_HEADS * (WIDTH + 4)) + 4 * NUM_KV_HEADS * WIDTH + lanes % 16
    return tl.load(scales + at, mask=is_seen, other=0.0)


@triton.jit
def _scaled_query(query, scale, COMPUTED: tl.constexpr):
    """Query rows of at most 1, and the factors [ROWS, 1] of their scores."""
    sizes = tl.maximum(tl.max(tl.abs(query.to(tl.float32)), 1), 7.888609052210118e-31)  # 2^-100
    return (query.to(tl.float32) / sizes[:, None]).to(COMPUTED), (sizes * scale)[:, None]


@triton.jit
def _scaled_sum(weights, values, scales, COMPUTED: tl.constexpr):
    """Sum of values [dims, TILE] by weights [ROWS, TILE] and the values' scales [TILE]; weights become at most 1."""
    largest = tl.maximum(tl.max(scales, 0), 7.888609052210118e-31)
    weights = (weights * (scales / largest)[None, :]).to(COMPUTED)
    return tl.dot(weights, tl.trans(values.to(COMPUTED)), input_precision="ieee") * largest


@triton.jit
def _attend_piece(
    query, key_cache, value_cache, key_scales, value_scales, table, block, start, end, scale,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SOFTCAP: tl.constexpr, LIMITED: tl.constexpr, WHOLE: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Attention of query [ROWS, DIMS], a tensor; caches start at this KV head, the table at the decode's first block.

    WHOLE: the piece consists of whole tiles. SCALED: values are 8-bit floats, with scales as `fp8_rows` stores them.

    Returns the output [ROWS, VALUE_DIMS] and the binary logarithm of the sum of exponentials [ROWS].
    """
    ROWS: tl.constexpr = query.shape[0]
    lanes, dims, value_dims = tl.arange(0, TILE), tl.arange(0, query.shape[1]), tl.arange(0, VALUE_DIMS)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    output = tl.zeros((ROWS, VALUE_DIMS), tl.float32)
    offsets = _offsets(lanes, dims, NUM_KV_HEADS, HEAD_DIM, SCALED)
    value_offsets = _value_offsets(lanes, value_dims, NUM_KV_HEADS, VALUE_DIM, SCALED)
    PAD: tl.constexpr = 64 * NUM_KV_HEADS if SCALED else 0  # bytes after 16 slots
    # 8-bit floats become float16 in half of an instruction each, bfloat16 in more.
    COMPUTED: tl.constexpr = query.dtype if not SCALED or query.dtype == tl.float32 else tl.float16
    if SCALED:
        query, scale = _scaled_query(query, scale, COMPUTED)
    begin = start // TILE * TILE if LIMITED else start  # a piece may begin within a tile
    # K and V are prefetched `num_stages` tiles ahead only if their addresses do not depend on a load of the same
    # iteration: so the block number is loaded one iteration earlier.
    for first in range(begin, end, TILE):
        slot = block.to(tl.int64) * BLOCK_SIZE + first % BLOCK_SIZE
        tile, pad = slot * NUM_KV_HEADS, slot // 16 * PAD
        block = tl.load(table + tl.minimum(first + TILE, end - 1) // BLOCK_SIZE)
        is_seen = first + lanes < end
        if LIMITED:
            is_seen = is_seen & (first + lanes >= start)
        is_there = (dims < HEAD_DIM)[None, :] if WHOLE else is_seen[:, None] & (dims < HEAD_DIM)[None, :]
        keys = tl.load(key_cache + tile * HEAD_DIM + pad + offsets, mask=is_there, other=0.0)
        scores = tl.dot(query, tl.trans(keys.to(COMPUTED)), input_precision="ieee") * scale
        if SCALED:
            scores *= _load_scales(key_scales, slot, lanes, is_seen, NUM_KV_HEADS, HEAD_DIM)[None, :]
        if SOFTCAP > 0:
            # cap * tanh(score / cap), with scores to base 2: tanh(x) = 1 - 2 / (exp(2 x) + 1).
            CAP: tl.constexpr = SOFTCAP * 1.4426950408889634
            scores = CAP - 2 * CAP / (tl.exp2(scores * (2 * 1.4426950408889634 / CAP)) + 1)
        if not WHOLE:
            scores = tl.where(is_seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights, decay = tl.exp2(scores - new_top[:, None]), tl.exp2(top - new_top)
        is_there = _value_mask(value_dims < VALUE_DIM, is_seen, WHOLE, SCALED)
        values = tl.load(value_cache + tile * VALUE_DIM + pad + value_offsets, mask=is_there, other=0.0)
        if SCALED:
            scales = _load_scales(value_scales, slot, lanes, is_seen, NUM_KV_HEADS, VALUE_DIM)
            output = output * decay[:, None] + _scaled_sum(weights, values, scales, COMPUTED)
        else:
            output = tl.dot(weights.to(values.dtype), values, output * decay[:, None], input_precision="ieee")
        total = total * decay + tl.sum(weights, 1)
        top = new_top
    is_empty = total == 0.0
    return output / tl.where(is_empty, 1.0, total)[:, None], tl.where(is_empty, top, top + tl.log2(total))


@triton.jit
def _sink_scores(sinks, heads, is_used, HAS_SINKS: tl.constexpr):
    """Initial state of the softmax, [ROWS] each: maximum score, to base 2, and sum of exponentials.

    A sink is a first score without a value.
    """
    top = tl.full(heads.shape, float("-inf"), tl.float32)
    total = tl.zeros(heads.shape, tl.float32)
    if HAS_SINKS:
        top = tl.load(sinks + heads, mask=is_used, other=0.0).to(tl.float32) * 1.4426950408889634
        total += 1.0
    return top, total


@triton.jit
def _merge(
    outputs, logarithms, count, sinks, NUM_KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr, DIMS: tl.constexpr, AT_ONCE: tl.constexpr, MERGE_STAGES: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Merge the pieces of one decode and KV head in order; returns [ROWS, DIMS]. HEAD_DIM and DIMS: of values."""
    rows, dims, parts = tl.arange(0, ROWS), tl.arange(0, DIMS), tl.arange(0, AT_ONCE)
    top, total = _sink_scores(sinks, rows, rows < GROUPS, HAS_SINKS)
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


@triton.jit
def attend_for_members(
    query, keys, values, key_scales, value_scales, table, block, start, end, scale, members, num_members, splits, part,
    head, outputs, logarithms,
    NUM_KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, DIMS: tl.constexpr, VALUE_DIMS: tl.constexpr,
    SOFTCAP: tl.constexpr, WHOLE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Attend to a bundle's piece: each row is a query head of a member; `members` starts with the bundle's first."""
    rows, dims, NUM_HEADS = tl.arange(0, ROWS), tl.arange(0, DIMS), NUM_KV_HEADS * GROUPS
    is_used = rows // GROUPS < num_members
    decodes = tl.load(members + rows // GROUPS, mask=is_used, other=0)
    slots = tl.load(splits + 2 * decodes, mask=is_used, other=0)
    heads = head * GROUPS + rows % GROUPS
    is_there = is_used[:, None] & (dims < HEAD_DIM)[None, :]
    at = (decodes * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
    attended, logarithm = _attend_piece(
        tl.load(query + at, mask=is_there, other=0.0), keys, values, key_scales, value_scales, table, block, start, end,
        scale, NUM_KV_HEADS, HEAD_DIM, VALUE_DIM, VALUE_DIMS, BLOCK_SIZE, TILE, SOFTCAP, False, WHOLE, SCALED,
    )  # fmt: skip
    own = (slots + part) * NUM_HEADS + heads  # index in the workspace
    value_dims = tl.arange(0, VALUE_DIMS)
    is_there = is_used[:, None] & (value_dims < VALUE_DIM)[None, :]
    tl.store(outputs + own[:, None] * VALUE_DIM + value_dims[None, :], attended, mask=is_there)
    tl.store(logarithms + own, logarithm, mask=is_used)


@triton.jit
def _attend_for_one(
    query, keys, values, key_scales, value_scales, table, block, start, end, scale, row, slot, part, count, head,
    output, outputs, logarithms, sinks,
    NUM_KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, DIMS: tl.constexpr, VALUE_DIMS: tl.constexpr,
    SOFTCAP: tl.constexpr, LIMITED: tl.constexpr, HAS_SINKS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Attend to a piece of the decode `row`."""
    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
    at = rows[:, None] * HEAD_DIM + dims[None, :]
    is_there = (rows < GROUPS)[:, None] & (dims < HEAD_DIM)[None, :]
    heads = (row * NUM_KV_HEADS + head).to(tl.int64) * GROUPS
    attended, logarithm = _attend_piece(
        tl.load(query + heads * HEAD_DIM + at, mask=is_there, other=0.0), keys, values, key_scales, value_scales, table,
        block, start, end, scale, NUM_KV_HEADS, HEAD_DIM, VALUE_DIM, VALUE_DIMS, BLOCK_SIZE, TILE, SOFTCAP, LIMITED,
        False, SCALED,
    )  # fmt: skip
    value_dims = tl.arange(0, VALUE_DIMS)
    to = rows[:, None] * VALUE_DIM + value_dims[None, :]
    is_there = (rows < GROUPS)[:, None] & (value_dims < VALUE_DIM)[None, :]
    if count == 1:
        if HAS_SINKS:
            sink, _ = _sink_scores(sinks + head * GROUPS, rows, rows < GROUPS, True)
            attended = attended / (1.0 + tl.exp2(sink - logarithm))[:, None]
        tl.store(output + heads * VALUE_DIM + to, attended.to(output.dtype.element_ty), mask=is_there)
    else:
        own = ((slot + part) * NUM_KV_HEADS + head) * GROUPS  # index in the workspace
        tl.store(outputs + own * VALUE_DIM + to, attended, mask=is_there)
        tl.store(logarithms + own + rows, logarithm, mask=rows < GROUPS)


@triton.jit
def _merge_members(
    splits, members, row, head, outputs, logarithms, arrivals, output, sinks,
    NUM_KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, DIMS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Merge the pieces of decodes that share blocks, for each row if this program is the last to arrive.

    The program has processed a bundle's piece, or a piece of the decode `row` after its shared blocks. One loop for
    both gives the same bits, whichever program is last. HEAD_DIM and DIMS: of values.
    """
    rows, NUM_HEADS = tl.arange(0, ROWS), NUM_KV_HEADS * GROUPS
    is_used = rows // GROUPS < tl.maximum(-row, 1)
    decodes = tl.load(members + rows // GROUPS, mask=is_used & (row < 0), other=row)
    heads = head * GROUPS + rows % GROUPS
    at = tl.load(splits + 2 * decodes, mask=is_used, other=0) * NUM_HEADS + heads  # first piece, in the workspace
    counts = tl.load(splits + 2 * decodes + 1, mask=is_used, other=0)
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals + at, 1, mask=is_used, sem="acq_rel", scope="gpu")
    is_last = is_used & (arrived == counts - 1)
    counts = tl.where(is_last, counts, 0)
    most = tl.max(counts, 0)
    tl.debug_barrier()
    if most > 0:
        dims = tl.arange(0, DIMS)
        top, total = _sink_scores(sinks, heads, is_used, HAS_SINKS)
        merged = tl.zeros((ROWS, DIMS), tl.float32)
        for number in tl.range(0, most, num_stages=3):
            is_there = number < counts
            scale = tl.load(
                logarithms + at + number * NUM_HEADS, mask=is_there, other=tl.where(is_last, float("-inf"), 0.0),
                cache_modifier=".cg",
            )  # fmt: skip
            part = tl.load(
                outputs + (at + number * NUM_HEADS)[:, None] * HEAD_DIM + dims[None, :],
                mask=is_there[:, None] & (dims < HEAD_DIM)[None, :], other=0.0, cache_modifier=".cg",
            )  # fmt: skip
            new_top = tl.maximum(top, scale)
            weights, decay = tl.exp2(scale - new_top), tl.exp2(top - new_top)
            total = total * decay + weights
            merged = merged * decay[:, None] + weights[:, None] * part
            top = new_top
        merged = merged / tl.where(is_last, total, 1.0)[:, None]
        is_there = is_last[:, None] & (dims < HEAD_DIM)[None, :]
        to = (decodes * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(output + to, merged.to(output.dtype.element_ty), mask=is_there)
        tl.store(arrivals + at, 0, mask=is_last)  # the next layer counts from zero


@triton.jit
def _merge_alone(
    slot, count, row, head, outputs, logarithms, arrivals, output, sinks,
    NUM_KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, DIMS: tl.constexpr,
    AT_ONCE: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Merge the pieces of a decode without shared blocks, if this program is the last to arrive."""
    first = (slot * NUM_KV_HEADS + head) * GROUPS
    tl.debug_barrier()  # all threads have stored before one signals
    if tl.atomic_add(arrivals + first, 1, sem="acq_rel", scope="gpu") == count - 1:
        merged = _merge(
            outputs + first * HEAD_DIM, logarithms + first, count, sinks + head * GROUPS if HAS_SINKS else sinks,
            NUM_KV_HEADS, GROUPS, HEAD_DIM, ROWS, DIMS, AT_ONCE, 3, HAS_SINKS,
        )  # fmt: skip
        rows, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
        to = (row * NUM_KV_HEADS + head).to(tl.int64) * (GROUPS * HEAD_DIM)
        to += rows[:, None] * HEAD_DIM + dims[None, :]
        is_real = (rows < GROUPS)[:, None] & (dims < HEAD_DIM)[None, :]
        tl.store(output + to, merged.to(output.dtype.element_ty), mask=is_real)
        tl.store(arrivals + first, 0)  # the next layer counts from zero


@triton.jit(do_not_specialize_on_alignment=["tables", "members"])
def attend_pieces(
    query,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    tables,
    pieces,
    members,
    splits,
    output,
    outputs,
    logarithms,
    arrivals,
    sinks,
    scaling,
    NUM_KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ENTRY: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    MERGED_ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    VALUE_DIMS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    MERGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LIMITED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SCALED: tl.constexpr,
):
    """A program attends to one piece for the query heads of one KV head."""
    if OVERLAPS:  # this kernel may start before the previous one ends, and the next before this one ends
        gdc_wait()
        gdc_launch_dependents()
    number, head = tl.program_id(0) // NUM_KV_HEADS, tl.program_id(0) % NUM_KV_HEADS
    piece = pieces + (1 + number) * ENTRY
    row, start, end, table = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2), tl.load(piece + 3)
    slot, part, count, block = tl.load(piece + 4), tl.load(piece + 5), tl.load(piece + 6), tl.load(piece + 7)
    if number >= tl.load(pieces):
        return
    keys, values, scale = key_cache + head * HEAD_DIM, value_cache + head * VALUE_DIM, scaling * 1.4426950408889634
    if SCALED:  # a head's values are those of 16 slots
        values += head * (15 * VALUE_DIM)
        key_scales += head * 16
        value_scales += head * 16
    # Two paths, though one would do: addresses of members cost up to 2 % in steps without bundles.
    SHARES: tl.constexpr = ROWS >= 2 * GROUPS
    if SHARES and row < 0:
        attend_for_members(
            query, keys, values, key_scales, value_scales, tables + table, block, start, end, scale, members + slot,
            -row, splits, part, head, outputs, logarithms, NUM_KV_HEADS, GROUPS, HEAD_DIM, VALUE_DIM, BLOCK_SIZE, TILE,
            ROWS, DIMS, VALUE_DIMS, SOFTCAP, False, SCALED,
        )  # fmt: skip
    else:
        _attend_for_one(
            query, keys, values, key_scales, value_scales, tables + table, block, start, end, scale, row, slot, part,
            count, head, output, outputs, logarithms, sinks, NUM_KV_HEADS, GROUPS, HEAD_DIM, VALUE_DIM, BLOCK_SIZE,
            TILE, ROWS, DIMS, VALUE_DIMS, SOFTCAP, LIMITED, HAS_SINKS, SCALED,
        )  # fmt: skip
    if MERGES:
        if SHARES and (row < 0) | (count < 0):
            _merge_members(
                splits, members + slot, row, head, outputs, logarithms, arrivals, output, sinks, NUM_KV_HEADS, GROUPS,
                VALUE_DIM, ROWS, VALUE_DIMS, HAS_SINKS,
            )  # fmt: skip
        elif count > 1:
            _merge_alone(
                slot, count, row, head, outputs, logarithms, arrivals, output, sinks, NUM_KV_HEADS, GROUPS, VALUE_DIM,
                MERGED_ROWS, VALUE_DIMS, AT_ONCE, HAS_SINKS,
            )  # fmt: skip


@triton.jit
def merge_pieces(
    splits,
    outputs,
    logarithms,
    output,
    sinks,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    OVERLAPS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """A program merges the pieces of one split decode and query head. HEAD_DIM: of values."""
    row, head = tl.program_id(0) // NUM_HEADS, tl.program_id(0) % NUM_HEADS
    slot, count = tl.load(splits + 2 * row), tl.load(splits + 2 * row + 1)
    if OVERLAPS:  # the next kernel may fetch its weights meanwhile
        gdc_launch_dependents()
        gdc_wait()
    if count > 1:
        first = slot * NUM_HEADS + head
        merged = _merge(
            outputs + first * HEAD_DIM, logarithms + first, count, sinks + head if HAS_SINKS else sinks, NUM_HEADS, 1,
            HEAD_DIM, 1, DIMS, AT_ONCE, 1, HAS_SINKS,
        )  # fmt: skip
        dims = tl.arange(0, DIMS)[None, :]
        to = output + (row * NUM_HEADS + head).to(tl.int64) * HEAD_DIM
        tl.store(to + dims, merged.to(output.dtype.element_ty), mask=dims < HEAD_DIM)
