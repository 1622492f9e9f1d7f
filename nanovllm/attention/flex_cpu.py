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
        if count:
            decodes = TileRows(tables, starts[:count], lasts[:count], lasts[:count], lasts[:count])
            for of_decodes, _ in self._tables.values():
                of_decodes.fill(decodes)
        if count == len(firsts):
            return FlexPlan(self, count, 0, torch.zeros(0, dtype=torch.int64, device=self.device))
        size, firsts, lasts = self.block_size, firsts[count:], lasts[count:]
        num_tiles = lasts // size - firsts // size + 1  # of each chunk
        positions = runs(firsts // size, num_tiles) * size
        starts, first_rows, last_rows = (np.repeat(of_chunk, num_tiles) for of_chunk in (starts[count:], firsts, lasts))
        first_rows, last_rows = np.maximum(first_rows, positions), np.minimum(last_rows, positions + size - 1)
        chunks = TileRows(tables, starts, positions, first_rows, last_rows)
        for _, of_chunks in self._tables.values():
            of_chunks.fill(chunks)
        chunk_rows = runs(firsts % size + (num_tiles.cumsum() - num_tiles) * size, lasts - firsts + 1)
        return FlexPlan(self, count, max(MIN_TILES, len(positions)), torch.from_numpy(chunk_rows).to(self.device))

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


@dataclass(frozen=True, slots=True)
class FlexPlan:
    """One step's tiles; `attend` is called once a layer."""

    backend: FlexAttention
    num_decodes: int
    num_chunk_tiles: int
    chunk_rows: Tensor  # [num_chunk_tokens] int64

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
        groups, value_dim, size = query.shape[1] // num_kv_heads, value_cache.shape[2], self.backend.block_size
        decode, chunk = self.backend.calls[kind]
        keys = key_cache.transpose(0, 1)[None]  # [1, num_kv_heads, num_slots, head_dim], a view
        values = value_cache.transpose(0, 1)[None]
        grouped = query.view(-1, num_kv_heads, groups, head_dim)
        output = query.new_empty(len(query), num_kv_heads, groups, value_dim)
        if self.num_decodes:
            n, tiles = self.num_decodes, max(MIN_TILES, self.num_decodes)
            rows = query.new_zeros(1, num_kv_heads, tiles, groups, head_dim)
            rows[0, :, :n] = grouped[:n].transpose(0, 1)
            rows = rows.view(1, num_kv_heads, tiles * groups, head_dim)
            attended = decode.attend(rows, keys, values, scaling, sinks)
            output[:n] = attended.view(num_kv_heads, tiles, groups, value_dim)[:, :n].transpose(0, 1)
        if self.num_chunk_tiles:
            tiles = self.num_chunk_tiles
            # [kv head, tile, group, position in block, head_dim]: so that row % block_size is the position
            rows = query.new_zeros(tiles * size, num_kv_heads, groups, head_dim)
            rows[self.chunk_rows] = grouped[self.num_decodes :]
            rows = rows.view(tiles, size, num_kv_heads, groups, head_dim).permute(2, 0, 3, 1, 4)
            rows = rows.reshape(1, num_kv_heads, tiles * groups * size, head_dim)
            attended = chunk.attend(rows, keys, values, scaling, sinks)
            attended = attended.view(num_kv_heads, tiles, groups, size, value_dim).permute(1, 3, 0, 2, 4)
            attended = attended.reshape(tiles * size, num_kv_heads, groups, value_dim)
            output[self.num_decodes :] = attended[self.chunk_rows]
        return output.view(*query.shape[:2], value_dim)
