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

from nanovllm.attention.block_mask import forward_mask
from nanovllm.cache.kinds import LayerTraits, Sight
from nanovllm.core.batch import NULL_BLOCK
from nanovllm.process.device import own_code

MIN_TILES = 2  # of a call: one would be compiled as a special case
_NOWHERE = -1  # the index of a block that holds no positions


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


class TileTables:
    """Block lists of a step's decode tiles, or of its chunk tiles, for layers of one sight, with sinks or without.

    Columns after a tile's count keep old block numbers, since a kernel may read one of them ahead.

    Args:
        max_tiles, num_blocks: bounds; the lowering wants one column for each physical block.
    """

    def __init__(
        self, sight: Sight, has_sinks: bool, block_size: int, max_tiles: int, num_blocks: int, device: torch.device
    ) -> None:
        self._sight, self._has_sinks, self._block_size = sight, has_sinks, block_size

        def table(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        # Of partial blocks, then of full ones, in one tensor: one call sets a step's blocks.
        lists = table(2, 1, 1, max_tiles, num_blocks)
        self._lists, self._list_starts = lists.view(-1), np.arange(2 * max_tiles).reshape(2, -1) * num_blocks
        # The lengths of both lists, and the position of each tile's first row: in its sequence, or within its block
        # where the mask compares slots of a block.
        self._numbers = table(3, max_tiles)
        counts = self._numbers[:2, None, None]
        self.indices: list[Tensor] = []  # of each block in its sequence, where the mask compares positions
        if has_sinks or not sight.is_full:
            self.indices.append(table(num_blocks).fill_(_NOWHERE))
        self.parts = counts[0], lists[0], counts[1], lists[1], self._numbers[2], *self.indices

    def fill(self, rows: TileRows) -> None:
        """Set the tables for a step; up to MIN_TILES, further tiles see nothing."""
        num_tiles, size, device = len(rows.positions), self._block_size, self._lists.device
        own = rows.last_rows // size
        border = self._sight.first_seen(rows.first_rows) // size  # the first block that any row sees
        whole = np.minimum(own, -(-self._sight.first_seen(rows.last_rows) // size))  # the first that all rows see whole
        num_begun, num_full, num_seen = whole - border, own - whole, own - border + 1
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
        rows: of a tile for one query head: 1 for decodes, a block for chunks.
    """

    def __init__(self, traits: LayerTraits, block_size: int, rows: int, tables: TileTables) -> None:
        super().__init__()
        self._tables = tables
        self.num_groups, self.rows, self.block_size = traits.num_groups, rows, block_size
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
