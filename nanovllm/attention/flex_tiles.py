"""FlexAttention over the tiles of a step on a CPU: the block lists of each sight, and one compiled call for each kind.

A tile lists the blocks that all of its rows see as full; as partial, its own block and the blocks in which its rows
begin to see. In full attention the partial block is the tile's own, and the mask compares slots within the block. With
a window or attention in chunks the mask compares positions, by the index of a block in its sequence, which is the same
for all sequences that share it::

    window of 20, blocks of 16      block 0    block 1    block 2    block 3
    tile of positions 48 to 63         -       partial    partial    partial (its own)

A soft-cap changes scores where they are computed. A layer's sinks are scores of one more slot, the last of the null
block, where values are always 0: on a CPU the compiler returns no log-sum-exp to add them to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from nanovllm.attention.block_mask import forward_mask, own_code
from nanovllm.cache.kinds import LayerTraits, StateKind
from nanovllm.core.batch import NULL_BLOCK

MIN_TILES = 2  # of a call: one would be compiled as a special case
_NOWHERE = -1  # the index of a block that holds no positions

IntArray = NDArray[np.integer[Any]]
Lists = tuple[Tensor, Tensor]  # of each tile: how many blocks, and which


class TileRows(NamedTuple):
    """The decode tiles of a step, or its chunk tiles; each array has an item a tile, but `tables`.

    tables: block tables, concatenated.
    table_starts: index in `tables` of block 0 of the tile's sequence.
    positions: of the tile's first row.
    first_rows, last_rows: positions of the first and the last row that the step has.
    """

    tables: NDArray[np.int32]
    table_starts: NDArray[np.int64]
    positions: NDArray[np.int64]
    first_rows: NDArray[np.int64]
    last_rows: NDArray[np.int64]

    def blocks(self, tiles: IntArray, indices: IntArray) -> NDArray[np.int32]:
        """The blocks with these indices in the sequences of these tiles."""
        return self.tables[self.table_starts[tiles] + indices]


class TileTables:
    """Block lists of a step's decode tiles, or of its chunk tiles, for layers of one sight, with sinks or without.

    Columns after a tile's count keep old block numbers, since a kernel may read one of them ahead.

    Args:
        max_tiles, num_blocks: bounds; the lowering wants one column for each physical block.
    """

    def __init__(
        self, sight: StateKind, has_sinks: bool, block_size: int, max_tiles: int, num_blocks: int, device: torch.device
    ) -> None:
        self._sight, self._has_sinks, self._block_size = sight, has_sinks, block_size

        def table(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.partial = table(1, 1, max_tiles), table(1, 1, max_tiles, num_blocks)  # counts and blocks
        self.full = table(1, 1, max_tiles), table(1, 1, max_tiles, num_blocks)
        # Of each tile's first row: in its sequence, or within its block where the mask compares slots of a block.
        self.positions = table(max_tiles)
        self.indices: list[Tensor] = []  # of each block in its sequence, where the mask compares positions
        if has_sinks or not sight.is_full:
            self.indices.append(table(num_blocks).fill_(_NOWHERE))
        self.parts = *self.partial, *self.full, self.positions, *self.indices

    def fill(self, rows: TileRows) -> None:
        """Set the tables for a step; up to MIN_TILES, further tiles see nothing."""
        if not len(rows.positions):
            return
        size, device = self._block_size, self.positions.device
        own = rows.last_rows // size
        border = self._sight.first_seen(rows.first_rows) // size  # the first block that any row sees
        whole = np.minimum(own, -(-self._sight.first_seen(rows.last_rows) // size))  # the first that all rows see whole
        tiles, columns = _spread(own - whole)
        self._list(self.full, own - whole, tiles, columns, rows.blocks(tiles, whole[tiles] + columns))
        counts = whole - border + 1 + self._has_sinks
        tiles, columns = _spread(counts)
        indices = border[tiles] + columns
        indices = np.where(indices < whole[tiles], indices, own[tiles])
        blocks = rows.blocks(tiles, indices)
        positions = rows.positions
        if self.indices:
            self.indices[0][torch.from_numpy(blocks).long().to(device)] = torch.from_numpy(indices).int().to(device)
        else:
            positions = positions % size
        if self._has_sinks:
            blocks[columns == counts[tiles] - 1] = NULL_BLOCK
        self._list(self.partial, counts, tiles, columns, blocks)
        self.positions[: len(positions)] = torch.from_numpy(positions).to(device)

    @staticmethod
    def _list(to: Lists, counts: IntArray, tiles: IntArray, columns: IntArray, blocks: IntArray) -> None:
        num_listed, listed = to
        at = torch.from_numpy(np.stack([tiles, columns])).to(listed.device)
        listed[0, 0].index_put_((at[0], at[1]), torch.from_numpy(blocks).to(listed.device))
        num_listed[0, 0, : len(counts)] = torch.from_numpy(counts).to(listed.device)
        num_listed[0, 0, len(counts) : MIN_TILES] = 0


def _spread(counts: IntArray) -> tuple[IntArray, IntArray]:
    """Tile and column of every item of lists with these lengths."""
    tiles = np.repeat(np.arange(len(counts)), counts)
    return tiles, np.arange(len(tiles)) - np.repeat(np.cumsum(counts) - counts, counts)


class TileCall(nn.Module):
    """FlexAttention over tiles, compiled for one kind of layers.

    The compiler takes a module's numbers as constants; as arguments the sizes may become symbols.

    Args:
        rows: of a tile for one query head: 1 for decodes, a block for chunks.
    """

    def __init__(self, traits: LayerTraits, block_size: int, rows: int, tables: TileTables) -> None:
        super().__init__()
        self._tables = tables
        self.num_groups, self.rows, self.block_size = traits.num_groups, rows, block_size
        (self.window, self.chunk), self.softcap = traits.sight.spans, traits.softcap
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
    block_size, rows, groups = call.block_size, call.rows, call.num_groups
    window, chunk, softcap, sink_slot = call.window, call.chunk, call.softcap, call.sink_slot
    tile, lists, (positions, *indices) = groups * rows, tables[:4], tables[4:]

    def is_not_later(batch: Tensor, head: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        return slot % block_size <= (positions[row // tile] if rows == 1 else row % rows)

    def is_in_sight(batch: Tensor, head: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        index = indices[0][slot // block_size]
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
