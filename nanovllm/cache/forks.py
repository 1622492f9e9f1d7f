"""Forks in the block books: a sequence goes on from the KV of another, without computing it. No torch.

Full blocks are shared. A begun block, which both will write to, is copied before the next forward pass::

    source   | 1 | 2 | 3.. |            | 1 | 2 | 3.... |
    fork                          ->    | 1 | 2 | 7.. |      copy 3 -> 7

Samples of one prompt are forks of the first that computes it. They draw from its last row, in the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from nanovllm.block_manager import BlockManager, BlockPool
from nanovllm.core.admission import Waiting
from nanovllm.core.batch import NULL_BLOCK, Copy, ScheduledBatch, ScheduledSequence
from nanovllm.core.sequence import GroupTables, Sequence


def can_fork(manager: BlockManager, source: Sequence, num_tokens: int) -> bool:
    """Whether a fork after so many computed tokens of a sequence finds all that it sees, and blocks for its copies."""
    num_full, begun = divmod(num_tokens, manager.block_size)
    if not begun:
        num_full -= 1  # the last full block names the prefix
    for pool, table, first in _tables(manager, source, num_tokens):
        if len(table) <= num_full or NULL_BLOCK in table[first : num_full + 1] or (begun and not pool.free_blocks):
            return False
    return True


def fork_blocks(manager: BlockManager, source: Sequence, target: Sequence, num_tokens: int) -> None:
    """Give `target`, which has no blocks, those of the first computed tokens of `source`; check `can_fork` first.

    It gets none that it does not see: none of its steps would free them.
    """
    num_full, begun = divmod(num_tokens, manager.block_size)
    copied = {(copy.group, copy.destination): copy.source for copy in manager.copies}
    groups = _tables(manager, source, num_tokens)
    tables: list[list[int]] = []
    for group, (pool, table, first) in enumerate(groups):
        shared = table[first:num_full]
        pool.pin(shared)
        if begun:
            (block,) = pool.pop_free(1)
            # All copies of a step read before any writes: the copy of a copy comes from its source.
            manager.copies.append(Copy(group, copied.get((group, table[num_full]), table[num_full]), block))
            shared.append(block)
        tables.append([NULL_BLOCK] * first + shared)
    target.block_table = tables[0]
    if source.group_tables is not None:
        firsts = [first for _, _, first in groups]
        target.group_tables = GroupTables(tables[1:], firsts, {*source.group_tables.junctions})
    target.num_computed_tokens = target.num_counted_tokens = num_tokens


def fork_samples(
    manager: BlockManager, source: Sequence, max_samples: int, waiting: Waiting, start: Callable[[Sequence], None]
) -> list[ScheduledSequence]:
    """Fork waiting samples from the one that computes the last token of their prompt in the step being scheduled.

    Args:
        waiting: the queue, whose order samples keep.
        start: lets a waiting sequence run.

    Returns their entries, which draw from its last row.
    """
    entries: list[ScheduledSequence] = []
    num_tokens = source.num_prompt_tokens
    if source.num_computed_tokens > num_tokens or manager.cuts_chunks:  # recurrent states are not copied
        return entries
    for sample in source.samples:
        if sample.is_running or sample.is_finished or not sample.shared_prompt or sample.lacks_prompt_logprobs:
            continue
        if len(entries) >= max_samples or waiting.first is not sample or not can_fork(manager, source, num_tokens):
            break
        fork_blocks(manager, source, sample, num_tokens)
        start(sample)
        sample.num_known_tokens += 1
        entries.append(ScheduledSequence(sample, num_tokens, 0, 1, sample.block_table, 0))
    return entries


def lost_blocks(manager: BlockManager, undone: Iterable[ScheduledBatch]) -> set[tuple[int, int]]:
    """(group, block) of begun blocks without content: their copies were undone, or are queued from such a block."""
    lost = {(copy.group, copy.destination) for batch in undone for copy in batch.copies}
    for copy in manager.copies:  # a fork of a fork, in the order in which they were made
        if (copy.group, copy.source) in lost:
            lost.add((copy.group, copy.destination))
    return lost


def _tables(manager: BlockManager, source: Sequence, num_tokens: int) -> list[tuple[BlockPool, list[int], int]]:
    """Pool, block table of the source, and the first block that a fork after so many tokens sees; of each group."""
    groups: Any = getattr(manager, "groups", ())  # groups of `CacheGroups`, which takes longer to import
    further = () if source.group_tables is None else source.group_tables.further
    firsts = [group.first_block(num_tokens) for group in groups] or [0]
    return list(zip(manager.pools, (source.block_table, *further), firsts, strict=True))
