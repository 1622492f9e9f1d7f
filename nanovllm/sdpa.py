"""Attention by gathering each sequence's blocks and calling PyTorch's attention: needs no compiler.

Decodes are batched, padded to the longest of their group; chunks go one by one, in pieces where rows see less than all
before them. Only the blocks that some row sees are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.batch import NULL_BLOCK
from nanovllm.layout import BatchLayout, LayerTraits, Sight

# Decodes are gathered together while the longest of a group has at most this many times the blocks of the shortest:
# padding costs memory traffic, a further call costs some tens of microseconds a layer.
GROUP_RATIO = 1.5
# Nor do they gather more than this at once, so that gathered K and V are read from a processor's cache (64 requests of
# 9 blocks: 4.8 ms a layer in parts of 7 MB, 7.5 ms in one).
GROUP_BYTES = 8 * 2**20
# Rows of a chunk that are computed together where they see a part of the context alone, or where scores are held.
PIECE_ROWS = 256


class Scores(Protocol):
    """Attention that changes scores where they are computed, which PyTorch's own does not allow."""

    def __call__(
        self, rows: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float, sinks: Tensor | None
    ) -> Tensor:
        """Attention of rows [size, num_kv_heads, num_groups, num_rows, head_dim].

        Args:
            keys, values: [size, num_kv_heads, context, head_dim or value_dim].
            mask: [size, 1, num_rows, context] 0 or -inf; None where the rows are the last of the context.
            sinks: [num_heads], the layer's own parameter.

        Returns [size, num_kv_heads, num_groups, num_rows, value_dim].
        """
        ...


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows that are computed together and the blocks that they see: some decodes, or rows of one sequence's chunk."""

    rows: Tensor | slice  # of the flat batch; of decodes int64
    size: int  # sequences
    blocks: Tensor  # [size * max_blocks] int64, each sequence's padded with the null block
    context: int  # keys to see, of the longest
    mask: Tensor | None  # [size, 1, num_rows or 1, context], 0 or -inf
    is_causal: bool  # whether the rows of a chunk see as many keys each as come before them


class SdpaAttention:
    """The `sdpa` backend. One instance serves every layer of an engine.

    Args:
        kinds: of the model's layers.
        block_bytes: K and V of one block in one layer.
        scores: of each kind, for layers that PyTorch's attention does not serve; None for one that it does.
    """

    reads_whole_blocks = True  # masked slots too

    def __init__(
        self,
        kinds: Sequence[LayerTraits],
        block_size: int,
        block_bytes: int,
        dtype: torch.dtype,
        device: torch.device,
        scores: Sequence[Scores | None] = (),
    ) -> None:
        self.sights = [traits.sight for traits in kinds]
        self.scores = scores or [None] * len(kinds)
        self.block_size = block_size
        self.max_group_blocks = max(1, GROUP_BYTES // block_bytes)
        self.dtype = dtype
        self.device = device

    def plan(self, layout: BatchLayout) -> SdpaPlan:
        """The masks of one step, shared by all layers."""
        seen = {}
        for sight in set(self.sights):
            first_seen = sight.first_seen(layout.positions)
            seen[sight] = self._decode_groups(layout, first_seen) + self._chunks(layout, first_seen)
        return SdpaPlan(self, seen)

    def _chunks(self, layout: BatchLayout, first_seen: NDArray[np.int64]) -> list[_Piece]:
        """Args: first_seen: [num_tokens] the first position that each row of the step sees."""
        chunks = []
        first_rows = layout.row_starts[layout.num_decodes : -1].tolist()
        for first_row, entry in zip(first_rows, layout.entries[layout.num_decodes :], strict=True):
            count = entry.num_new_tokens
            sees_all = first_seen[first_row + count - 1] == 0  # no row before it sees less
            step = count if sees_all and not any(self.scores) else PIECE_ROWS
            for row in range(0, count, step):
                rows = slice(first_row + row, first_row + min(row + step, count))
                positions, firsts = layout.positions[rows], first_seen[rows]
                end = int(positions[-1]) + 1
                block = int(firsts[0]) // self.block_size
                blocks = torch.tensor(entry.block_table[block : -(-end // self.block_size)], device=self.device)
                begin = block * self.block_size
                is_causal = bool(positions[0] == begin and firsts[-1] <= begin)
                mask = None if is_causal else self._mask(positions, firsts, begin, end - begin)[None, None]
                chunks.append(_Piece(rows, 1, blocks, end - begin, mask, is_causal))
        return chunks

    def _decode_groups(self, layout: BatchLayout, first_seen: NDArray[np.int64]) -> list[_Piece]:
        positions = layout.positions[: layout.num_decodes]
        first_blocks = first_seen[: layout.num_decodes] // self.block_size
        num_blocks = positions // self.block_size + 1 - first_blocks
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
                table = layout.entries[row].block_table[first_blocks[row] : first_blocks[row] + num_blocks[row]]
                blocks[index, : len(table)] = table
            begins = first_blocks[rows] * self.block_size
            context = int((positions[rows] - begins).max()) + 1
            needs_mask = len(rows) > 1 or first_seen[rows[0]] > begins[0]
            mask = self._mask(positions[rows], first_seen[rows], begins, context)[:, None, None] if needs_mask else None
            flat_rows, flat_blocks = (torch.from_numpy(part).to(self.device) for part in (rows, blocks.reshape(-1)))
            groups.append(_Piece(flat_rows, len(rows), flat_blocks, context, mask, False))
            first = end
        return groups

    def _mask(
        self,
        positions: NDArray[np.int64],
        first_seen: NDArray[np.int64],
        begin: int | NDArray[np.int64],
        num_keys: int,
    ) -> Tensor:
        """[len(positions), num_keys]: 0 for the keys that a query at each position sees, -inf for the others.

        Args:
            first_seen: the first position that each query sees.
            begin: position of the first key, or one for each query.
        """
        keys = torch.arange(num_keys, device=self.device)
        last, first = (torch.from_numpy(bound - begin)[:, None].to(self.device) for bound in (positions, first_seen))
        hidden = (keys > last) | (keys < first) if first_seen.any() else keys > last
        return torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, float("-inf"))


@dataclass(frozen=True, slots=True)
class SdpaPlan:
    """One step's pieces for each sight; `attend` is called once a layer."""

    backend: SdpaAttention
    seen: dict[Sight, list[_Piece]]

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
        output = query.new_empty(*query.shape[:2], value_cache.shape[2])
        scores = self.backend.scores[kind]
        for piece in self.seen[self.backend.sights[kind]]:
            keys, values = (self._gather(cache, piece) for cache in (key_cache, value_cache))
            rows = query[piece.rows]
            is_chunk = isinstance(piece.rows, slice)
            # The query heads that share a KV head become rows of one query, so that K and V are read once for them.
            rows = rows.transpose(0, 1)[None] if is_chunk else rows.view(piece.size, num_kv_heads, -1, head_dim)
            if scores is not None:
                folded = rows.view(piece.size, num_kv_heads, query.shape[1] // num_kv_heads, -1, head_dim)
                attended = scores(folded, keys, values, piece.mask, scaling, sinks).flatten(1, 2)
            else:
                attended = F.scaled_dot_product_attention(
                    rows,
                    keys,
                    values,
                    attn_mask=None if piece.mask is None else piece.mask.expand(-1, -1, rows.shape[2], -1),
                    is_causal=piece.is_causal,
                    scale=scaling,
                    enable_gqa=rows.shape[1] != num_kv_heads,
                )
            # [1, num_heads, num_rows, value_dim] of a chunk, else [size, ...] of num_heads and value_dim
            output[piece.rows] = attended[0].transpose(0, 1) if is_chunk else attended.reshape(-1, *output.shape[1:])
        return output

    def _gather(self, cache: Tensor, piece: _Piece) -> Tensor:
        """[size, num_kv_heads, context, head_dim] copied out of the cache."""
        # One row a block: index_select copies whole rows, seven times faster on a CPU than indexing with brackets.
        rows = cache.view(-1, self.backend.block_size * cache.shape[1] * cache.shape[2])
        gathered = rows.index_select(0, piece.blocks).view(piece.size, -1, *cache.shape[1:])
        return gathered[:, : piece.context].transpose(1, 2)
