"""Verifies a block manager's invariants; a diagnostic, which no step runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from nanovllm.batch import NULL_BLOCK
from nanovllm.block_manager import BlockManager, BlockPool
from nanovllm.features.groups.cache_groups import CacheGroups
from nanovllm.sequence import Sequence


def check_scheduler(scheduler: Any) -> None:
    """Verify the blocks of a `Scheduler` against all its sequences; see `check_blocks`."""
    check_blocks(scheduler.block_manager, [*scheduler.running, *scheduler.waiting])


def check_blocks(manager: BlockManager, sequences: Iterable[Sequence]) -> None:
    """Verify every invariant against all live sequences; raises RuntimeError naming the first that is broken."""
    sequences = list(sequences)
    tables = [[(sequence, sequence.block_table, 0) for sequence in sequences]]
    if isinstance(manager, CacheGroups):
        of_sequences = [
            [(s, t, g.first_needed(s.num_computed_tokens)) for g, t in manager.tables_of(s)] for s in sequences
        ]
        tables = [list(group) for group in zip(*of_sequences, strict=True)] or [[] for _ in manager.groups]
    for pool, of_pool in zip(manager.pools, tables, strict=True):
        kept = [slot for group in getattr(manager, "groups", ()) if group.pool is pool for slot in group.kept]
        _check_references(manager, pool, of_pool, kept)
        _check_holders(manager, pool)
    for block_hash, entry in manager.entries.items():
        _check(entry.block_hash == block_hash, "an entry under another hash")
        longer = manager.num_longer[entry.prefix_id] if isinstance(manager, CacheGroups) else 0
        _check(longer > 0 or entry.prefix_id in manager.holders, "an entry without blocks")
    if isinstance(manager, CacheGroups):
        _check_chains(manager)


def _check_references(
    manager: BlockManager, pool: BlockPool, tables: list[tuple[Sequence, list[int], int]], kept: list[int]
) -> None:
    """Reference counts match the block tables, and each block holds the tokens of its entry.

    Args:
        tables: (sequence, its block table, the first block in it that it needs).
        kept: blocks outside of all tables, with one reference each.
    """
    expected = [int(block in kept) for block in range(pool.num_blocks)]
    for sequence, table, first in tables:
        needed = manager.num_blocks_for(sequence.num_computed_tokens)
        _check(len(table) == needed, f"{sequence} should hold {needed} blocks")
        _check(NULL_BLOCK not in table[first:], f"the null block was given out, or {sequence} lacks what it sees")
        held = [block for block in table if block != NULL_BLOCK]
        _check(len(set(held)) == len(held), f"{sequence} holds a block twice")
        for index, block in enumerate(table):
            if block == NULL_BLOCK:
                continue
            expected[block] += 1
            if (entry := pool.entry_of[block]) is not None:
                tokens = sequence.block_tokens(index, manager.block_size)
                _check(entry.tokens == tokens, f"block {block} does not hold the tokens of {sequence}")
                before = pool.entry_of[table[index - 1]] if index else None
                parents = (sequence.cache_salt,) if not index else (before.prefix_id,) if before else (entry.parent,)
                _check(entry.parent in parents, f"block {block} hangs on another prefix")
    _check(expected == pool.ref_counts, "reference counts differ from the block tables")
    referenced = sum(count > 0 for count in expected)
    _check(len(pool.free_blocks) + referenced == pool.num_blocks - 1, "free and referenced blocks are not all blocks")
    _check(NULL_BLOCK not in pool.free_blocks, "the null block is among the free ones")
    _check(all(expected[block] == 0 for block in pool.free_blocks), "a block is free and referenced")


def _check_holders(manager: BlockManager, pool: BlockPool) -> None:
    """Findable blocks name an entry of the index, which names them."""
    of_id = {entry.prefix_id: entry for entry in manager.entries.values()}
    _check(len(of_id) == len(manager.entries), "two entries share a prefix id")
    for prefix_id, blocks in pool.holders.items():
        _check(bool(blocks), "an entry without blocks")
        _check(prefix_id in of_id, "blocks of a prefix that is not in the index")
        _check(all(pool.entry_of[block] is of_id[prefix_id] for block in blocks), "an entry names a stranger's block")
    num_findable = sum(map(len, pool.holders.values()))
    num_named = sum(entry is not None for entry in pool.entry_of)
    _check(num_findable == num_named == pool.num_findable_blocks, "a findable block that no entry names")


def _check_chains(manager: CacheGroups) -> None:
    """Every prefix but a first block has its parent in the index, which counts it."""
    by_id = {entry.prefix_id: entry for entry in manager.entries.values()}
    _check(manager.by_id == by_id, "the index by id has other entries than that by hash")
    longer = Counter(entry.parent for entry in by_id.values() if isinstance(entry.parent, int))
    _check(longer.keys() <= by_id.keys(), "an entry of a prefix whose beginning is not known")
    _check(all(manager.num_longer[i] == longer[i] for i in by_id), "the index counts other longer prefixes than it has")
    for group in manager.groups:
        _check(group.claimed <= by_id.keys(), "an unfindable content counts as claimed")


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise RuntimeError(f"block manager: {otherwise}")
