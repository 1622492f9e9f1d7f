"""Forks in the block books: a sequence goes on from the KV of another, without computing it. No torch.

Full blocks are shared. A begun block, which both will write to, is copied before the next forward pass::

    source   | 1 | 2 | 3.. |            | 1 | 2 | 3.... |
    fork                          ->    | 1 | 2 | 7.. |      copy 3 -> 7

Samples of one prompt are forks of the first that computes it. They draw from its last row, in the same step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nanovllm.block_manager import BlockManager, BlockPool
from nanovllm.core.batch import NULL_BLOCK, Copy, ScheduledSequence
from nanovllm.core.client_queue import ClientQueue
from nanovllm.core.sequence import GroupTables, Sequence


def can_fork(manager: BlockManager, source: Sequence, num_tokens: int) -> bool:
    """Whether a fork after so many computed tokens of a sequence finds all that it sees, and blocks for its copies."""
    num_full, begun = divmod(num_tokens, manager.block_size)
    if not begun:
        num_full -= 1  # the last full block names the prefix
    groups: Any = getattr(manager, "groups", None)  # of `CacheGroups`, which takes longer to import
    for group, (pool, table) in enumerate(_tables(manager, source)):
        first = 0 if groups is None else groups[group].first_block(num_tokens)
        if len(table) <= num_full or NULL_BLOCK in table[first : num_full + 1] or (begun and not pool.free_blocks):
            return False
    return True


def fork_blocks(manager: BlockManager, source: Sequence, target: Sequence, num_tokens: int) -> None:
    """Give `target`, which has no blocks, those of the first computed tokens of `source`; check `can_fork` first."""
    num_full, begun = divmod(num_tokens, manager.block_size)
    tables: list[list[int]] = []
    for group, (pool, table) in enumerate(_tables(manager, source)):
        shared = table[:num_full]
        pool.pin([block for block in shared if block != NULL_BLOCK])
        if begun:
            (block,) = pool.pop_free(1)
            manager.copies.append(Copy(group, table[num_full], block))
            shared.append(block)
        tables.append(shared)
    target.block_table = tables[0]
    if source.group_tables is not None:
        kept = source.group_tables
        target.group_tables = GroupTables(tables[1:], [*kept.first_held], {*kept.junctions})
    target.num_computed_tokens = target.num_counted_tokens = num_tokens


def fork_samples(
    manager: BlockManager, source: Sequence, max_samples: int, waiting: ClientQueue, start: Callable[[Sequence], None]
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


def _tables(manager: BlockManager, sequence: Sequence) -> list[tuple[BlockPool, list[int]]]:
    further = () if sequence.group_tables is None else sequence.group_tables.further
    return list(zip(manager.pools, (sequence.block_table, *further), strict=True))
