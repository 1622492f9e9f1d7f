"""What cache groups let go of, what they keep, and where a prefix hit ends; blocks of four tokens, no model."""

import pytest

from nanovllm.batch import ScheduledSequence
from nanovllm.features.groups.block_checks import check_blocks
from nanovllm.features.groups.cache_groups import GroupCounts
from nanovllm.features.groups.state_kinds import FULL, StateKind
from nanovllm.features.policies.mock_model import tables_of
from tests.support.public_options import make_sequence
from tests.support.scheduler_loops import hits, tokens
from tests.support.scheduling import Loop, make_group_scheduler

WINDOW = StateKind(window=9)  # a window of three blocks: those of 8 earlier tokens, and its own
NUM_FREE = 64


def make_loop(*kinds, num_free=NUM_FREE, **limits):
    return Loop(make_group_scheduler(list(kinds), [1 + num_free] * len(kinds), **({"max_model_len": 200} | limits)))


def held(scheduler, group):
    (sequence,) = scheduler.running
    return sum(block != 0 for block in tables_of(sequence)[group])


def test_a_window_group_holds_a_window_and_the_full_group_everything():
    loop = make_loop(FULL, WINDOW)
    loop.add(tokens(4), max_tokens=60)
    for _ in range(40):
        loop.step()
        assert held(loop.scheduler, 1) <= WINDOW.max_blocks(200, 4) == 3
    assert held(loop.scheduler, 0) == 11


def test_blocks_are_let_go_when_their_step_was_read_and_not_when_it_is_scheduled():
    loop = make_loop(FULL, WINDOW)
    loop.add(tokens(40), max_tokens=4)
    loop.launch()
    assert held(loop.scheduler, 1) == 10
    loop.launch()
    assert held(loop.scheduler, 1) == 11
    loop.read()
    assert held(loop.scheduler, 1) == 3


def test_a_failed_step_moves_the_window_back_over_blocks_that_are_still_there():
    loop = make_loop(WINDOW, max_num_batched_tokens=20, max_num_seqs=4, long_prefill_token_threshold=16)
    loop.add(tokens(60), max_tokens=4)
    loop.step()
    loop.launch()
    loop.launch()
    loop.fail()  # both; the mock model checks every read of what follows
    assert [sequence.num_computed_tokens for sequence in loop.scheduler.running] == [20]
    loop.finish(2)


def test_chunked_attention_lets_go_of_whole_chunks():
    loop = make_loop(StateKind(chunk=16))
    loop.add(tokens(4), max_tokens=60)
    loop.steps(14)
    (sequence,) = loop.scheduler.running
    assert sequence.num_computed_tokens == 17
    assert held(loop.scheduler, 0) == 2  # its own, and the last full one


@pytest.mark.parametrize("groups", [(FULL, WINDOW), (WINDOW,), (FULL, StateKind(chunk=12))])
def test_a_prompt_hits_its_end_however_far_its_window_moved_on(groups):
    loop = make_loop(*groups)
    loop.add(tokens(40), max_tokens=40)
    loop.drain()
    assert hits(loop, tokens(40)) == 36  # all whole blocks but that of the last token


@pytest.mark.parametrize("groups", [(FULL, WINDOW), (WINDOW,)])
def test_a_conversation_hits_the_end_of_its_last_turn(groups):
    loop = make_loop(*groups)
    first = loop.add(tokens(30), max_tokens=30)
    loop.drain()
    assert hits(loop, [*first.token_ids, *tokens(9, 3)]) == 56  # the block of the last, uncomputed token is lost


def test_a_hit_ends_where_the_window_group_has_its_window():
    loop = make_loop(FULL, WINDOW)
    loop.add(tokens(60), max_tokens=1)
    loop.drain()
    assert hits(loop, tokens(32)[:30]) == 0  # the full group has seven blocks, the window group forgot those before


def test_the_third_request_behind_a_common_prefix_hits_it():
    loop = make_loop(FULL, WINDOW)
    system = tokens(32)
    assert hits(loop, system + tokens(30, 1)) == 0
    assert hits(loop, system + tokens(30, 2)) == 0  # it meets the junction, and keeps the window before it
    assert hits(loop, system + tokens(30, 3)) == 32
    assert hits(loop, system + tokens(30, 4)) == 32  # what was claimed is kept again


def test_a_claimed_block_outlives_the_window_of_who_computed_it():
    loop = make_loop(FULL, WINDOW)
    loop.add(tokens(32), max_tokens=60)
    loop.step()
    assert hits(loop, tokens(32) + [5] * 3) == 32
    loop.drain()
    assert hits(loop, tokens(32) + [6] * 3) == 32


def test_what_falls_behind_a_window_does_not_push_kept_tails_out():
    loop = make_loop(FULL, WINDOW, num_free=40, max_model_len=150)
    assert hits(loop, tokens(20)) == 0
    for number in range(1, 4):  # each leaves two kept tails, and passes 25 blocks of the window pool's 40
        loop.add([number, *tokens(100)], max_tokens=1)
        loop.drain()
    pool = loop.manager.pools[1]
    assert pool.num_evictions == 0
    assert pool.num_findable_blocks <= 4 * 4


def test_a_block_that_another_sequence_holds_stays_findable_behind_its_owners_window():
    """Both sequences shared it in a step that failed: so it counts as claimed by none."""
    manager = make_loop(FULL, WINDOW).manager
    own, other, later = (make_sequence(tokens(40), arrival=number, max_model_len=200) for number in range(3))
    manager.allocate(own, 9)
    manager.register(own, 0, 9, step_id=0)
    manager.claim(other, manager.lookup(other))
    manager.withdraw(0)
    manager.register(own, 0, 9, step_id=1)
    manager.commit(1)
    windows = manager.groups[1]
    assert not windows.claimed
    windows.free_unseen(tables_of(own)[1], 6, 9, junctions=[])
    found = manager.lookup(later)
    assert len(found) == 9 and manager.hits_by_group(later, found)[1:] == [[0] * 6 + tables_of(other)[1][6:]]


def test_registering_blocks_twice_changes_nothing():
    manager = make_loop(FULL, WINDOW).manager
    own = make_sequence(tokens(40), max_model_len=200)
    manager.allocate(own, 9)
    own.num_computed_tokens = 36
    for step_id in (0, 1):
        manager.register(own, 0, 9, step_id)
    assert [pool.num_findable_blocks for pool in manager.pools] == [9, 9]
    manager.withdraw(1)  # the first step made them findable
    assert [pool.num_findable_blocks for pool in manager.pools] == [9, 9]
    check_blocks(manager, [own])


def test_a_block_that_a_run_left_behind_its_window_is_not_registered():
    """A step that draws a run passes several blocks before they are registered."""
    manager = make_loop(WINDOW).manager
    own = make_sequence(tokens(40), max_model_len=200)
    manager.allocate(own, 9)
    own.num_computed_tokens = 36
    manager.commit(0, [ScheduledSequence(own, 0, 36, 1, own.block_table, 0)])
    assert own.block_table[:6] == [0] * 6
    manager.register(own, 0, 9, step_id=1)
    assert (manager.num_findable_blocks, manager.entries) == (0, {})
    check_blocks(manager, [own])


def small_manager():
    """With five free blocks, and four for windows."""
    return make_group_scheduler([FULL, WINDOW], [1 + 5, 1 + 4], max_model_len=20).block_manager


@pytest.mark.parametrize(
    "counts, fits", [((5, 4), True), ((5, 3), True), ((6, 4), False), ((5, 5), False), ((0, 5), False)]
)
def test_free_blocks_are_counted_in_each_group_and_a_number_is_wanted_of_every_one(counts, fits):
    manager = small_manager()
    assert manager.has_free(GroupCounts(counts)) == fits
    assert manager.has_free(4) and not manager.has_free(5)


def test_a_victim_frees_in_each_group_what_its_successor_does_not_claim():
    manager = small_manager()
    victim, successor = (make_sequence(tokens(count), max_model_len=20) for count in (8, 9))
    manager.allocate(victim, 2)
    manager.register(victim, 0, 2, step_id=0)
    assert manager.has_free(4, victim) and not manager.has_free(5, victim)
    hits = manager.lookup(successor)
    assert manager.has_free(2, victim, hits) and not manager.has_free(3, victim, hits)


def test_a_hit_that_would_leave_no_block_to_compute_in_is_none_in_any_group():
    """Else admission would ask for free blocks in the window group that nobody is going to claim."""
    manager = make_loop(FULL, WINDOW, num_free=52).manager
    own, first, other = (make_sequence(tokens(count), arrival=count, max_model_len=200) for count in (44, 40, 168))
    manager.allocate(own, 1)
    manager.register(own, 0, 1, step_id=0)
    own.num_computed_tokens = 4
    manager.claim(first, manager.lookup(first))
    manager.allocate(first, 9)
    manager.register(first, 1, 10, step_id=0)
    manager.commit(0)
    manager.release(first)
    found = manager.lookup(own)
    assert (len(found), list(map(len, manager.hits_by_group(own, found)))) == (9, [9, 9])
    manager.allocate(other, 52 - 1 - 9)  # nothing is free but what was found
    none = manager.lookup(own)
    assert (none, manager.hits_by_group(own, none)) == ([], [[], []])
    assert manager.num_blocks_lacking(own, 8, none).by_group == [1, 1]


def test_forgetting_a_sequence_forgets_it_in_every_group():
    loop = make_loop(FULL, WINDOW)
    loop.add(tokens(20), max_tokens=9)
    loop.launch(non_finite={"0"})
    loop.read()
    assert not loop.manager.entries
    assert all(pool.num_findable_blocks == 0 for pool in loop.manager.pools)


def test_a_pool_that_cannot_hold_one_sequence_is_refused():
    with pytest.raises(ValueError, match="3 blocks that one sequence of 200 tokens needs"):
        make_group_scheduler([FULL, WINDOW], [51, 3], max_model_len=200)


@pytest.mark.parametrize(
    "kind, expected", [(FULL, 50), (WINDOW, 3), (StateKind(window=1000), 50), (StateKind(chunk=16), 5)]
)
def test_what_one_sequence_needs_at_most(kind, expected):
    assert kind.max_blocks(200, 4) == expected


def test_the_smallest_pools_finish_every_request_among_many():
    groups = [FULL, WINDOW, StateKind(chunk=6)]
    sizes = [1 + group.max_blocks(60, 4) + extra for group, extra in zip(groups, (0, 6, 6), strict=True)]
    loop = Loop(make_group_scheduler(groups, sizes, max_model_len=60, max_num_batched_tokens=24, max_num_seqs=8))
    for number in range(8):
        loop.add(tokens(6, number), max_tokens=50)
    loop.finish(2)
    assert loop.scheduler.stats.num_preemptions > 0


def test_a_block_that_a_window_needs_and_lacks_is_named():
    loop = make_loop(FULL, WINDOW)
    loop.add(tokens(20), max_tokens=9)
    loop.step()
    (sequence,) = loop.scheduler.running
    tables_of(sequence)[1][-1] = 0
    with pytest.raises(RuntimeError, match="lacks what it sees"):
        check_blocks(loop.manager, [sequence])


def visible(kind, position):
    """The positions that a row sees."""
    seen = [p for p in range(position + 1) if kind.window is None or p > position - kind.window]
    return [p for p in seen if kind.chunk is None or p // kind.chunk == position // kind.chunk]


@pytest.mark.parametrize("kind", [FULL, WINDOW, StateKind(chunk=6), StateKind(window=5, chunk=7)])
def test_what_rows_see_is_counted(kind):
    counts = [len(visible(kind, position)) for position in range(39)]
    assert [kind.num_seen(count) for count in range(1, 40)] == counts
    for start, count in ((0, 1), (0, 30), (3, 9), (20, 12)):
        assert kind.num_pairs(start, count) == sum(counts[start : start + count])


@pytest.mark.parametrize("window", [None, 1, 2, 4, 5, 8, 9, 10, 11, 12])
@pytest.mark.parametrize("chunk", [None, 6, 7, 8])
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_the_first_block_needed_is_that_of_what_the_last_block_boundary_sees_or_the_last_full_one(
    window, chunk, block_size
):
    kind = StateKind(window=window, chunk=chunk)
    for num_tokens in range(block_size, 40):
        boundary = num_tokens // block_size * block_size
        expected = min(visible(kind, boundary)[0], boundary - 1) // block_size
        assert kind.first_block(num_tokens, block_size) == expected


def test_a_record_stands_for_all_positions_before_the_next_and_has_its_own_size():
    record = StateKind.record(5000)
    assert record.record_bytes == 5000
    assert [record.first_block(num_tokens, 4) for num_tokens in (0, 3, 4, 11, 40)] == [0, 0, 0, 1, 9]
    assert (record.max_blocks(200, 4), record.num_pairs(20, 12)) == (2, 12)  # the latest, and the one being written
    assert record.within(1) == record
    assert not record.is_full


def test_each_group_tells_of_the_findable_blocks_that_become_idle_in_its_own_pool():
    """Behind the window those before the prompt's end: the others are forgotten."""
    loop = make_loop(FULL, WINDOW)
    idle = [[], []]
    for group, pool in enumerate(loop.manager.pools):
        pool.on_idle = lambda block, entry, group=group: idle[group].append(block)
    sequence = loop.add(tokens(40), max_tokens=12)
    loop.launch()
    full, window = (list(table) for table in tables_of(sequence))
    loop.read()
    assert idle == [[], window[7:8]]  # the first of the three that go on from the prompt's last block but one
    while not sequence.is_finished:
        loop.step()
    assert set(full) <= set(idle[0]) and set(window[7:]) <= set(idle[1])
