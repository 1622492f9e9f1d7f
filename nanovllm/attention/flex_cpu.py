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
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from nanovllm.attention.block_mask import MIN_TABLE_TILES, MIN_TILES, IndexBuffers, forward_mask, own_code
from nanovllm.attention.flex_kinds import KindCalls
from nanovllm.cache.kinds import LayerTraits
from nanovllm.core.batch_layout import BatchLayout

IntArray = NDArray[np.integer[Any]]


class FlexAttention:
    """The `flex` backend. One instance serves every layer of an engine; each kind's two calls compile once.

    Args:
        kinds: of the model's layers.
        max_num_seqs, max_num_batched_tokens: bounds of a step, which size the index buffers.
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
        self.kinds = tuple(kinds)
        self.device = device
        max_decode_tiles = max(MIN_TABLE_TILES, max_num_seqs)
        # A chunk of n tokens has at most n / block_size + 2 tiles, and there are at most max_num_seqs chunks.
        max_chunk_tiles = max(MIN_TABLE_TILES, max_num_batched_tokens // block_size + 2 * max_num_seqs)
        # The lowering wants one index column for each physical block.
        self.decode_index = IndexBuffers(max_decode_tiles, num_blocks, device)
        self.chunk_index = IndexBuffers(max_chunk_tiles, num_blocks, device)
        self.tail_offsets = torch.zeros(max_decode_tiles, dtype=torch.int32, device=device)
        self._plain = [traits for traits in kinds if traits.first_beyond("widths") is None]
        self._others = KindCalls(kinds, block_size, (max_decode_tiles, max_chunk_tiles), num_blocks)
        plain = {
            groups: (
                _TileAttention(groups, block_size, self.decode_index.tables, self.tail_offsets),
                _TileAttention(groups * block_size, block_size, self.chunk_index.tables, None),
            )
            for groups in {traits.num_groups for traits in self._plain}
        }
        # Of each kind, for decodes and for chunks.
        self.calls = [self._others.calls.get(traits) or plain[traits.num_groups] for traits in kinds]

    @staticmethod
    def supports(traits: LayerTraits) -> str | None:
        """What of a layer this backend cannot compute, in words; None if it serves it."""
        return traits.first_beyond("window", "chunk", "softcap", "sinks", "widths")

    def plan(self, layout: BatchLayout) -> FlexPlan:
        """Fill the index buffers for one step; they are overwritten by the next plan."""
        if layout.num_decodes and self._plain:
            self._fill_decodes(layout)
        num_chunk_tiles, chunk_rows = self._fill_chunks(layout)
        self._others.fill(layout)
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
            num_tiles += end - first
            if not self._plain:
                continue
            table = np.array(entry.block_table[:end], np.int32)
            for block in range(first, end):
                num_full.append(block)
                full.append(table[:block])
            own_blocks.append(table[first:end])
        if not num_tiles:
            return 0, np.zeros(0, np.int64)
        if self._plain:
            self.chunk_index.fill(np.array(num_full), np.concatenate(full), np.concatenate(own_blocks))
        return max(MIN_TILES, num_tiles), np.concatenate(tile_rows)


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


class _TileAttention(nn.Module):
    """FlexAttention over tiles of `tile` query rows and blocks of `block_size` slots.

    The compiler takes a module's whole numbers as constants; as arguments the sizes may become symbols.
    """

    def __init__(
        self, tile: int, block_size: int, tables: tuple[Tensor, Tensor, Tensor, Tensor], tail_offsets: Tensor | None
    ) -> None:
        super().__init__()
        self.tile = tile
        self._masks = tables, tail_offsets
        self.block_size = block_size
        # Only the number of rows, marked at each call, may become a symbol: with the cache's size as another, or with
        # what an earlier process saw change, the generated code does not compile.
        self._compiled: Callable[..., Tensor] = torch.compile(own_code(_attend_tiles), fullgraph=True, dynamic=False)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float, sinks: Tensor | None) -> Tensor:
        torch._dynamo.mark_dynamic(query, 2)
        # Compiled code is bound to the dispatch keys in force. Only the first call, from within the compiler's check of
        # a layer, is under a dispatch mode: this makes the keys of all calls the same.
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return self._compiled(self, query, keys, values, *self._masks, scaling)


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
