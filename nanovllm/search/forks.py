"""Forks in the block books: a sequence goes on from the KV of another, without computing it. No torch.

Full blocks are shared. A begun block, which both will write to, is copied before the next forward pass::

    source   | 1 | 2 | 3.. |            | 1 | 2 | 3.... |
    fork                          ->    | 1 | 2 | 7.. |      copy 3 -> 7
"""

from __future__ import annotations

from nanovllm.block_manager import BlockManager, BlockPool
from nanovllm.cache.cache_groups import CacheGroups
from nanovllm.core.batch import NULL_BLOCK, Copy
from nanovllm.core.sequence import GroupTables, Sequence
from nanovllm.scheduler import Scheduler


def can_fork(manager: BlockManager, source: Sequence, num_tokens: int) -> bool:
    """Whether a fork after so many computed tokens of a sequence finds all that it sees, and blocks for its copies."""
    num_full, begun = divmod(num_tokens, manager.block_size)
    if not begun:
        num_full -= 1  # the last full block names the prefix
    for group, (pool, table) in enumerate(_tables(manager, source)):
        first = manager.groups[group].first_block(num_tokens) if isinstance(manager, CacheGroups) else 0
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


def start_running(scheduler: Scheduler, sequence: Sequence) -> None:
    """Let a queued sequence run from the next step on, without admission; the caller gives it blocks."""
    scheduler.waiting.remove(sequence)
    scheduler.block_manager.wanted.remove(sequence)
    scheduler.running.add(sequence)
    sequence.is_running = True


def _tables(manager: BlockManager, sequence: Sequence) -> list[tuple[BlockPool, list[int]]]:
    if isinstance(manager, CacheGroups):
        return [(group.pool, table) for group, table in manager.tables_of(sequence)]
    return [(manager, sequence.block_table)]
