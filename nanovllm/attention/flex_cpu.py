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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from nanovllm.attention.block_mask import forward_mask, own_code
from nanovllm.batch_layout import BatchLayout

IntArray = NDArray[np.integer[Any]]
MIN_TILES = 2  # one would be compiled as a special case


class FlexAttention:
    """The `flex` backend. One instance serves every layer of an engine; each of its two calls compiles once.

    Args:
        num_groups: query heads per KV head.
        max_num_seqs, max_num_batched_tokens: bounds of a step, which size the index buffers.
    """

    reads_whole_blocks = True  # masked slots too

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_groups: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.num_groups = num_groups
        self.device = device
        max_decode_tiles = max(MIN_TILES, max_num_seqs)
        # A chunk of n tokens has at most n / block_size + 2 tiles, and there are at most max_num_seqs chunks.
        max_chunk_tiles = max_num_batched_tokens // block_size + 2 * max_num_seqs
        # The lowering wants one index column for each physical block.
        self.decode_index = _IndexBuffers(max_decode_tiles, num_blocks, device)
        self.chunk_index = _IndexBuffers(max_chunk_tiles, num_blocks, device)
        self.tail_offsets = torch.zeros(max_decode_tiles, dtype=torch.int32, device=device)
        self.decode = _TileAttention(num_groups, block_size)
        self.chunk = _TileAttention(num_groups * block_size, block_size)

    def plan(self, layout: BatchLayout) -> FlexPlan:
        """Fill the index buffers for one step; they are overwritten by the next plan."""
        if layout.num_decodes:
            self._fill_decodes(layout)
        num_chunk_tiles, chunk_rows = self._fill_chunks(layout)
        return FlexPlan(self, layout.num_decodes, num_chunk_tiles, torch.from_numpy(chunk_rows).to(self.device))

    def _fill_decodes(self, layout: BatchLayout) -> None:
        last = layout.positions[: layout.num_decodes]
        num_full = last // self.block_size
        tables = (e.block_table[:n] for e, n in zip(layout.decodes, num_full.tolist(), strict=True))
        full = np.fromiter(itertools.chain.from_iterable(tables), np.int32, int(num_full.sum()))
        tail_blocks = layout.slot_mapping[: layout.num_decodes] // self.block_size
        self.tail_offsets[: layout.num_decodes].copy_(torch.from_numpy(last % self.block_size))
        self.decode_index.fill(num_full, full, tail_blocks)

    def _fill_chunks(self, layout: BatchLayout) -> tuple[int, IntArray]:
        """Returns the number of tiles and, for each chunk row, its row among the tiles' (head group aside)."""
        tile_rows, num_full, full, own_blocks = [], [], [], []
        num_tiles = 0
        for entry in layout.chunks:
            first, end = entry.start // self.block_size, -(-(entry.start + entry.num_new_tokens) // self.block_size)
            first_row = num_tiles * self.block_size + entry.start % self.block_size
            tile_rows.append(np.arange(first_row, first_row + entry.num_new_tokens))
            table = np.array(entry.block_table[:end], np.int32)
            for block in range(first, end):
                num_full.append(block)
                full.append(table[:block])
            own_blocks.append(table[first:end])
            num_tiles += end - first
        if not num_tiles:
            return 0, np.zeros(0, np.int64)
        padded = self.chunk_index.fill(np.array(num_full), np.concatenate(full), np.concatenate(own_blocks))
        return padded, np.concatenate(tile_rows)


@dataclass(frozen=True, slots=True)
class FlexPlan:
    """One step's tiles; `attend` is called once a layer."""

    backend: FlexAttention
    num_decodes: int
    num_chunk_tiles: int
    chunk_rows: Tensor  # [num_chunk_tokens] int64

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scaling: float) -> Tensor:
        """See `AttentionPlan`."""
        num_kv_heads, head_dim = key_cache.shape[1:]
        backend, groups = self.backend, self.backend.num_groups
        keys = key_cache.transpose(0, 1)[None]  # [1, num_kv_heads, num_slots, head_dim], a view
        values = value_cache.transpose(0, 1)[None]
        grouped = query.view(-1, num_kv_heads, groups, head_dim)
        output = torch.empty_like(grouped)
        if self.num_decodes:
            n, tiles = self.num_decodes, max(MIN_TILES, self.num_decodes)
            rows = query.new_zeros(1, num_kv_heads, tiles, groups, head_dim)
            rows[0, :, :n] = grouped[:n].transpose(0, 1)
            rows = rows.view(1, num_kv_heads, tiles * groups, head_dim)
            tables = backend.decode_index.tables
            attended = backend.decode.attend(rows, keys, values, tables, backend.tail_offsets, scaling)
            output[:n] = attended.view(num_kv_heads, tiles, groups, head_dim)[:, :n].transpose(0, 1)
        if self.num_chunk_tiles:
            tiles, size = self.num_chunk_tiles, backend.block_size
            # [kv head, tile, group, position in block, head_dim]: so that row % block_size is the position
            rows = query.new_zeros(tiles * size, num_kv_heads, groups, head_dim)
            rows[self.chunk_rows] = grouped[self.num_decodes :]
            rows = rows.view(tiles, size, num_kv_heads, groups, head_dim).permute(2, 0, 3, 1, 4)
            rows = rows.reshape(1, num_kv_heads, tiles * groups * size, head_dim)
            attended = backend.chunk.attend(rows, keys, values, backend.chunk_index.tables, None, scaling)
            attended = attended.view(num_kv_heads, tiles, groups, size, head_dim).permute(1, 3, 0, 2, 4)
            output[self.num_decodes :] = attended.reshape(tiles * size, num_kv_heads, groups, head_dim)[self.chunk_rows]
        return output.view(query.shape)


class _IndexBuffers:
    """The block mask's tables: for each tile, the blocks seen whole and the one block seen in part.

    Columns behind a tile's count keep old block numbers, since a kernel may read one of them ahead.
    """

    def __init__(self, max_tiles: int, width: int, device: torch.device) -> None:
        self.full_blocks = torch.zeros(1, 1, max_tiles, width, dtype=torch.int32, device=device)
        self.num_full = torch.zeros(1, 1, max_tiles, dtype=torch.int32, device=device)
        self.own_block = torch.zeros(1, 1, max_tiles, width, dtype=torch.int32, device=device)
        self.num_own = torch.zeros(1, 1, max_tiles, dtype=torch.int32, device=device)
        self.tables = self.num_own, self.own_block, self.num_full, self.full_blocks

    def fill(self, num_full: IntArray, full_blocks: IntArray, own_blocks: IntArray) -> int:
        """Set a tile for each count of `num_full`, and up to MIN_TILES that see nothing; returns the number of tiles.

        Args:
            full_blocks: the tiles' blocks seen whole, concatenated.
            own_blocks: the block that each tile sees in part.
        """
        used, num_tiles = len(num_full), max(MIN_TILES, len(num_full))
        device = self.num_full.device
        tiles = np.repeat(np.arange(used), num_full)
        columns = np.arange(len(full_blocks)) - np.repeat(np.cumsum(num_full) - num_full, num_full)
        at = torch.from_numpy(np.stack([tiles, columns])).to(device)
        self.full_blocks[0, 0].index_put_((at[0], at[1]), torch.from_numpy(full_blocks).to(device))
        self.own_block[0, 0, :used, 0] = torch.from_numpy(own_blocks).to(device)
        for counts, of_used in ((self.num_full, torch.from_numpy(num_full).to(device)), (self.num_own, 1)):
            counts[0, 0, :used] = of_used
            counts[0, 0, used:num_tiles] = 0
        return num_tiles


class _TileAttention(nn.Module):
    """FlexAttention over tiles of `tile` query rows and blocks of `block_size` slots.

    The compiler takes a module's whole numbers as constants; as arguments the sizes may become symbols.
    """

    def __init__(self, tile: int, block_size: int) -> None:
        super().__init__()
        self.tile = tile
        self.block_size = block_size
        # Only the number of rows, marked at each call, may become a symbol: with the cache's size as another, or with
        # what an earlier process saw change, the generated code does not compile.
        self._compiled: Callable[..., Tensor] = torch.compile(own_code(_attend_tiles), fullgraph=True, dynamic=False)

    def attend(self, query: Tensor, *arguments: Any) -> Tensor:
        torch._dynamo.mark_dynamic(query, 2)
        # Compiled code is bound to the dispatch keys in force. Only the first call, from within the compiler's check of
        # a layer, is under a dispatch mode: this makes the keys of all calls the same.
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return self._compiled(self, query, *arguments)


def _attend_tiles(
    sizes: _TileAttention,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: tuple[Tensor, Tensor, Tensor, Tensor],
    tail_offsets: Tensor | None,
    scaling: float,
) -> Tensor:
    """Attention of query [1, num_kv_heads, num_tiles * tile, head_dim] over the blocks of the tables.

    Of its own block a decode tile sees the slots up to `tail_offsets` [max_tiles]; a chunk tile (None) the diagonal.
    """
    tile, block_size = sizes.tile, sizes.block_size

    def up_to_last_position(batch: Tensor, head: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        assert tail_offsets is not None
        return slot % block_size <= tail_offsets[row // tile]

    def diagonal(batch: Tensor, head: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        return slot % block_size <= row % block_size

    num_tiles = query.shape[2] // tile
    num_own, own_block, num_full, full_blocks = (table[:, :, :num_tiles] for table in tables)
    block_mask = forward_mask(
        (query.shape[2], keys.shape[2]),
        (num_own, own_block),
        (num_full, full_blocks),
        (tile, block_size),
        diagonal if tail_offsets is None else up_to_last_position,
    )
    result: Any = flex_attention(query, keys, values, block_mask=block_mask, scale=scaling)
    attended: Tensor = result  # no log-sum-exp beside it
    return attended
