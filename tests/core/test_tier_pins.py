"""Slots of host memory are pinned while a copy that no batch has taken reads or writes them, and no longer."""

import random
import threading
from types import SimpleNamespace

import pytest

from nanovllm.features.tiers.prefix_tiers import PrefixTiers
from tests.support.llms import generate, greedy, open_llm, token_ids
from tests.support.prefixes import leave_idle, store, tiered_blocks
from tests.support.public_options import make_sequence


def test_a_load_into_a_block_of_another_load_unpins_its_source():
    """Requests whose prefixes are loaded and that are not placed leave free blocks to each other's loads."""
    manager, books = tiered_blocks()
    waiting = [make_sequence([100 * number + token for token in range(17)]) for number in range(2)]
    nodes = [node for sequence in waiting for node in store(manager, sequence, 4)]
    for step_id in range(1, 6):
        manager.begin_step()
        assert all(len(manager.lookup(sequence)) == 4 for sequence in waiting)
        copies = manager.take_copies(step_id)
        assert len({copy.destination for copy in copies}) == len(copies)
        manager.commit(step_id)
        assert not any(books.is_pinned(0, node.slots[0]) for node in nodes)


def test_a_load_from_a_slot_whose_store_fails_is_dropped():
    """Its content is undefined; the block that waits for it is no hit."""
    manager, _ = two_idle_blocks(num_slots=100)
    other, again = make_sequence(range(50, 70)), make_sequence(range(9))
    manager.take_copies(2)  # the stores
    manager.allocate(other, 5)  # evicts both blocks
    manager.release(other)
    manager.begin_step()
    assert len(manager.lookup(again)) == 2  # by loads
    manager.withdraw(2)
    assert not manager.lookup(again)
    assert not manager.take_copies(3)
    assert manager.books.num_stored == 0


def two_idle_blocks(num_slots, store=lambda copies: None):
    """The tiers of a manager that has queued the copies of two idle blocks, and then had no work to schedule."""
    manager, _ = tiered_blocks(num_slots)
    manager.begin_step()
    leave_idle(manager, range(9), 1)
    manager.begin_step()
    assert len(manager.copies) == 2
    return manager, idle_work(manager, store)


def idle_work(manager, store):
    """The idle work of an engine with host memory alone."""
    tiers = object.__new__(PrefixTiers)
    tiers.manager, tiers.memory, tiers.books = manager, SimpleNamespace(store=store), manager.books  # type: ignore[assignment]
    tiers.reads = tiers.directory = tiers._orders = None
    tiers._keeps_all, tiers._lock = True, threading.Lock()
    return tiers


def add_idle_block(manager, step_id=2):
    """Another prompt's block, which no tier has."""
    sequence = make_sequence(range(50, 55))
    manager.allocate(sequence, 1)
    manager.register(sequence, 0, 1, step_id)
    manager.commit(step_id)
    manager.release(sequence)


def test_idle_work_takes_no_slot_of_a_copy_that_no_batch_has_taken():
    """It would be executed first, and the batch's older copy would overwrite it: another prompt's KV."""
    manager, tiers = two_idle_blocks(num_slots=2)
    add_idle_block(manager)
    assert not tiers.save_idle(), "both slots wait for their copies"
    assert manager.books.take_slot(0) is None, "nor does a read of a file"
    taken = manager.take_copies(3)
    assert len({copy.destination for copy in taken}) == 2
    assert tiers.save_idle()
    manager.books.check()


def test_a_forgotten_block_leaves_its_slot_to_the_copy_that_is_still_to_write_it():
    """A request whose logits are not finite distrusts its prefix while the copies wait for a batch."""
    manager, tiers = two_idle_blocks(num_slots=2)
    for root in list(manager.books.roots.values()):
        manager.books.distrust(root)
    add_idle_block(manager)
    assert manager.books.num_stored == 0
    assert not tiers.save_idle()
    manager.books.check()
    manager.take_copies(3)
    manager.books.check()
    assert tiers.save_idle()


def test_a_slot_is_not_read_before_a_batch_has_taken_the_copy_into_it():
    """A file would get the slot's former content under the checksum of the new."""
    manager, tiers = two_idle_blocks(num_slots=2)
    nodes = [node for root in manager.books.roots.values() for node in root.below() if node.slots]
    for node in nodes:
        for block in list(manager.pools[0].holders[node.entry.prefix_id]):
            manager.pools[0].forget_block(block)
    assert [manager.settled_slot(0, node) for node in nodes] == [None, None]
    assert not any(tiers._has_content(node, 0) for node in nodes)
    manager.take_copies(3)
    assert all(tiers._has_content(node, 0) for node in nodes)


def test_a_slot_whose_idle_store_fails_is_no_hit():
    """Idle work ends with a warning and requests go on."""

    def fail(copies):
        raise MemoryError("no room for a slab")

    manager, tiers = two_idle_blocks(3, fail)
    add_idle_block(manager)
    with pytest.raises(MemoryError):
        tiers.save_idle()
    assert manager.books.num_stored == 2, "those that wait for a batch"
    manager.books.check()


def test_answers_from_a_tier_smaller_than_the_cache_are_right_after_idle_time():
    """With overlap the last step of a burst schedules nothing and leaves copies to the next batch."""
    rng = random.Random(1)
    cycles = [[[rng.randrange(5, 120) for _ in range(size)] for size in (67, 325, 456)] for _ in range(8)]
    options = {"num_kv_blocks": 31, "max_model_len": 480, "max_num_batched_tokens": 1024, "overlap": True}

    def answers(llm, idle):
        found = []
        for short, long, other in cycles:
            found += token_ids(generate(llm, [short, long], [greedy(4), greedy(5)]))
            idle()
            found += token_ids(generate(llm, [other], greedy(2)))
            found += token_ids(generate(llm, [long]))
            idle()
        return found

    with open_llm(**options) as llm:
        expected = answers(llm, lambda: None)
    with open_llm(**options, prefix_cache_host_bytes=2**20) as llm:
        engine, books = llm._engine, llm._engine.tiers.books
        books.max_bytes = 20 * books.block_bytes[0]
        engine.tiers.costs.compute = lambda start, count: None  # loads, even if computing is faster

        def idle():
            num_queued.append(len(engine.block_manager.copies))
            while engine.use_idle_time(captures=True):
                pass

        num_queued = []
        found = answers(llm, idle)
        assert any(num_queued), "copies wait for a batch"
        assert engine.tiers.stats().num_loaded_blocks > 0
        books.check()
    assert found == expected
