"""Attention by gathering each sequence's blocks and calling PyTorch's attention: needs no compiler.

Decodes are batched, padded to the longest of their group; chunks go one by one, in pieces where rows see less than all
before them. Only the blocks that some row sees are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.cache.kinds import LayerTraits, StateKind
from nanovllm.core.batch import NULL_BLOCK
from nanovllm.core.batch_layout import BatchLayout

# Decodes are gathered together while the longest of a group has at most this many times the blocks of the shortest:
# padding costs memory traffic, a further call costs some tens of microseconds a layer.
GROUP_RATIO = 1.5
# Nor do they gather more than this at once, so that gathered K and V are read from a processor's cache (64 requests of
# 9 blocks: 4.8 ms a layer in parts of 7 MB, 7.5 ms in one).
GROUP_BYTES = 8 * 2**20
# Rows of a chunk that are computed together where they see a part of the context alone, or where scores are held.
PIECE_ROWS = 256


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    rows: Tensor  # [group] int64: rows of the flat batch
    blocks: Tensor  # [group * max_blocks] int64, each row padded with the null block
    context: int  # keys to see, of the longest
    mask: Tensor | None  # [group, 1, 1, context], 0 or -inf; None for a single sequence


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows of one sequence's chunk and the blocks that they see."""

    rows: slice  # of the flat batch
    blocks: Tensor  # [num_blocks] int64
    context: int  # keys to see, the chunk included
    mask: Tensor | None  # [1, 1, num_rows, context], 0 or -inf; None for plain causal


class Seen(NamedTuple):
    """The contexts of all rows of a step, for one sight."""

    groups: list[_DecodeGroup]
    chunks: list[_Chunk]


class SdpaAttention:
    """The `sdpa` backend. One instance serves every layer of an engine.

    Args:
        kinds: of the model's layers.
        block_bytes: K and V of one block in one layer.
    """

    reads_whole_blocks = True  # masked slots too

    def __init__(
        self,
        kinds: Sequence[LayerTraits],
        block_size: int,
        block_bytes: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.kinds = tuple(kinds)
        self.sights = tuple(dict.fromkeys(traits.sight for traits in kinds))
        self._holds_scores = tuple(_holds_scores(traits) for traits in kinds)
        self.block_size = block_size
        self.max_group_blocks = max(1, GROUP_BYTES // block_bytes)
        self.dtype = dtype
        self.device = device

    def plan(self, layout: BatchLayout) -> SdpaPlan:
        """The masks of one step, shared by all layers."""
        seen = {}
        for sight in self.sights:
            first_seen = sight.first_seen(layout.positions)
            groups = self._decode_groups(layout, first_seen) if layout.num_decodes else []
            seen[sight] = Seen(groups, self._chunks(layout, first_seen))
        return SdpaPlan(self.kinds, self._holds_scores, self.block_size, seen)

    def _chunks(self, layout: BatchLayout, first_seen: NDArray[np.int64]) -> list[_Chunk]:
        """Args: first_seen: [num_tokens] the first position that each row of the step sees."""
        chunks = []
        first_rows = layout.row_starts[layout.num_decodes : -1].tolist()
        for first_row, entry in zip(first_rows, layout.entries[layout.num_decodes :], strict=True):
            count = entry.num_new_tokens
            sees_all = first_seen[first_row + count - 1] == 0  # no row before it sees less
            step = count if sees_all and not any(self._holds_scores) else PIECE_ROWS
            for row in range(0, count, step):
                rows = slice(first_row + row, first_row + min(row + step, count))
                positions, firsts = layout.positions[rows], first_seen[rows]
                end = int(positions[-1]) + 1
                block = int(firsts[0]) // self.block_size
                blocks = torch.tensor(entry.block_table[block : -(-end // self.block_size)], device=self.device)
                begin = block * self.block_size
                is_causal = positions[0] == begin and firsts[-1] <= begin
                mask = None if is_causal else self._mask(positions, firsts, begin, end - begin)[None, None]
                chunks.append(_Chunk(rows, blocks, end - begin, mask))
        return chunks

    def _decode_groups(self, layout: BatchLayout, first_seen: NDArray[np.int64]) -> list[_DecodeGroup]:
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
            groups.append(
                _DecodeGroup(
                    torch.from_numpy(rows).to(self.device),
                    torch.from_numpy(blocks.reshape(-1)).to(self.device),
                    context,
                    self._mask(positions[rows], first_seen[rows], begins, context)[:, None, None]
                    if needs_mask
                    else None,
                )
            )
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
    """One step's groups and chunks; `attend` is called once a layer."""

    kinds: tuple[LayerTraits, ...]
    holds_scores: tuple[bool, ...]  # of each kind
    block_size: int
    seen: dict[StateKind, Seen]

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
        traits = self.kinds[kind]
        for group in self.seen[traits.sight].groups:
            size = len(group.rows)
            # The query heads that share a KV head become rows of one query, so that K and V are read once for them.
            folded = query[group.rows].view(size, num_kv_heads, -1, head_dim)
            keys, values = (
                self._gather(cache, group.blocks).view(size, -1, *cache.shape[1:])[:, : group.context].transpose(1, 2)
                for cache in (key_cache, value_cache)
            )
            if self.holds_scores[kind]:
                attended = _attend_by_scores(folded[:, :, :, None], keys, values, group.mask, scaling, traits, sinks)
            else:
                mask = None if group.mask is None else group.mask.expand(-1, -1, folded.shape[2], -1)
                attended = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scaling)
            output[group.rows] = attended.reshape(size, *output.shape[1:])
        self._attend_chunks(output, query, key_cache, value_cache, scaling, kind, sinks)
        return output

    def _attend_chunks(
        self,
        output: Tensor,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scaling: float,
        kind: int = 0,
        sinks: Tensor | None = None,
    ) -> None:
        traits = self.kinds[kind]
        for chunk in self.seen[traits.sight].chunks:
            rows, keys, values = (
                part.transpose(0, 1)[None]
                for part in (
                    query[chunk.rows],
                    self._gather(key_cache, chunk.blocks)[: chunk.context],
                    self._gather(value_cache, chunk.blocks)[: chunk.context],
                )
            )  # [1, heads, rows or keys, head_dim]
            if self.holds_scores[kind]:
                mask = chunk.mask
                if mask is None:
                    count = chunk.context
                    mask = rows.new_full((count, count), float("-inf")).triu_(1)
                grouped = rows.view(1, keys.shape[1], -1, *rows.shape[2:])
                attended = _attend_by_scores(grouped, keys, values, mask, scaling, traits, sinks).flatten(1, 2)
            else:
                attended = F.scaled_dot_product_attention(
                    rows,
                    keys,
                    values,
                    attn_mask=chunk.mask,
                    is_causal=chunk.mask is None,
                    scale=scaling,
                    enable_gqa=rows.shape[1] != keys.shape[1],
                )  # [1, num_heads, num_rows, value_dim]
            output[chunk.rows] = attended[0].transpose(0, 1)

    def _gather(self, cache: Tensor, blocks: Tensor) -> Tensor:
        """[num_blocks * block_size, num_kv_heads, head_dim] copied out of the cache."""
        # One row a block: index_select copies whole rows, seven times faster on a CPU than indexing with brackets.
        rows = cache.view(-1, self.block_size * cache.shape[1] * cache.shape[2])
        return rows.index_select(0, blocks).view(-1, *cache.shape[1:])


def _holds_scores(traits: LayerTraits) -> bool:
    """Whether scores are computed one by one, since PyTorch's attention does not let them be changed."""
    return traits.softcap is not None or traits.has_sinks


def _attend_by_scores(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scaling: float,
    traits: LayerTraits,
    sinks: Tensor | None,
) -> Tensor:
    """Attention by explicit products, in float32.

    Args:
        query: [size, num_kv_heads, num_groups, num_rows, head_dim].
        keys, values: [size, num_kv_heads, context, head_dim or value_dim].
        mask: to add to the scores, [..., num_rows, context], or [size, 1, 1, context] for one row.

    Returns [size, num_kv_heads, num_groups, num_rows, value_dim].
    """
    scores = torch.matmul(query.float(), keys.float().transpose(2, 3)[:, :, None]) * scaling
    if traits.softcap is not None:
        scores = torch.tanh(scores / traits.softcap) * traits.softcap
    if mask is not None:
        scores = scores + (mask[:, None] if mask.ndim == 4 else mask)
    if sinks is not None:
        column = sinks.float().view(scores.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.matmul(weights, values.float()[:, :, None]).to(query.dtype)
