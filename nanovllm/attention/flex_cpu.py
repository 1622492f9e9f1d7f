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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.attention.flex_tiles import MIN_TILES, TileCall, TileRows, TileTables, runs
from nanovllm.cache.kinds import LayerTraits
from nanovllm.core.batch import ScheduledSequence
from nanovllm.core.batch_layout import BatchLayout

# Tiles that tables have room for, at least: the compiler refuses a symbol that can only be MIN_TILES.
_MIN_TABLE_TILES = MIN_TILES + 1


class FlexAttention:
    """The `flex` backend. One instance serves every layer of an engine; each kind's two calls compile once.

    Args:
        kinds: of the model's layers.
        max_num_seqs, max_num_batched_tokens: bounds of a step, which size the tables.
    """

    reads_whole_blocks = True  # masked slots too

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
        # Of decodes and of chunks, for each sight with sinks or without.
        self._tables = {
            key: [
                TileTables(*key, block_size, most, num_blocks, device) for most in (max_decode_tiles, max_chunk_tiles)
            ]
            for key in {(traits.sight, traits.has_sinks) for traits in kinds}
        }
        # Of each kind, for decodes and for chunks.
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
        firsts, lasts = layout.positions[layout.row_starts[:-1]], layout.positions[layout.row_starts[1:] - 1]
        tables, starts = self._block_tables(layout.entries, firsts, lasts)
        parts = []
        if count:
            decodes = TileRows(tables, starts[:count], lasts[:count], lasts[:count], lasts[:count])
            parts.append(self._fill(0, 1, decodes, np.arange(count)))
        if count < len(firsts):
            size, firsts, lasts = self.block_size, firsts[count:], lasts[count:]
            num_tiles = lasts // size - firsts // size + 1  # of each chunk
            positions = runs(firsts // size, num_tiles) * size
            of_tiles = (np.repeat(of_chunk, num_tiles) for of_chunk in (starts[count:], firsts, lasts))
            starts, first_rows, last_rows = of_tiles
            first_rows, last_rows = np.maximum(first_rows, positions), np.minimum(last_rows, positions + size - 1)
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
        first, end = np.minimum.reduce(seen) // self.block_size, lasts // self.block_size + 1
        spans = zip(entries, first.tolist(), end.tolist(), strict=True)
        blocks = itertools.chain.from_iterable(entry.block_table[a:b] for entry, a, b in spans)
        counts = end - first
        return np.fromiter(blocks, np.int32, int(counts.sum())), counts.cumsum() - end


class _Part(NamedTuple):
    """The decode tiles of a step, or its chunk tiles."""

    call: int  # 0 for decodes, 1 for chunks
    size: int  # positions of a tile
    num_tiles: int
    rows: Tensor  # [num_tokens] int64: the row of the tiles, of all positions, that each token takes


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
        groups, value_dim = grouped.shape[2], value_cache.shape[2]
        output = query.new_empty(*query.shape[:2], value_dim)
        counts = [len(part.rows) for part in self.parts]
        for part, own, to in zip(self.parts, torch.split(grouped, counts), torch.split(output, counts), strict=True):
            size, tiles = part.size, max(MIN_TILES, part.num_tiles)
            # [kv head, tile, group, position in tile, head_dim]: so that row % size is the position
            rows = query.new_zeros(tiles * size, num_kv_heads, groups, head_dim)
            rows[part.rows] = own
            rows = rows.view(tiles, size, num_kv_heads, groups, head_dim).permute(2, 0, 3, 1, 4)
            rows = rows.reshape(1, num_kv_heads, tiles * groups * size, head_dim)
            attended = self.backend.calls[kind][part.call].attend(rows, keys, values, scaling, sinks)
            attended = attended.view(num_kv_heads, tiles, groups, size, value_dim).permute(1, 3, 0, 2, 4)
            to.copy_(attended.reshape(tiles * size, num_kv_heads * groups, value_dim)[part.rows])
        return output
