"""Compiled FlexAttention (Dong et al. 2024) on a CPU, over hand-built block masks: the block mask is the block table.

The query heads that share a KV head (a group of G) are folded into the query's rows, so that K and V are read once
for all of them. Rows come in tiles, one row of the block mask each::

    decode tile   G rows, all at the sequence's last position         full: its earlier blocks   partial: its last block
    chunk tile    G x block_size rows, the positions of one block     full: the blocks before    partial: its own block

With a query at position q in row q % block_size of its block's tile, the partial block of a chunk tile is seen
diagonally, `kv % block_size <= row % block_size`, and nothing needs to be captured.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from nanovllm.batch import NULL_BLOCK, ScheduledSequence
from nanovllm.device import own_code
from nanovllm.layout import BatchLayout, LayerTraits, Sight


def forward_mask(
    seq_lengths: tuple[int, int],
    partial: tuple[Tensor, Tensor],
    full: tuple[Tensor, Tensor] | tuple[None, None],
    block_size: tuple[int, int],
    mask_mod: Callable[..., Any],
) -> BlockMask:
    """A block mask of hand-built tables, for forward passes alone.

    Args:
        partial, full: counts [batch, heads, num_tiles] int32 and blocks [batch, heads, num_tiles, width] int32 of the
            blocks seen in part and whole.
        block_size: rows of a tile, slots of a block.
    """
    return BlockMask(
        seq_lengths=seq_lengths,
        kv_num_blocks=partial[0],
        kv_indices=partial[1],
        full_kv_num_blocks=full[0],
        full_kv_indices=full[1],
        q_num_blocks=None,
        q_indices=None,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=block_size,
        mask_mod=mask_mod,
    )


MIN_TILES = 2  # fewest tiles of a call: a single one would be compiled as a special case
_NOWHERE = -1  # the index of a block that holds no positions


class TileRows(NamedTuple):
    """The decode tiles of a step, or its chunk tiles; each array except `tables` has one item a tile.

    tables: block tables, concatenated.
    table_starts: index in `tables` of block 0 of the tile's sequence.
    positions: position of the tile's first row.
    first_rows, last_rows: positions of the first and the last row that the step has.
    """

    tables: NDArray[np.int32]
    table_starts: NDArray[np.int64]
    positions: NDArray[np.int64]
    first_rows: NDArray[np.int64]
    last_rows: NDArray[np.int64]


class TileTables:
    """Block lists of a step's decode tiles, or of its chunk tiles, for layers of one sight, with sinks or without.

    Columns after a tile's count keep old block numbers, since a kernel may read one of them ahead.

    Args:
        max_tiles: most tiles of a step.
        num_blocks: blocks of the cache; the lowering needs one column for each.
    """

    def __init__(
        self, sight: Sight, has_sinks: bool, block_size: int, max_tiles: int, num_blocks: int, device: torch.device
    ) -> None:
        self._sight = sight
        self._has_sinks = has_sinks
        self._block_size = block_size

        def table(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        # Lists of partial blocks, then of full ones, in one tensor: one call sets a step's blocks.
        lists = table(2, 1, 1, max_tiles, num_blocks)
        self._lists, self._list_starts = lists.view(-1), np.arange(2 * max_tiles).reshape(2, -1) * num_blocks
        # The lengths of both lists, and the position of each tile's first row: in its sequence, or within its block
        # where the mask compares slots of a block.
        self._numbers = table(3, max_tiles)
        counts = self._numbers[:2, None, None]
        self.indices: list[Tensor] = []  # index of each block in its sequence, for masks of positions
        if has_sinks or not sight.is_full:
            self.indices.append(table(num_blocks).fill_(_NOWHERE))
        self.parts = counts[0], lists[0], counts[1], lists[1], self._numbers[2], *self.indices

    def fill(self, rows: TileRows) -> None:
        """Set the tables for a step; tiles that it lacks, up to MIN_TILES, see nothing."""
        num_tiles = len(rows.positions)
        size = self._block_size
        device = self._lists.device
        own = rows.last_rows // size
        border = self._sight.first_seen(rows.first_rows) // size  # the first block that any row sees
        whole = np.minimum(own, -(-self._sight.first_seen(rows.last_rows) // size))  # the first that all rows see whole
        num_begun = whole - border
        num_full = own - whole
        num_seen = own - border + 1
        # A tile sees one run of its sequence's blocks: some partial, the next ones full, the last, its own, partial.
        blocks = rows.tables[runs(rows.table_starts + border, num_seen)]
        partial, full = self._list_starts[:, :num_tiles]
        pieces = (partial, full, partial + num_begun), (num_begun, num_full, np.ones_like(own))
        to = runs(*(np.array(piece).T.ravel() for piece in pieces))
        self._lists.scatter_(0, torch.from_numpy(to).to(device), torch.from_numpy(blocks).to(device))
        if self._has_sinks:
            self._lists.scatter_(0, torch.from_numpy(partial + num_begun + 1).to(device), NULL_BLOCK)
        positions = rows.positions
        if self.indices:
            indices = torch.from_numpy(runs(border, num_seen)).int().to(device)
            self.indices[0].scatter_(0, torch.from_numpy(blocks).long().to(device), indices)
        else:
            positions = positions % size
        numbers = np.array((num_begun + 1 + self._has_sinks, num_full, positions))
        self._numbers[:, :num_tiles] = torch.from_numpy(numbers).to(device)
        if num_tiles < MIN_TILES:
            self._numbers[:, num_tiles:MIN_TILES] = 0


def runs(firsts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Consecutive numbers, `counts[i]` of them from `firsts[i]` on, for one i after the other."""
    ends = counts.cumsum()
    numbers = np.repeat(firsts - ends + counts, counts)
    numbers += np.arange(len(numbers))
    return numbers


class TileCall(nn.Module):
    """FlexAttention over tiles, compiled for one kind of layers.

    The compiler takes a module's numbers as constants; as arguments the sizes may become symbols.

    Args:
        rows: rows of a tile for one query head: 1 for decodes, a block for chunks.
    """

    def __init__(self, traits: LayerTraits, block_size: int, rows: int, tables: TileTables) -> None:
        super().__init__()
        self._tables = tables
        self.num_groups = traits.num_groups
        self.rows = rows
        self.block_size = block_size
        (self.window, self.chunk), self.softcap = traits.sight, traits.softcap
        self.sink_slot = NULL_BLOCK * block_size + block_size - 1
        # Only the number of rows, marked at each call, may become a symbol: with the cache's size as another, or with
        # sizes that an earlier process saw change, the generated code does not compile.
        self._compiled: Callable[..., Tensor] = torch.compile(own_code(_attend_tiles), fullgraph=True, dynamic=False)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float, sinks: Tensor | None) -> Tensor:
        """query [1, num_kv_heads, num_tiles * num_groups * rows, head_dim]; returns value_dim elements in its place."""
        torch._dynamo.mark_dynamic(query, 2)
        sinks = None if sinks is None else sinks.detach().float()
        # Compiled code is bound to the dispatch keys in force. Only the first call, from within the compiler's check of
        # a layer, is under a dispatch mode: this makes the keys of all calls the same.
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return self._compiled(self, query, keys, values, self._tables.parts, scaling, sinks)


def _attend_tiles(
    call: TileCall,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: tuple[Tensor, ...],
    scaling: float,
    sinks: Tensor | None,
) -> Tensor:
    block_size = call.block_size
    rows = call.rows
    groups = call.num_groups
    window = call.window
    chunk = call.chunk
    softcap = call.softcap
    sink_slot = call.sink_slot
    tile, lists, (positions, *indices) = groups * rows, tables[:4], tables[4:]

    def is_not_later(batch: Tensor, head: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        return slot % block_size <= (positions[row // tile] if rows == 1 else row % rows)

    def is_in_sight(batch: Tensor, head: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        index = indices[0][slot // block_size]
        key = index * block_size + slot % block_size
        own = positions[row // tile] + row % rows
        seen = (index >= 0) & (key <= own)
        if window is not None:
            seen = seen & (key > own - window)
        if chunk is not None:
            seen = seen & (key // chunk == own // chunk)
        return seen if sinks is None else seen | (slot == sink_slot)

    def score(value: Tensor, batch: Tensor, head: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        if softcap is not None:
            value = softcap * torch.tanh(value / softcap)
        if sinks is not None:
            value = torch.where(slot == sink_slot, sinks[head * groups + row // rows % groups], value)
        return value

    num_tiles = query.shape[2] // tile
    num_partial, partial, num_full, full = (table[:, :, :num_tiles] for table in lists)
    block_mask = forward_mask(
        (query.shape[2], keys.shape[2]),
        (num_partial, partial),
        (num_full, full),
        (tile, block_size),
        is_in_sight if indices else is_not_later,
    )
    changes_scores = softcap is not None or sinks is not None
    result: Any = flex_attention(
        query, keys, values, score_mod=score if changes_scores else None, block_mask=block_mask, scale=scaling
    )
    attended: Tensor = result  # no log-sum-exp with it
    return attended


# Tiles that tables have room for, at least: the compiler refuses a symbol that can only be MIN_TILES.
_MIN_TABLE_TILES = MIN_TILES + 1


class FlexAttention:
    """The `flex` backend. One instance serves every layer of an engine; each kind's two calls compile once.

    Args:
        kinds: traits of each kind of layers.
        max_num_seqs, max_num_batched_tokens: limits of a step, which size the tables.
    """

    reads_whole_blocks = True

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        kinds: Sequence[LayerTraits],
        max_num_seqs: int,
        max_num_batched_tokens: int,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.device = device
        max_decode_tiles = max(_MIN_TABLE_TILES, max_num_seqs)
        # A chunk of n tokens has at most n / block_size + 2 tiles, and there are at most max_num_seqs chunks.
        max_chunk_tiles = max(_MIN_TABLE_TILES, max_num_batched_tokens // block_size + 2 * max_num_seqs)
        # (tables of decodes, tables of chunks) for each sight, with sinks or without.
        self._tables = {
            key: [
                TileTables(*key, block_size, most, num_blocks, device) for most in (max_decode_tiles, max_chunk_tiles)
            ]
            for key in {(traits.sight, traits.has_sinks) for traits in kinds}
        }
        # (call for decodes, call for chunks) of each kind.
        self.calls = [
            [
                TileCall(traits, block_size, rows, tables)
                for rows, tables in zip((1, block_size), self._tables[traits.sight, traits.has_sinks], strict=True)
            ]
            for traits in kinds
        ]

    def plan(self, layout: BatchLayout) -> FlexPlan:
        """Fill the tables for one step; they are overwritten by the next plan."""
        count = layout.num_decodes
        firsts = layout.positions[layout.row_starts[:-1]]
        lasts = layout.positions[layout.row_starts[1:] - 1]
        tables, starts = self._block_tables(layout.entries, firsts, lasts)
        parts = []
        if count:
            decodes = TileRows(tables, starts[:count], lasts[:count], lasts[:count], lasts[:count])
            parts.append(self._fill(0, 1, decodes, np.arange(count)))
        if count < len(firsts):
            size = self.block_size
            firsts = firsts[count:]
            lasts = lasts[count:]
            num_tiles = lasts // size - firsts // size + 1  # tiles of each chunk
            positions = runs(firsts // size, num_tiles) * size
            of_tiles = (np.repeat(of_chunk, num_tiles) for of_chunk in (starts[count:], firsts, lasts))
            starts, first_rows, last_rows = of_tiles
            first_rows = np.maximum(first_rows, positions)
            last_rows = np.minimum(last_rows, positions + size - 1)
            rows = runs(firsts % size + (num_tiles.cumsum() - num_tiles) * size, lasts - firsts + 1)
            parts.append(self._fill(1, size, TileRows(tables, starts, positions, first_rows, last_rows), rows))
        return FlexPlan(self, parts)

    def _fill(self, call: int, size: int, tiles: TileRows, rows: NDArray[np.int64]) -> _Part:
        for tables in self._tables.values():
            tables[call].fill(tiles)
        return _Part(call, size, len(tiles.positions), torch.from_numpy(rows).to(self.device))

    def _block_tables(
        self, entries: Sequence[ScheduledSequence], firsts: NDArray[np.int64], lasts: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The blocks that some layer sees, concatenated, and where in them block 0 of each entry lies or would lie.

        Args:
            firsts, lasts: positions of each entry's first and last row.
        """
        seen = [sight.first_seen(firsts) for sight, _ in self._tables]
        first = np.minimum.reduce(seen) // self.block_size
        end = lasts // self.block_size + 1
        spans = zip(entries, first.tolist(), end.tolist(), strict=True)
        blocks = itertools.chain.from_iterable(entry.block_table[a:b] for entry, a, b in spans)
        counts = end - first
        return np.fromiter(blocks, np.int32, int(counts.sum())), counts.cumsum() - end


class _Part(NamedTuple):
    """The decode tiles of a step, or its chunk tiles."""

    call: int  # 0 for decodes, 1 for chunks
    size: int  # positions of a tile
    num_tiles: int
    rows: Tensor  # [num_tokens] int64: the row that each token takes, among the rows of all tiles


@dataclass(frozen=True, slots=True)
class FlexPlan:
    """One step's tiles, decodes first; `attend` is called once a layer."""

    backend: FlexAttention
    parts: list[_Part]

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scaling: float,
        kind: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionPlan`."""
        num_kv_heads, head_dim = key_cache.shape[1:]
        keys = key_cache.transpose(0, 1)[None]  # [1, num_kv_heads, num_slots, head_dim], a view
        values = value_cache.transpose(0, 1)[None]
        grouped = query.view(len(query), num_kv_heads, -1, head_dim)
        groups = grouped.shape[2]
        value_dim = value_cache.shape[2]
        output = query.new_empty(*query.shape[:2], value_dim)
        counts = [len(part.rows) for part in self.parts]
        for part, own, to in zip(self.parts, torch.split(grouped, counts), torch.split(output, counts), strict=True):
            size = part.size
            tiles = max(MIN_TILES, part.num_tiles)
            # [kv head, tile, group, position in tile, head_dim]: so that row % size is the position
            rows = query.new_zeros(tiles * size, num_kv_heads, groups, head_dim)
            rows[part.rows] = own
            rows = rows.view(tiles, size, num_kv_heads, groups, head_dim).permute(2, 0, 3, 1, 4)
            rows = rows.reshape(1, num_kv_heads, tiles * groups * size, head_dim)
            attended = self.backend.calls[kind][part.call].attend(rows, keys, values, scaling, sinks)
            attended = attended.view(num_kv_heads, tiles, groups, size, value_dim).permute(1, 3, 0, 2, 4)
            to.copy_(attended.reshape(tiles * size, num_kv_heads * groups, value_dim)[part.rows])
        return output
