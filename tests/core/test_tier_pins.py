"""Slots of host memory are pinned while a load reads them, and no longer."""

from __future__ import annotations

from nanovllm.cache.tiers.books import TierBooks
from nanovllm.cache.tiers.costs import LoadCosts
from nanovllm.cache.tiers.tiered_blocks import TieredBlocks
from tests.support.scheduling import make_sequence


def test_a_load_into_a_block_of_another_load_unpins_its_source():
    """Requests whose prefixes are loaded and that are not placed leave free blocks to each other's loads."""
    manager, books = TieredBlocks(6, 4), TierBooks([1], 100)
    manager.attach(books, LoadCosts(), root_seed="model")
    waiting = [make_sequence([100 * number + token for token in range(17)]) for number in range(2)]
    nodes = []
    for sequence in waiting:
        node = manager.root_of("")
        for index in range(4):
            node = node.child(sequence.block_tokens(index, 4))
            books.hold(node, 0, books.take_slot(0))
            nodes.append(node)
    for step_id in range(1, 6):
        manager.begin_step()
        assert all(len(manager.lookup(sequence)) == 4 for sequence in waiting)
        copies = manager.take_copies(step_id)
        assert len({copy.destination for copy in copies}) == len(copies)
        manager.commit(step_id)
        assert not any(books.is_pinned(node, 0) for node in nodes)


def test_a_load_from_a_slot_whose_store_fails_is_dropped():
    """Its content is undefined; the block that waits for it is no hit."""
    manager, books = TieredBlocks(6, 4), TierBooks([1], 100)
    manager.attach(books, LoadCosts(), root_seed="model")
    first, other, again = make_sequence(range(9)), make_sequence(range(50, 70)), make_sequence(range(9))
    manager.begin_step()
    manager.allocate(first, 2)
    manager.register(first, 0, 2, 1)
    manager.take_copies(1)
    manager.commit(1)
    manager.release(first)
    manager.begin_step()
    assert len(manager.take_copies(2)) == 2  # stores
    manager.allocate(other, 5)  # evicts both blocks
    manager.release(other)
    manager.begin_step()
    assert len(manager.lookup(again)) == 2  # by loads
    manager.withdraw(2)
    assert not manager.lookup(again)
    assert not manager.take_copies(3)
    assert books.num_stored == 0
