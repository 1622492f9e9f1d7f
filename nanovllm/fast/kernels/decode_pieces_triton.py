"""Triton kernel of `paged_decode` that cuts a step's contexts into pieces, of decodes and of bundles.

A bundle is a group of decodes with equal first blocks in their block tables, at most as many as one program processes.
The bundle has pieces of the shared blocks, and each member has pieces of its other blocks::

    pieces       [1 + num_pieces, 8] int32
    row 0        number of pieces
    of a decode  decode, first token, end, start of its block table, its first slot in the workspace, index among the
                 pieces that are merged, number of these (negative if a bundle's pieces are among them), first block
    of a bundle  number of members (negative), first token, end, start of its block table, index of its first member,
                 index among the bundle's pieces, number of these, first block

Pieces of bundles come first, in the table and in the order of merging. Layers with a window or chunks share nothing,
and a decode's first piece begins with the first visible token, also within a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

ENTRY = 8  # numbers per piece
BUNDLE_ENTRY = 4  # numbers per bundle: first member, number of members, number of blocks, start of its block table


@triton.jit
def _first_seen(positions, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """First visible token of decodes at these positions; WINDOW or CHUNK 0: none."""
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
    """Numbers of tiles per decode: to read (0 for padding), shared ones before, hidden ones before."""
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
    """Number of tiles in the shared blocks of each bundle; 0 for padding."""
    is_there = numbers < num_bundles
    return tl.load(bundles + numbers * BUNDLE_ENTRY + 2, mask=is_there, other=0) * (BLOCK_SIZE // TILE)


@triton.jit
def _num_pieces(tiles, rows, num_rows, length):
    """Number of pieces; padding has one empty piece."""
    return tl.where(rows < num_rows, tl.maximum((tiles + length - 1) // length, 1), 0)


@triton.jit
def _shared_pieces(tiles, wide_parts, rows, num_rows, length, HAS_WIDE: tl.constexpr):
    """Number of pieces that these decodes' bundles leave for them, with this number of shared tiles."""
    parts = (tiles + length - 1) // length
    if HAS_WIDE:
        of_wide = tl.load(wide_parts + rows, mask=rows < num_rows, other=0)
        parts = tl.where(of_wide > 0, of_wide, parts)
    return parts


@triton.jit
def _write(
    pieces, tables, places, rows, first, tiles, begin, end, starts, slots, counts, before,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, ENTRY: tl.constexpr, OWN: tl.constexpr, WIDTH: tl.constexpr,
    LIMITED: tl.constexpr,
):  # fmt: skip
    """Cut `tiles`, starting at tile `first`, into `counts` pieces, for each of OWN decodes or bundles.

    LIMITED: pieces begin no earlier than their decode's token `begin`.
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
        # Adds columns, since Triton 3.6 generates invalid code for the sum of both vectors.
        total = tl.where(before > 0, -1, 1)[:, None] * (before[:, None] + counts[:, None])
        tl.store(to + 6, tl.broadcast_to(total, (OWN, WIDTH)), mask=is_there)
        tl.store(to + 7, block, mask=is_there)


@triton.jit
def _cut_decodes(
    tables, table_starts, block_counts, positions, shared, wide_parts, pieces, splits, own, num_rows, length, before,
    before_split,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, ENTRY: tl.constexpr, OWN: tl.constexpr, WIDTH: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, HAS_WIDE: tl.constexpr,
):  # fmt: skip
    """Write the pieces of OWN decodes, starting at `own`, after their shared blocks."""
    rows = own + tl.arange(0, OWN)
    tiles, before_own, first = _own_tiles(
        block_counts, positions, shared, rows, num_rows, TILE, BLOCK_SIZE, WINDOW, CHUNK
    )  # fmt: skip
    counts = _num_pieces(tiles, rows, num_rows, length)
    parts = _shared_pieces(before_own, wide_parts, rows, num_rows, length, HAS_WIDE)
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
    """Write the pieces of OWN bundles, starting at `own`."""
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
    do_not_specialize_on_alignment=[
        "tables",
        "table_starts",
        "block_counts",
        "positions",
        "shared",
        "wide_parts",
        "bundles",
    ],
)
def cut_contexts(
    tables,
    table_starts,
    block_counts,
    positions,
    shared,
    wide_parts,
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
    HAS_WIDE: tl.constexpr = False,
):
    """Each program cuts OWN decodes and up to OWN bundles.

    A step has as many pieces as decodes, within bounds: with equal contexts, and enough decodes to fill the GPU, each
    has one piece. wide_parts: [num_rows], pieces that wide programs leave for each decode; see `wide_pieces_triton`.
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
    num_pieces = tl.maximum(num_pieces - num_shared, 1)  # each bundle may add one piece, as each decode may
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
        tiles, before_own, _ = _own_tiles(
            block_counts, positions, shared, rows, num_rows, TILE, BLOCK_SIZE, WINDOW, CHUNK
        )  # fmt: skip
        counts = _num_pieces(tiles, rows, num_rows, length)
        total += tl.sum(counts)
        before += tl.sum(tl.where(rows < own, counts, 0))
        counts += _shared_pieces(before_own, wide_parts, rows, num_rows, length, HAS_WIDE)
        before_split += tl.sum(tl.where((counts > 1) & (rows < own), counts, 0))
    if own == 0:
        tl.store(pieces, total)

    _cut_decodes(
        tables, table_starts, block_counts, positions, shared, wide_parts, pieces, splits, own, num_rows, length,
        before, before_split, TILE, BLOCK_SIZE, ENTRY, OWN, WIDTH, WINDOW, CHUNK, HAS_WIDE,
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
