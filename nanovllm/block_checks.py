"""Verifies a block manager's invariants; a diagnostic, which no step runs."""

from __future__ import annotations

from collections.abc import Iterable

from nanovllm.batch import NULL_BLOCK
from nanovllm.block_manager import BlockManager
from nanovllm.sequence import Sequence


def check_blocks(manager: BlockManager, sequences: Iterable[Sequence]) -> None:
    """Verify every invariant against all live sequences; raises RuntimeError naming the first that is broken."""
    _check_references(manager, sequences)
    _check_entries(manager)


def _check_references(manager: BlockManager, sequences: Iterable[Sequence]) -> None:
    """Every block is free or in as many block tables as it counts, which hold what its entry names."""
    expected = [0] * manager.num_blocks
    for sequence in sequences:
        needed = manager.num_blocks_for(sequence.num_computed_tokens)
        _check(len(sequence.block_table) == needed, f"{sequence} should hold {needed} blocks")
        _check(len(set(sequence.block_table)) == needed, f"{sequence} holds a block twice")
        for index, block in enumerate(sequence.block_table):
            expected[block] += 1
            if (entry := manager.entry_of[block]) is not None:
                tokens = sequence.block_tokens(index, manager.block_size)
                _check(entry.tokens == tokens, f"block {block} does not hold the tokens of {sequence}")
                parent = manager.parent_of(sequence, index)  # None once the blocks before became unfindable
                _check(parent in (None, entry.parent), f"block {block} hangs on another prefix")
    _check(expected == manager.ref_counts, "reference counts differ from the block tables")
    _check(expected[NULL_BLOCK] == 0, "the null block was given out")
    referenced = sum(count > 0 for count in expected)
    _check(
        len(manager.free_blocks) + referenced == manager.num_blocks - 1, "free and referenced blocks are not all blocks"
    )
    _check(NULL_BLOCK not in manager.free_blocks, "the null block is among the free ones")
    _check(all(expected[block] == 0 for block in manager.free_blocks), "a block is free and referenced")


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
