"""The rows of a step in every cache group: one slot mapping and one set of block tables for each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from nanovllm.core.batch import ScheduledSequence
from nanovllm.core.batch_layout import BatchLayout, map_slots


def with_groups(layout: BatchLayout, num_groups: int, block_size: int) -> BatchLayout:
    """The layout, which is that of the first group, with those of the others; right after the step was scheduled."""
    if num_groups == 1:
        return layout
    starts = np.fromiter((entry.start for entry in layout.entries), np.int64, len(layout.entries))
    counts = np.diff(layout.row_starts)
    others = []
    for number in range(num_groups - 1):
        entries = [entry._replace(block_table=_table(entry, number)) for entry in layout.entries]
        slot_mapping, to_clear = map_slots(entries, starts, counts, layout.positions, block_size)
        others.append(replace(layout, entries=entries, slot_mapping=slot_mapping, blocks_to_clear=to_clear))
    return replace(layout, others=tuple(others))


def _table(entry: ScheduledSequence, number: int) -> list[int]:
    tables = entry.sequence.group_tables
    return entry.block_table if tables is None else tables.further[number].block_table  # a dummy has one for all
