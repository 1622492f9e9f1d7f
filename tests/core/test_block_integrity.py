"""`check_blocks` names each kind of corruption."""

import pytest

from nanovllm.batch import NULL_BLOCK
from nanovllm.features.groups.block_checks import check_blocks
from tests.engine.blocks import SIZE, A, B, C, D, computed, make_manager, release


def corrupt(corruption):
    """Two sequences that share a block, one cached free block, and one thing that is not as it should be."""
    manager = make_manager(8)
    release(manager, computed(manager, D))
    first, second = computed(manager, A + B + [9]), computed(manager, A + C, arrival=1)
    free = next(iter(manager.free_blocks))
    head = manager.entry_of[first.block_table[0]]
    match corruption:
        case "none":
            pass
        case "a block short":
            first.block_table.pop()
        case "a block too many":
            first.block_table.append(free)
        case "a block twice":
            first.block_table[2] = first.block_table[1]
        case "changed tokens":
            first.token_ids[SIZE] = 7
        case "another parent":
            manager.entry_of[first.block_table[1]].parent += 100
        case "a reference too many":
            manager.ref_counts[free] += 1
        case "a reference too few":
            manager.ref_counts[first.block_table[0]] -= 1
        case "the null block given out":
            manager.ref_counts[first.block_table[2]], manager.ref_counts[NULL_BLOCK] = 0, 1
            first.block_table[2] = NULL_BLOCK
        case "the null block free":
            del manager.free_blocks[free]
            manager.free_blocks[NULL_BLOCK] = None
        case "a lost block":
            del manager.free_blocks[free]
        case "free and referenced":
            del manager.free_blocks[free]
            manager.free_blocks[first.block_table[0]] = None
        case "an entry without blocks":
            manager.holders[head.prefix_id].clear()
        case "an entry under another hash":
            manager.entries[b"other"] = manager.entries.pop(head.block_hash)
        case "a stranger's block":
            manager.holders[head.prefix_id][free] = None
        case "a block that no entry names":
            manager.entry_of[free] = head
        case "one prefix id twice":
            head.prefix_id = manager.entry_of[first.block_table[1]].prefix_id
    return manager, [first, second]


def test_an_intact_manager_passes_its_check():
    manager, sequences = corrupt("none")
    check_blocks(manager, sequences)


@pytest.mark.parametrize(
    "corruption, message",
    [
        ("a block short", "should hold 3 blocks"),
        ("a block too many", "should hold 3 blocks"),
        ("a block twice", "holds a block twice"),
        ("changed tokens", "does not hold the tokens of"),
        ("another parent", "hangs on another prefix"),
        ("a reference too many", "reference counts differ"),
        ("a reference too few", "reference counts differ"),
        ("the null block given out", "the null block was given out"),
        ("the null block free", "the null block is among the free ones"),
        ("a lost block", "free and referenced blocks are not all blocks"),
        ("free and referenced", "a block is free and referenced"),
        ("an entry without blocks", "an entry without blocks"),
        ("an entry under another hash", "an entry under another hash"),
        ("a stranger's block", "an entry names a stranger's block"),
        ("a block that no entry names", "a findable block that no entry names"),
        ("one prefix id twice", "prefix"),
    ],
)
def test_check_blocks_names(corruption, message):
    manager, sequences = corrupt(corruption)
    with pytest.raises(RuntimeError, match=message):
        check_blocks(manager, sequences)


def test_check_blocks_names_a_sequence_that_was_left_out():
    manager, sequences = corrupt("none")
    with pytest.raises(RuntimeError, match="reference counts differ"):
        check_blocks(manager, sequences[:1])
