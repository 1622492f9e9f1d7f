"""Attention that gathers each sequence's blocks and calls PyTorch's own attention: needs no compiler.

Decodes are batched, padded to the longest of their group; chunks go one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.batch import NULL_BLOCK
from nanovllm.batch_layout import BatchLayout

# Decodes are gathered together while the longest of a group has at most this many times the blocks of the shortest:
# padding costs memory traffic, a further call costs some tens of microseconds a layer.
GROUP_RATIO = 1.5
# Nor do they gather more than this at once: what was gathered is read again while a processor's cache still holds it
# (64 requests of 9 blocks: 4.8 ms a layer in parts of 7 MB, 7.5 ms in one).
GROUP_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    rows: Tensor  # [group] int64: rows of the flat batch
    blocks: Tensor  # [group * max_blocks] int64, each row padded with the null block
    context: int  # of the longest
    mask: Tensor | None  # [group, 1, 1, context], 0 or -inf; None for a sequence by itself


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows of one sequence's chunk and the blocks that they see."""

    rows: slice  # of the flat batch
    blocks: Tensor  # [num_blocks] int64
    context: int  # keys to see, the chunk included
    mask: Tensor | None  # [1, 1, num_rows, context], 0 or -inf; None for plain causal


class SdpaAttention:
    """The `sdpa` backend. One instance serves every layer of an engine.

    Args:
        block_bytes: K and V of one block in one layer.
    """

    reads_whole_blocks = True  # masked slots too

    def __init__(self, block_size: int, block_bytes: int, dtype: torch.dtype, device: torch.device) -> None:
        self.block_size = block_size
        self.max_group_blocks = max(1, GROUP_BYTES // block_bytes)
        self.dtype = dtype
        self.device = device

    def plan(self, layout: BatchLayout) -> SdpaPlan:
        """The masks of one step, shared by all layers."""
        return SdpaPlan(self.block_size, self._decode_groups(layout), self._chunks(layout))

    def _chunks(self, layout: BatchLayout) -> list[_Chunk]:
        chunks = []
        first_rows = layout.row_starts[layout.num_decodes : -1].tolist()
        for first_row, entry in zip(first_rows, layout.entries[layout.num_decodes :], strict=True):
            end = entry.start + entry.num_new_tokens
            rows = slice(first_row, first_row + entry.num_new_tokens)
            blocks = torch.tensor(entry.block_table[: -(-end // self.block_size)], device=self.device)
            mask = self._mask(layout.positions[rows], end)[None, None] if entry.start > 0 else None
            chunks.append(_Chunk(rows, blocks, end, mask))
        return chunks

    def _decode_groups(self, layout: BatchLayout) -> list[_DecodeGroup]:
        if not layout.num_decodes:
            return []
        positions = layout.positions[: layout.num_decodes]
        num_blocks = positions // self.block_size + 1
        order = np.argsort(num_blocks, kind="stable")
        sorted_blocks = num_blocks[order]
        groups = []
        first = 0
        while first < len(order):
            end = int(np.searchsorted(sorted_blocks, sorted_blocks[first] * GROUP_RATIO, side="right"))
            end = min(end, first + max(1, self.max_group_blocks // int(sorted_blocks[end - 1])))
            rows = order[first:end]
            width = int(sorted_blocks[end - 1])
            blocks = np.full((len(rows), width), NULL_BLOCK, np.int64)
            for index, row in enumerate(rows.tolist()):
                table = layout.entries[row].block_table[: num_blocks[row]]
                blocks[index, : len(table)] = table
            context = int(positions[rows].max()) + 1
            groups.append(
                _DecodeGroup(
                    torch.from_numpy(rows).to(self.device),
                    torch.from_numpy(blocks.reshape(-1)).to(self.device),
                    context,
                    self._mask(positions[rows], context)[:, None, None] if len(rows) > 1 else None,
                )
            )
            first = end
        return groups

    def _mask(self, positions: NDArray[np.int64], num_keys: int) -> Tensor:
        """[len(positions), num_keys]: 0 for the keys that a query at each position sees, -inf for those behind it."""
        queries = torch.from_numpy(positions).to(self.device)
        hidden = torch.arange(num_keys, device=self.device) > queries[:, None]
        return torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, float("-inf"))


@dataclass(frozen=True, slots=True)
class SdpaPlan:
    """One step's groups and chunks; `attend` is called once a layer."""

    block_size: int
    groups: list[_DecodeGroup]
    chunks: list[_Chunk]

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scaling: float) -> Tensor:
        """See `AttentionPlan`."""
        output = torch.empty_like(query)
        num_kv_heads, head_dim = key_cache.shape[1:]
        for group in self.groups:
            size = len(group.rows)
            # The query heads that share a KV head become rows of one query, so that K and V are read once for them.
            folded = query[group.rows].view(size, num_kv_heads, -1, head_dim)
            keys, values = (
                self._gather(cache, group.blocks)
                .view(size, -1, num_kv_heads, head_dim)[:, : group.context]
                .transpose(1, 2)
                for cache in (key_cache, value_cache)
            )
            mask = None if group.mask is None else group.mask.expand(-1, -1, folded.shape[2], -1)
            attended = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scaling)
            output[group.rows] = attended.reshape(size, -1, head_dim)
        self._attend_chunks(output, query, key_cache, value_cache, scaling)
        return output

    def _attend_chunks(
        self, output: Tensor, query: Tensor, key_cache: Tensor, value_cache: Tensor, scaling: float
    ) -> None:
        for chunk in self.chunks:
            keys = self._gather(key_cache, chunk.blocks)[: chunk.context]
            values = self._gather(value_cache, chunk.blocks)[: chunk.context]
            attended = F.scaled_dot_product_attention(
                query[chunk.rows].transpose(0, 1)[None],
                keys.transpose(0, 1)[None],
                values.transpose(0, 1)[None],
                attn_mask=chunk.mask,
                is_causal=chunk.mask is None,
                scale=scaling,
                enable_gqa=query.shape[1] != keys.shape[1],
            )  # [1, num_heads, num_rows, head_dim]
            output[chunk.rows] = attended[0].transpose(0, 1)

    def _gather(self, cache: Tensor, blocks: Tensor) -> Tensor:
        """[num_blocks * block_size, num_kv_heads, head_dim] copied out of the cache."""
        # One row a block: index_select copies whole rows, seven times faster on a CPU than indexing with brackets.
        rows = cache.view(-1, self.block_size * cache.shape[1] * cache.shape[2])
        return rows.index_select(0, blocks).view(-1, *cache.shape[1:])
