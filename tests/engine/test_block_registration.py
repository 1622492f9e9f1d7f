"""The block manager: blocks findable when scheduled, withdrawn, forgotten, returned."""

from nanovllm.block_manager import BlockManager
from nanovllm.sequence import Sequence
from tests.engine.blocks import (
    SIZE,
    STEP,
    A,
    B,
    C,
    D,
    check_blocks,
    computed,
    make_manager,
    make_sequence,
    num_hits,
    release,
)

# ----------------------------------------------------------------------------------------------------- outcome of steps


def scheduled(manager: BlockManager, tokens: list[int], step_id: int, **options: object) -> Sequence:
    """A sequence whose tokens are computed by a step that is still in flight."""
    sequence = make_sequence(tokens, **options)
    hits = manager.lookup(sequence)
    manager.claim(sequence, hits)
    manager.allocate(sequence, manager.num_blocks_for(len(tokens)) - len(hits))
    manager.register(sequence, len(hits), len(tokens) // SIZE, step_id)
    sequence.num_computed_tokens = len(tokens)
    return sequence


def test_a_block_can_be_found_as_soon_as_its_computation_is_scheduled():
    manager = make_manager(4)
    first = scheduled(manager, [*A, 9], step_id=1)
    assert manager.lookup(make_sequence([*A, 8])) == first.block_table[:1]


def test_a_failed_step_takes_back_what_it_made_findable_and_no_more():
    manager = make_manager(8)
    scheduled(manager, [*A, 9], step_id=1)
    manager.commit(1)
    scheduled(manager, A + B + [9], step_id=2)
    scheduled(manager, [*C, 9], step_id=3)
    manager.withdraw(2)
    assert num_hits(manager, A + B + [9]) == 1
    assert num_hits(manager, [*C, 9]) == 1
    manager.withdraw(3)
    assert num_hits(manager, [*C, 9]) == 0


def test_a_committed_step_cannot_be_withdrawn():
    manager = make_manager(4)
    scheduled(manager, [*A, 9], step_id=1)
    manager.commit(1)
    manager.withdraw(1)
    assert num_hits(manager, [*A, 9]) == 1


def test_a_free_block_that_a_failed_step_made_findable_is_the_next_to_be_taken():
    manager = make_manager(2)
    release(manager, computed(manager, A))
    aborted = scheduled(manager, B, step_id=2)
    [block] = aborted.block_table
    release(manager, aborted)
    manager.withdraw(2)
    assert computed(manager, C).block_table == [block]
    assert num_hits(manager, [*A, 9]) == 1


def test_withdrawing_a_step_spares_a_block_that_was_reused_since():
    manager = make_manager(1)
    release(manager, scheduled(manager, A, step_id=1))
    reused = scheduled(manager, B, step_id=2)
    manager.commit(1)
    manager.withdraw(1)
    check_blocks(manager, [reused])
    assert num_hits(manager, [*B, 9]) == 1


def test_a_withdrawn_head_hides_the_chain_behind_it():
    manager = make_manager(4)
    first = scheduled(manager, A, step_id=1)
    first.token_ids.extend(B)
    manager.allocate(first, 1)
    first.num_computed_tokens = 2 * SIZE
    manager.withdraw(1)
    manager.register(first, 1, 2, step_id=2)
    assert num_hits(manager, A + B + [9]) == 0
    check_blocks(manager, [first])


# ------------------------------------------------------------------------------------------------ forgetting, returning


def test_reset_makes_everything_unfindable_and_leaves_blocks_with_their_owners():
    manager = make_manager(8)
    running = computed(manager, A + B)
    release(manager, computed(manager, C))
    table = list(running.block_table)
    manager.reset_prefix_cache()
    assert manager.num_findable_blocks == 0
    assert num_hits(manager, [*A, 9]) + num_hits(manager, [*C, 9]) == 0
    assert running.block_table == table
    assert manager.num_free_blocks == 6
    check_blocks(manager, [running])


def test_after_a_reset_a_chain_that_began_before_it_is_not_continued():
    manager = make_manager(8)
    running = computed(manager, A)
    manager.reset_prefix_cache()
    running.token_ids.extend(B)
    manager.allocate(running, 1)
    manager.register(running, 1, 2, STEP)
    running.num_computed_tokens = 2 * SIZE
    assert manager.num_findable_blocks == 0
    fresh = computed(manager, A)
    assert num_hits(manager, A + B + [9]) == 1
    check_blocks(manager, [running, fresh])


def test_a_step_from_before_a_reset_takes_back_nothing_of_later_ones():
    manager = make_manager(2)
    release(manager, scheduled(manager, A, step_id=STEP + 1))
    manager.reset_prefix_cache()
    computed(manager, B + C)
    manager.withdraw(STEP + 1)
    assert manager.num_findable_blocks == 2


def test_blocks_dropped_by_a_reset_are_not_counted_as_evictions():
    manager = make_manager(2)
    release(manager, computed(manager, A + B))
    manager.reset_prefix_cache()
    computed(manager, C + D)
    assert manager.num_evictions == 0


def test_forgetting_a_sequence_hides_all_its_blocks_and_keeps_them_in_its_table():
    manager = make_manager(8)
    spoilt, healthy = computed(manager, A + B), computed(manager, C)
    table = list(spoilt.block_table)
    manager.forget(spoilt)
    assert spoilt.block_table == table
    assert num_hits(manager, A + B + [9]) == 0
    assert num_hits(manager, [*C, 9]) == 1
    check_blocks(manager, [spoilt, healthy])


def test_forgotten_content_can_be_computed_and_found_again():
    manager = make_manager(8)
    spoilt = computed(manager, A + B)
    manager.forget(spoilt)
    release(manager, spoilt)
    computed(manager, A + B)
    assert num_hits(manager, A + B + [9]) == 2


def test_content_behind_a_forgotten_prefix_can_be_found_again_once_it_is_recomputed():
    manager = make_manager(8)
    spoilt = computed(manager, [*A, 9])
    child = computed(manager, A + B)  # shares the spoilt prefix
    manager.forget(spoilt)
    again = computed(manager, A + B + [9])
    assert num_hits(manager, A + B + [9]) == 2
    check_blocks(manager, [spoilt, child, again])


def test_release_gives_the_sequence_a_new_table_so_that_a_launched_batch_keeps_the_old_one():
    manager = make_manager(4)
    sequence = computed(manager, A + B)
    launched = sequence.block_table
    release(manager, sequence)
    assert launched == [1, 2]
    assert sequence.block_table == []
    assert manager.num_free_blocks == 4


def test_truncate_keeps_the_head_and_frees_the_tail():
    manager = make_manager(4)
    sequence = computed(manager, A + B + C)
    launched = list(sequence.block_table)
    manager.release(sequence, 1)
    sequence.num_computed_tokens = SIZE
    assert sequence.block_table == launched[:1]
    assert manager.num_free_blocks == 3
    assert num_hits(manager, A + B + C + [9]) == 3
    check_blocks(manager, [sequence])


def test_a_shared_block_is_free_only_when_its_last_owner_gave_it_back():
    manager = make_manager(4)
    owners = [computed(manager, [*A, 9]), computed(manager, [*A, 8])]
    assert manager.num_free_blocks == 1
    release(manager, owners[0])
    assert manager.num_free_blocks == 2
    release(manager, owners[1])
    assert manager.num_free_blocks == 4
    check_blocks(manager, owners)
