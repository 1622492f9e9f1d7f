"""Rows of a step in the cache groups after the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from nanovllm.batch import NULL_BLOCK, ScheduledSequence
from nanovllm.layout import BatchLayout, map_slots


def with_groups(layout: BatchLayout, are_records: Sequence[bool], block_size: int) -> BatchLayout:
    """Adds the rows of each cache group after the first to a layout; call it right after the step was scheduled.

    Args:
        are_records: True for each group that keeps one record a sequence instead of K and V.
    """
    starts = np.fromiter((entry.start for entry in layout.entries), np.int64, len(layout.entries))
    counts = np.diff(layout.row_starts)
    others = []
    for number, is_record in enumerate(are_records[1:]):
        entries = [entry._replace(block_table=_table(entry, number)) for entry in layout.entries]
        if is_record:
            others.append(_with_states(replace(layout, entries=entries), starts, starts + counts, block_size))
            continue
        slot_mapping, to_clear = map_slots(entries, starts, counts, layout.positions, block_size)
        others.append(replace(layout, entries=entries, slot_mapping=slot_mapping, blocks_to_clear=to_clear))
    return replace(layout, others=tuple(others))


def _with_states(
    layout: BatchLayout, starts: NDArray[np.int64], ends: NDArray[np.int64], block_size: int
) -> BatchLayout:
    """The layout of a group of records; its blocks hold no rows."""
    tables = [entry.block_table for entry in layout.entries]
    befores, lasts = ((positions // block_size).tolist() for positions in (starts - 1, ends - 1))
    reads = [NULL_BLOCK if before < 0 else table[before] for table, before in zip(tables, befores, strict=True)]
    writes = [table[last] for table, last in zip(tables, lasts, strict=True)]
    nothing = layout.slot_mapping[:0]
    return replace(
        layout,
        slot_mapping=nothing,
        blocks_to_clear=nothing,
        state_reads=np.array(reads, np.int64),
        state_writes=np.array(writes, np.int64),
    )


def _table(entry: ScheduledSequence, number: int) -> list[int]:
    tables = entry.sequence.group_tables
    return entry.block_table if tables is None else tables.further[number]  # a dummy has one for all
