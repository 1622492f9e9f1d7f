"""Block tables of a step's entries as one array, kept from one step to the next."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanovllm.batch import NULL_BLOCK, ScheduledSequence

_COLUMNS = 64  # the array grows by this many columns


class BlockTables:
    """Block tables as an array; a step reads only the blocks that its entries did not have in the step before.

    A row belongs to a list. Blocks before an entry's `num_computed_before` do not change, except to the null block once
    no row sees them, and a sequence that gave all blocks back has a new list.

    Args:
        dtype: dtype of the array.
        num_blocks: blocks of the cache, against which block numbers are checked; None for no check.
    """

    def __init__(self, block_size: int, dtype: type[np.signedinteger[Any]], num_blocks: int | None) -> None:
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._lists: list[list[int]] = []  # the block tables of the last step
        self._lasts = np.zeros(0, np.int64)  # indices of their last blocks
        self._tables: NDArray[Any] = np.zeros((0, 0), dtype)

    def update(self, entries: Sequence[ScheduledSequence], lasts: NDArray[np.int64]) -> NDArray[Any]:
        """[num_entries, at least max(lasts) + 1] blocks of each entry up to the last, then anything.

        Raises ValueError for blocks that the cache lacks.
        """
        lists = [entry.block_table for entry in entries]
        if len(lists) != len(self._lists) or not all(map(operator.is_, lists, self._lists)):
            rows = {id(table): row for row, table in enumerate(self._lists)}
            self._reorder(np.array([rows.get(id(table), -1) for table in lists], np.int64))
        self._lists = []  # nothing is kept if a block is refused
        if (missing := int(lasts.max(initial=-1)) + 1 - self._tables.shape[1]) > 0:
            self._tables = np.pad(self._tables, ((0, 0), (0, -(-missing // _COLUMNS) * _COLUMNS)))
        unchanged = -(-np.array([entry.num_computed_before for entry in entries], np.int64) // self._block_size)
        firsts = np.minimum(self._lasts + 1, unchanged)
        for row in np.flatnonzero(firsts <= lasts).tolist():
            blocks = lists[row][firsts[row] : lasts[row] + 1]
            if self._num_blocks is not None and not 0 <= min(blocks) <= max(blocks) < self._num_blocks:
                bad = next(block for block in blocks if not 0 <= block < self._num_blocks)
                raise ValueError(
                    f"the block table of {entries[row].sequence.request_id!r} names block {bad}; the caches have "
                    f"blocks 0 to {self._num_blocks - 1}."
                )
            self._tables[row, firsts[row] : lasts[row] + 1] = blocks
        self._lists = lists
        self._lasts = lasts
        return self._tables

    def _reorder(self, rows: NDArray[np.int64]) -> None:
        """Rows of the last step in another order; -1: a new one. The last step's array stays, since it may be read."""
        tables = np.full((len(rows), self._tables.shape[1]), NULL_BLOCK, self._tables.dtype)
        lasts = np.full(len(rows), -1, np.int64)
        is_kept = rows >= 0
        tables[is_kept], lasts[is_kept] = self._tables[rows[is_kept]], self._lasts[rows[is_kept]]
        self._tables = tables
        self._lasts = lasts
