"""The Triton side of `paged_decode` that cuts a step's contexts into pieces, those of decodes and those of bundles.

A bundle is some decodes whose block tables begin with the same blocks, as many as one program reads for. It has pieces
of these blocks, and each of its members pieces of the rest::

    pieces       [1 + num_pieces, 8] int32
    row 0        how many pieces there are
    of a decode  decode, first token, end, start of its block table, its first slot in the workspace, number among the
                 pieces that it is merged from, how many those are (negative behind a bundle's), first block
    of a bundle  number of members (negative), first token, end, start of its block table, index of its first member,
                 number among the bundle's pieces, how many those are, first block

The pieces of bundles come first, in the table and in the order in which they are merged. In layers whose rows do not
see all before them nothing is shared, and the first piece of a decode begins with the first token in sight, wherever
that lies in its tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

ENTRY = 8  # numbers of a piece
BUNDLE_ENTRY = 4  # of a bundle: its first member, how many those are, how many blocks, start of its block table


@triton.jit
def _first_seen(positions, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first token that decodes at these positions see; a WINDOW or CHUNK of 0 is none."""
    first = tl.zeros_like(positions)
    if WINDOW > 0:
        first = tl.maximum(first, positions - (WINDOW - 1))
    if CHUNK > 0:
        first = tl.maximum(first, positions // CHUNK * CHUNK)
    return first


@triton.jit
def _own_tiles(
    block_counts, positions, shared, rows, num_rows, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Tiles of some decodes' contexts, 0 for padding; those before, which they share; and those out of sight."""
    is_used = tl.load(block_counts + rows, mask=rows < num_rows, other=0) > 0
    positions = tl.load(positions + rows, mask=is_used, other=0).to(tl.int32)
    if WINDOW > 0 or CHUNK > 0:
        hidden = _first_seen(positions, WINDOW, CHUNK) // TILE
        before = tl.zeros_like(hidden)
    else:
        before = tl.load(shared + rows, mask=is_used, other=0) * (BLOCK_SIZE // TILE)
        hidden = before
    return tl.where(is_used, (positions + TILE) // TILE - hidden, 0), before, hidden


@triton.jit
def _bundle_tiles(
    bundles, numbers, num_bundles, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BUNDLE_ENTRY: tl.constexpr
):
    """Tiles of the blocks that some bundles read; 0 for padding."""
    is_there = numbers < num_bundles
    return tl.load(bundles + numbers * BUNDLE_ENTRY + 2, mask=is_there, other=0) * (BLOCK_SIZE // TILE)


@triton.jit
def _num_pieces(tiles, rows, num_rows, length):
    """Padding has one piece too, which is empty."""
    return tl.where(rows < num_rows, tl.maximum((tiles + length - 1) // length, 1), 0)


@triton.jit
def _write(
    pieces, tables, places, rows, first, tiles, begin, end, starts, slots, counts, before,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, ENTRY: tl.constexpr, OWN: tl.constexpr, WIDTH: tl.constexpr,
    LIMITED: tl.constexpr,
):  # fmt: skip
    """Cut `tiles` from the tile `first` on into `counts` pieces each, of OWN decodes or bundles.

    LIMITED: no piece begins before its decode's token `begin`.
    """
    divisor = tl.maximum(counts, 1)[:, None]
    for first_number in range(0, tl.max(counts, 0), WIDTH):
        number = first_number + tl.arange(0, WIDTH)[None, :]
        is_there = number < counts[:, None]
        start = (first[:, None] + number * tiles[:, None] // divisor) * TILE
        stop = tl.minimum((first[:, None] + (number + 1) * tiles[:, None] // divisor) * TILE, end[:, None])
        if LIMITED:
            start = tl.maximum(start, begin[:, None])
        is_read = is_there & (tiles > 0)[:, None]
        block = tl.load(tables + starts[:, None] + start // BLOCK_SIZE, mask=is_read, other=0)
        to = pieces + (1 + places[:, None] + number) * ENTRY
        tl.store(to, tl.broadcast_to(rows[:, None], (OWN, WIDTH)), mask=is_there)
        tl.store(to + 1, start, mask=is_there)
        tl.store(to + 2, stop, mask=is_there)
        tl.store(to + 3, tl.broadcast_to(starts[:, None], (OWN, WIDTH)), mask=is_there)
        tl.store(to + 4, tl.broadcast_to(slots[:, None], (OWN, WIDTH)), mask=is_there)
        tl.store(to + 5, before[:, None] + number, mask=is_there)
        # A sum of columns: of the sum of both vectors Triton 3.6 makes code that its own checks refuse.
        total = tl.where(before > 0, -1, 1)[:, None] * (before[:, None] + counts[:, None])
        tl.store(to + 6, tl.broadcast_to(total, (OWN, WIDTH)), mask=is_there)
        tl.store(to + 7, block, mask=is_there)


@triton.jit
def _cut_decodes(
    tables, table_starts, block_counts, positions, shared, pieces, splits, own, num_rows, length, before, before_split,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, ENTRY: tl.constexpr, OWN: tl.constexpr, WIDTH: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The pieces of OWN decodes from `own` on, behind the blocks that they share."""
    rows = own + tl.arange(0, OWN)
    tiles, behind, first = _own_tiles(
        block_counts, positions, shared, rows, num_rows, TILE, BLOCK_SIZE, WINDOW, CHUNK
    )  # fmt: skip
    counts, parts = _num_pieces(tiles, rows, num_rows, length), (behind + length - 1) // length
    totals = counts + parts
    split = tl.where(totals > 1, totals, 0)
    slots = before_split + tl.cumsum(split, 0) - split
    contexts = tl.load(positions + rows, mask=tiles > 0, other=-1).to(tl.int32) + 1
    starts = tl.load(table_starts + rows, mask=rows < num_rows, other=0)
    tl.store(splits + 2 * rows, slots, mask=rows < num_rows)
    tl.store(splits + 2 * rows + 1, totals, mask=rows < num_rows)
    begin = _first_seen(tl.maximum(contexts - 1, 0), WINDOW, CHUNK)
    _write(
        pieces, tables, before + tl.cumsum(counts, 0) - counts, rows, first, tiles, begin, contexts, starts, slots,
        counts, parts, TILE, BLOCK_SIZE, ENTRY, OWN, WIDTH, WINDOW > 0 or CHUNK > 0,
    )  # fmt: skip


@triton.jit
def _cut_bundles(
    tables, bundles, pieces, own, num_bundles, length, before,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, ENTRY: tl.constexpr, BUNDLE_ENTRY: tl.constexpr, OWN: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """The pieces of OWN bundles from `own` on."""
    numbers = own + tl.arange(0, OWN)
    tiles = _bundle_tiles(bundles, numbers, num_bundles, TILE, BLOCK_SIZE, BUNDLE_ENTRY)
    counts = (tiles + length - 1) // length
    bundle, zeros = bundles + numbers * BUNDLE_ENTRY, tl.zeros((OWN,), tl.int32)
    members = tl.load(bundle, mask=numbers < num_bundles, other=0)
    num_members = tl.load(bundle + 1, mask=numbers < num_bundles, other=0)
    starts = tl.load(bundle + 3, mask=numbers < num_bundles, other=0)
    _write(
        pieces, tables, before + tl.cumsum(counts, 0) - counts, -num_members, zeros, tiles, zeros, tiles * TILE, starts,
        members, counts, zeros, TILE, BLOCK_SIZE, ENTRY, OWN, WIDTH, False,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_rows", "num_bundles", "least_pieces", "most_pieces"],
    do_not_specialize_on_alignment=["tables", "table_starts", "block_counts", "positions", "shared", "bundles"],
)
def cut_contexts(
    tables,
    table_starts,
    block_counts,
    positions,
    shared,
    bundles,
    pieces,
    splits,
    num_rows,
    num_bundles,
    least_pieces,
    most_pieces,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ENTRY: tl.constexpr,
    BUNDLE_ENTRY: tl.constexpr,
    LANES: tl.constexpr,
    OWN: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr = 0,
    CHUNK: tl.constexpr = 0,
):
    """Each program cuts OWN decodes, and as many bundles, of which there are fewer.

    The pieces of a step are as many as its decodes, within bounds, so decodes of even contexts have one each, where
    they are enough to fill the GPU.
    """
    lanes, own = tl.arange(0, LANES), tl.program_id(0) * OWN
    total, num_used, num_shared = 0, 0, 0
    for first in range(0, num_bundles, LANES):
        tiles = _bundle_tiles(bundles, first + lanes, num_bundles, TILE, BLOCK_SIZE, BUNDLE_ENTRY)
        total += tl.sum(tiles)
        num_shared += tl.sum((tiles > 0).to(tl.int32))
    for first in range(0, num_rows, LANES):
        tiles, _, _ = _own_tiles(
            block_counts, positions, shared, first + lanes, num_rows, TILE, BLOCK_SIZE, WINDOW, CHUNK
        )  # fmt: skip
        total += tl.sum(tiles)
        num_used += tl.sum((tiles > 0).to(tl.int32))
    num_pieces = tl.minimum(tl.maximum(num_used, least_pieces), most_pieces)
    num_pieces = tl.maximum(num_pieces - num_shared, 1)  # since bundles add a piece each at most, as decodes do
    length = tl.maximum((total + num_pieces - 1) // num_pieces, 1)
    total, before, before_split, before_bundle = 0, 0, 0, 0
    for first in range(0, num_bundles, LANES):
        numbers = first + lanes
        tiles = _bundle_tiles(bundles, numbers, num_bundles, TILE, BLOCK_SIZE, BUNDLE_ENTRY)
        counts = (tiles + length - 1) // length
        total += tl.sum(counts)
        before_bundle += tl.sum(tl.where(numbers < own, counts, 0))
    before += total
    for first in range(0, num_rows, LANES):
        rows = first + lanes
        tiles, behind, _ = _own_tiles(
            block_counts, positions, shared, rows, num_rows, TILE, BLOCK_SIZE, WINDOW, CHUNK
        )  # fmt: skip
        counts = _num_pieces(tiles, rows, num_rows, length)
        total += tl.sum(counts)
        before += tl.sum(tl.where(rows < own, counts, 0))
        counts += (behind + length - 1) // length
        before_split += tl.sum(tl.where((counts > 1) & (rows < own), counts, 0))
    if own == 0:
        tl.store(pieces, total)

    _cut_decodes(
        tables, table_starts, block_counts, positions, shared, pieces, splits, own, num_rows, length, before,
        before_split, TILE, BLOCK_SIZE, ENTRY, OWN, WIDTH, WINDOW, CHUNK,
    )  # fmt: skip
    _cut_bundles(
        tables,
        bundles,
        pieces,
        own,
        num_bundles,
        length,
        before_bundle,
        TILE,
        BLOCK_SIZE,
        ENTRY,
        BUNDLE_ENTRY,
        OWN,
        WIDTH,
    )
