"""FlexAttention on a CPU for layers beyond plain attention: windows and chunks, soft-caps, sinks.

The tiles are those of `flex_cpu.py`. A tile lists what all of its rows see as full; as partial, its own block and the
blocks in which its rows begin to see: what none of them sees is not listed. The mask knows positions by the index of a
block in its sequence, which is the same for all sequences that share it::

    window of 20, blocks of 16      block 0    block 1    block 2    block 3
    tile of positions 48 to 63         -       partial    partial    partial (its own)

A soft-cap changes scores where they are computed. A layer's sinks are scores of one more slot, the last of the null
block, whose values are always 0: the compiler returns no log-sum-exp on a CPU to add them to.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from nanovllm.attention.block_mask import MIN_TILES, forward_mask, own_code
from nanovllm.cache.kinds import LayerTraits, StateKind
from nanovllm.core.batch import NULL_BLOCK
from nanovllm.core.batch_layout import BatchLayout

_NOWHERE = -1  # the index of a block that holds no positions


class TileRows(NamedTuple):
    """The tiles of a step's decodes, or of its chunks.

    tables: the block table of each one's sequence.
    positions: [num_tiles] int64, of the first row.
    first_rows, last_rows: [num_tiles] int64, positions of the first and the last row that the step has.
    """

    tables: list[list[int]]
    positions: NDArray[np.int64]
    first_rows: NDArray[np.int64]
    last_rows: NDArray[np.int64]

    @classmethod
    def of_decodes(cls, layout: BatchLayout) -> TileRows:
        positions = layout.positions[: layout.num_decodes]
        return cls([entry.block_table for entry in layout.decodes], positions, positions, positions)

    @classmethod
    def of_chunks(cls, layout: BatchLayout, block_size: int) -> TileRows:
        tables, parts = [], [np.zeros((3, 0), np.int64)]
        for entry in layout.chunks:
            end = entry.start + entry.num_new_tokens
            positions = np.arange(entry.start // block_size * block_size, end, block_size)
            tables += [entry.block_table] * len(positions)
            last_rows = np.minimum(positions + block_size, end) - 1
            parts.append(np.stack([positions, np.maximum(positions, entry.start), last_rows]))
        return cls(tables, *np.concatenate(parts, axis=1))


class SightTables:
    """The tables of the tiles of a step, for layers of one sight, with a sink's block or not.

    Columns behind a tile's count keep old block numbers, since a kernel may read one of them ahead.

    Args:
        max_tiles, num_blocks: bounds; the lowering wants one column for each physical block.
    """

    def __init__(self, sight: StateKind, block_size: int, max_tiles: int, num_blocks: int, *, has_sinks: bool) -> None:
        self._sight, self._block_size, self._sink = sight, block_size, [NULL_BLOCK] if has_sinks else []
        self._num_partial, self._num_full = torch.zeros(2, 1, 1, max_tiles, dtype=torch.int32)
        self._partial, self._full = torch.zeros(2, 1, 1, max_tiles, num_blocks, dtype=torch.int32)
        self.lists = self._num_partial, self._partial, self._num_full, self._full
        self.indices = torch.full((num_blocks,), _NOWHERE, dtype=torch.int32)  # of each block in its sequence
        self.positions = torch.zeros(max_tiles, dtype=torch.int32)  # of the first row of each tile

    def fill(self, rows: TileRows) -> None:
        """Set the tables for a step; up to MIN_TILES, tiles behind its own see nothing."""
        used, size = len(rows.tables), self._block_size
        if not used:
            return
        own = rows.last_rows // size
        border = self._sight.first_seen(rows.first_rows) // size  # where the first row begins to see
        whole = np.minimum(own, -(-self._sight.first_seen(rows.last_rows) // size))  # what the last row sees as well
        ranges = list(zip(rows.tables, border.tolist(), whole.tolist(), own.tolist(), strict=True))
        self._list(self._num_full, self._full, [table[b:c] for table, _, b, c in ranges])
        self._list(
            self._num_partial, self._partial, [[*table[a:b], table[c], *self._sink] for table, a, b, c in ranges]
        )
        listed = [block for table, a, b, c in ranges for block in (*table[a:b], table[c])]
        indices = [index for _, a, b, c in ranges for index in (*range(a, b), c)]
        self.indices[torch.tensor(listed)] = torch.tensor(indices, dtype=torch.int32)
        self.positions[:used] = torch.from_numpy(rows.positions)

    @staticmethod
    def _list(counts: Tensor, listed: Tensor, blocks: list[list[int]]) -> None:
        lengths = np.fromiter(map(len, blocks), np.int64, len(blocks))
        tiles = np.repeat(np.arange(len(blocks)), lengths)
        columns = np.arange(len(tiles)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        flat = np.fromiter(itertools.chain.from_iterable(blocks), np.int32, len(tiles))
        listed[0, 0].index_put_((torch.from_numpy(tiles), torch.from_numpy(columns)), torch.from_numpy(flat))
        counts[0, 0, : len(blocks)] = torch.from_numpy(lengths)
        counts[0, 0, len(blocks) : MIN_TILES] = 0


class KindTiles(nn.Module):
    """FlexAttention over tiles of one kind of layers; the compiler takes a module's numbers as constants.

    Args:
        rows: of a tile that are of one query head: 1 for decodes, a block for chunks.
    """

    def __init__(self, traits: LayerTraits, block_size: int, rows: int, tables: SightTables) -> None:
        super().__init__()
        self._tables = tables
        self.num_groups, self.rows, self.block_size = traits.num_groups, rows, block_size
        (self.window, self.chunk), self.softcap = traits.sight.spans, traits.softcap
        self.sink_slot = NULL_BLOCK * block_size + block_size - 1
        # As of `flex_cpu.py`: only the number of rows may become a symbol.
        self._compiled: Callable[..., Tensor] = torch.compile(own_code(_attend_tiles), fullgraph=True, dynamic=False)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float, sinks: Tensor | None) -> Tensor:
        """query [1, num_kv_heads, num_tiles * num_groups * rows, head_dim]; returns value_dim elements in its place."""
        torch._dynamo.mark_dynamic(query, 2)
        tables, sinks = self._tables, None if sinks is None else sinks.detach().float()
        with torch._C._AutoDispatchBelowADInplaceOrView():  # as of `flex_cpu.py`
            return self._compiled(
                self, query, keys, values, tables.lists, (tables.indices, tables.positions), scaling, sinks
            )


def _attend_tiles(
    kind: KindTiles,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lists: tuple[Tensor, Tensor, Tensor, Tensor],
    places: tuple[Tensor, Tensor],
    scaling: float,
    sinks: Tensor | None,
) -> Tensor:
    block_size, rows, groups = kind.block_size, kind.rows, kind.num_groups
    window, chunk, softcap, sink_slot = kind.window, kind.chunk, kind.softcap, kind.sink_slot
    tile = groups * rows
    indices, positions = places

    def is_seen(batch: Tensor, head: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        index = indices[slot // block_size]
        key, own = index * block_size + slot % block_size, positions[row // tile] + row % rows
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
        (query.shape[2], keys.shape[2]), (num_partial, partial), (num_full, full), (tile, block_size), is_seen
    )
    changes_scores = softcap is not None or sinks is not None
    result: Any = flex_attention(
        query, keys, values, score_mod=score if changes_scores else None, block_mask=block_mask, scale=scaling
    )
    attended: Tensor = result
    return attended


class KindCalls:
    """The calls of all kinds beyond plain attention, and their tables, which kinds of one sight share.

    Args:
        max_tiles: of decodes and of chunks.

    Attributes:
        calls: of a kind, for decodes and for chunks.
    """

    def __init__(
        self, kinds: Sequence[LayerTraits], block_size: int, max_tiles: tuple[int, int], num_blocks: int
    ) -> None:
        self._block_size = block_size
        self._tables: dict[tuple[StateKind, bool], list[SightTables]] = {}
        self.calls: dict[LayerTraits, tuple[KindTiles, KindTiles]] = {}
        for traits in kinds:
            if traits.first_beyond("widths") is None:
                continue
            key = sight, has_sinks = traits.sight, traits.has_sinks
            if key not in self._tables:
                self._tables[key] = [
                    SightTables(sight, block_size, most, num_blocks, has_sinks=has_sinks) for most in max_tiles
                ]
            decodes, chunks = self._tables[key]
            self.calls[traits] = (
                KindTiles(traits, block_size, 1, decodes),
                KindTiles(traits, block_size, block_size, chunks),
            )

    def fill(self, layout: BatchLayout) -> None:
        """Set all tables for a step."""
        if not self._tables:
            return
        of_decodes, of_chunks = TileRows.of_decodes(layout), TileRows.of_chunks(layout, self._block_size)
        for decodes, chunks in self._tables.values():
            decodes.fill(of_decodes)
            chunks.fill(of_chunks)
