"""Verifies a block manager's invariants; a diagnostic, which no step runs."""

from __future__ import annotations

from collections.abc import Iterable

from nanovllm.block_manager import BlockManager
from nanovllm.cache.cache_groups import CacheGroups
from nanovllm.cache.group_blocks import GroupBlocks
from nanovllm.core.batch import NULL_BLOCK
from nanovllm.core.sequence import Sequence


def check_blocks(manager: BlockManager, sequences: Iterable[Sequence]) -> None:
    """Verify every invariant against all live sequences; raises RuntimeError naming the first that is broken."""
    sequences = list(sequences)
    if not isinstance(manager, CacheGroups):
        _check_references(manager, [(sequence, sequence.block_table) for sequence in sequences])
        _check_entries(manager)
        return
    for number, group in enumerate(manager.managers):
        _check_references(group, [(s, manager.tables_of(s)[number].block_table) for s in sequences])
        _check_entries(group)
    _check_tree(manager)


def _check_references(manager: BlockManager, tables: list[tuple[Sequence, list[int]]]) -> None:
    """Every block is free or in as many block tables as it counts, which hold what its entry names."""
    expected = [0] * manager.num_blocks
    for sequence, table in tables:
        needed = manager.num_blocks_for(sequence.num_computed_tokens)
        _check(len(table) == needed, f"{sequence} should hold {needed} blocks")
        first = manager.first_block(sequence.num_computed_tokens) if isinstance(manager, GroupBlocks) else 0
        _check(NULL_BLOCK not in table[first:], f"the null block was given out, or {sequence} lacks what it sees")
        held = [block for block in table if block != NULL_BLOCK]
        _check(len(set(held)) == len(held), f"{sequence} holds a block twice")
        for index, block in enumerate(table):
            if block == NULL_BLOCK:
                continue
            expected[block] += 1
            if (entry := manager.entry_of[block]) is not None:
                tokens = sequence.block_tokens(index, manager.block_size)
                _check(entry.tokens == tokens, f"block {block} does not hold the tokens of {sequence}")
                before = manager.entry_of[table[index - 1]] if index else None
                parents = (sequence.cache_salt,) if not index else (before.prefix_id,) if before else (entry.parent,)
                _check(entry.parent in parents, f"block {block} hangs on another prefix")
    _check(expected == manager.ref_counts, "reference counts differ from the block tables")
    referenced = sum(count > 0 for count in expected)
    _check(
        len(manager.free_blocks) + referenced == manager.num_blocks - 1, "free and referenced blocks are not all blocks"
    )
    _check(NULL_BLOCK not in manager.free_blocks, "the null block is among the free ones")
    _check(all(expected[block] == 0 for block in manager.free_blocks), "a block is free and referenced")


def _check_tree(manager: CacheGroups) -> None:
    """Every known prefix has a user, every entry a known prefix, and no more users are counted than there are."""
    users = dict.fromkeys((node.prefix_id for node in manager.tree.nodes.values()), 0)
    entries = [entry for group in manager.managers for entry in group.entries.values()]
    above = [node.above for node in manager.tree.nodes.values() if node.above is not None]
    for used in (*entries, *above):
        _check(used.prefix_id in users, "an entry of a prefix that is not known")
        users[used.prefix_id] += 1
    counted = {node.prefix_id: node.num_users for node in manager.tree.nodes.values()}
    _check(counted == users, "the prefix tree counts other users than there are")
    for group in manager.managers:
        _check(
            all(group.entry_of[block] is not None for block in group.claimed), "an unfindable block counts as claimed"
        )


def _check_entries(manager: BlockManager) -> None:
    """Entries and findable blocks name one another."""
    num_findable = 0
    for block_hash, entry in manager.entries.items():
        _check(bool(entry.blocks), "an entry without blocks")
        _check(entry.block_hash == block_hash, "an entry under another hash")
        _check(all(manager.entry_of[block] is entry for block in entry.blocks), "an entry names a stranger's block")
        num_findable += len(entry.blocks)
    num_named = sum(entry is not None for entry in manager.entry_of)
    _check(num_findable == num_named == manager.num_findable_blocks, "a findable block that no entry names")
    prefix_ids = {entry.prefix_id for entry in manager.entries.values()}
    _check(len(prefix_ids) == len(manager.entries), "two entries share a prefix id")


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise RuntimeError(f"block manager: {otherwise}")
