"""The token budget of a latency goal: as much as the costs allow, and never so little that prompts starve."""

import random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.batch import ScheduledSequence
from nanovllm.features.goals.step_budget import LATELY_S, MAX_RELAXATION
from nanovllm.scheduler import WaitingQueue
from tests.engine.loops import chunks
from tests.support.public_options import make_sequence
from tests.support.scheduling import Loop, make_scheduler
from tests.support.step_costs import BLOCK, MOST, Costs, make_budget


def decodes(count, **params):
    sequences = [make_sequence([1], arrival=number, **params) for number in range(count)]
    return [ScheduledSequence(sequence, 0, 1, 1, [1], 0) for sequence in sequences]


def prompt(num_computed=0, **options):
    sequence = make_sequence([1] * 60, arrival=99, **options)
    sequence.num_computed_tokens = num_computed
    return sequence


def num_tokens(budget, running, *waiting, num_hits=0):
    return budget.of_step(running, waiting, WaitingQueue(), lambda sequence: [7] * num_hits, has_slot=True)[0]


def test_a_step_takes_as_many_tokens_as_are_predicted_to_keep_the_goal():
    assert num_tokens(make_budget(0.05), decodes(3), prompt()) == 3 + 46  # 1 + 3 + 46 milliseconds


def test_nobody_who_decodes_or_no_prompt_leaves_the_budget_whole():
    assert num_tokens(make_budget(0.05), [], prompt()) == MOST
    assert num_tokens(make_budget(0.05), decodes(3)) == MOST


def test_a_step_without_decodes_keeps_the_goal_while_another_client_had_requests_lately():
    now = [0.0]
    budget = make_budget(0.05, clock=lambda: now[0])
    budget.see(prompt(client="flood"))
    assert num_tokens(budget, [], prompt(client="flood")) == MOST
    budget.see(prompt(client="other"))
    budget.see(prompt(client="flood"))
    assert num_tokens(budget, [], prompt(client="flood")) == 49  # 1 + 49 milliseconds
    now[0] = LATELY_S + 1.0
    budget.see(prompt(client="flood"))
    assert num_tokens(budget, [], prompt(client="flood")) == MOST


def test_the_two_clients_seen_last_are_remembered():
    budget = make_budget(0.05)
    for number in range(9):
        budget.see(prompt(client=str(number)))
    assert num_tokens(budget, [], prompt(client="8")) == 49 == num_tokens(budget, [], prompt(client="0"))
    assert len(budget._seen) == 2


def test_a_chunk_deep_in_a_prompt_or_after_hits_is_smaller():
    whole, deep = (num_tokens(make_budget(0.05), decodes(1), prompt(n)) for n in (0, 40))
    assert deep < whole
    assert num_tokens(make_budget(0.05), decodes(1), prompt(), num_hits=10) == deep


@pytest.mark.full
@given(st.floats(1e-3, 10.0), st.floats(1e-3, 10.0), st.integers(1, MOST - BLOCK), st.integers(0, 59))
def test_the_budget_grows_with_the_goal_between_a_block_and_the_whole(first, second, count, start):
    low, high = sorted((first, second))
    less, more = (num_tokens(make_budget(goal), decodes(count), prompt(start)) for goal in (low, high))
    assert count + BLOCK <= less <= more <= MOST


@given(st.integers(1, 60), st.integers(1, 60))
def test_more_decodes_leave_no_more_for_chunks(first, second):
    few, many = sorted((first, second))
    assert num_tokens(make_budget(0.05), decodes(many), prompt()) - many <= (
        num_tokens(make_budget(0.05), decodes(few), prompt()) - few
    )


def test_chunks_fill_a_captured_shape():
    costs = Costs((8, 32, 64))
    assert num_tokens(make_budget(0.05, costs), decodes(3), prompt()) == 3 + 32
    assert num_tokens(make_budget(0.01, costs), decodes(3), prompt()) == 3 + BLOCK  # not even the smallest fits


def test_the_time_since_the_last_token_is_spent_but_not_more_than_half_of_the_goal():
    budgets = [num_tokens(make_budget(0.05, now=now), decodes(3), prompt()) for now in (0.0, 0.01, 0.025, 9.0)]
    assert budgets == [49, 39, 24, 24]
    assert num_tokens(make_budget(0.05, now=0.01, overlap=True), decodes(3), prompt()) == 49  # a step still runs


def test_the_strictest_stream_decides():
    patient = decodes(3, itl_goal=0.1)
    assert num_tokens(make_budget(0.05), patient, prompt()) == 99
    assert num_tokens(make_budget(0.05), [*patient, *decodes(1)], prompt()) == 49
    assert num_tokens(make_budget(0.05), [*patient, *decodes(1, itl_goal=0.08)], prompt()) == 79


def test_a_goal_of_a_request_is_never_stricter_than_the_one_in_force():
    budget = make_budget(0.05, ttft_goal=2.0, now=9, overlap=True)
    patient, late = decodes(3, itl_goal=0.08), prompt(ttft_goal=4.0, client="other")
    assert num_tokens(budget, patient, late) == 79
    budget.itl_goal = 0.1
    assert num_tokens(budget, patient, late) == 99


def masked(number, seconds, **options):
    """A decode whose next mask takes so long, placed before those of higher numbers."""
    sequence = make_sequence([1, 2], arrival=number, **options)
    sequence.num_computed_tokens, sequence.placed_in_step = 1, number
    sequence.matcher = SimpleNamespace(mask_seconds=seconds)
    return sequence


def test_masks_of_a_step_share_a_part_of_the_goal_and_the_others_sit_out_in_turns():
    budget = make_budget(0.1)
    plain, slow = make_sequence([1]), [masked(number, 0.010) for number in (3, 1, 2)]
    assert budget.in_step([plain, *slow]) == [plain, slow[1], slow[2]]  # 25 ms hold two masks of 10
    quick = [masked(number, 0.0001) for number in range(64)]
    assert budget.in_step(quick) == quick


def test_each_client_has_an_equal_part_of_the_time_for_masks_and_at_least_one_mask():
    budget = make_budget(0.1)
    slow, quick = [masked(n, 0.9, client="a") for n in (1, 2)], [masked(n, 0.005, client="b") for n in (3, 4, 5)]
    assert budget.in_step([*slow, *quick]) == [slow[0], quick[0], quick[1]]
    assert not budget.has_time(masked(6, 0.005, client="b"))
    assert budget.has_time(masked(7, 0.9, client="c"))
    assert budget.has_time(make_sequence([1]))


def late_budget(now=9):
    """For a prompt that has waited since 0."""
    return make_budget(0.01, now=now, ttft_goal=2.0, overlap=True)


def test_a_prompt_near_its_deadline_relaxes_the_goal_of_no_other_client():
    budget = late_budget()
    late, own = prompt(client="a"), decodes(1, client="a")
    assert num_tokens(budget, own, late) == 1 + 38
    assert num_tokens(budget, decodes(1, client="b"), late) == 1 + 8
    assert num_tokens(budget, [*own, *decodes(1, client="b", itl_goal=0.02)], late) == 2 + 17  # b's allows less


def test_a_prompt_near_its_deadline_relaxes_the_goal_up_to_four_times():
    running = decodes(1)
    budgets = [num_tokens(late_budget(now), running, prompt()) for now in (1, 1.5, 2, 9)]
    assert budgets == [9, 24, 39, 39]
    assert budgets[-1] == 0.01 * MAX_RELAXATION * 1e3 - 1
    patient = prompt(ttft_goal=20.0)
    assert num_tokens(late_budget(), running, patient) == 9


def test_a_preempted_request_that_has_its_first_token_is_no_longer_urgent():
    preempted = prompt()
    preempted.token_ids.append(1)
    preempted.num_known_tokens += 1
    assert num_tokens(late_budget(), decodes(1), preempted) == 9


def test_statistics_tell_the_last_budget():
    budget = make_budget(0.05)
    assert budget.stats().num_tokens == MOST
    num_tokens(budget, decodes(3), prompt())
    assert (budget.stats().num_tokens, budget.stats().itl_goal) == (49, 0.05)


# ---------------------------------------------------------------------------------------------------------- scheduler


def loop_with_goal(goal=0.016, **limits):
    scheduler = make_scheduler(max_num_batched_tokens=MOST, **limits)
    scheduler.budget = make_budget(goal)
    return Loop(scheduler)


def test_a_long_prompt_is_cut_by_the_goal_beside_decodes_alone():
    loop = loop_with_goal()
    loop.add([1] * 20, max_tokens=20)
    assert chunks(loop.step()) == {"0": (0, 20)}
    loop.add([2] * 40, max_tokens=1)
    sizes = [loop.step().num_tokens for _ in range(4)]
    assert sizes == [1 + 12, 1 + 12, 1 + 12, 1 + 4]  # 14 fit, a chunk ends with a block; 13, 13 for deeper ones


def test_a_flood_of_prompts_without_streams_takes_short_steps_once_another_client_asked():
    loop = loop_with_goal()
    for number in range(4):
        loop.add([2 + number] * 40, max_tokens=1, client="flood")
    assert loop.step().num_tokens == 160  # of a client alone
    loop.add([1] * 4, max_tokens=1, client="other")
    loop.step()
    for number in range(4):
        loop.add([6 + number] * 40, max_tokens=1, client="flood")
    assert loop.step().num_tokens == 12
    loop.add([9] * 4, max_tokens=1, client="other")
    assert "other" in {entry.sequence.client for _ in range(2) for entry in loop.step().prefills}


def test_a_short_step_leaves_a_short_prompt_room_beside_a_long_one():
    loop = loop_with_goal(long_prefill_token_threshold=MOST // 2)
    loop.scheduler.budget = make_budget(0.016, long_prefill_token_threshold=MOST // 2)
    loop.add([1] * 20, max_tokens=20)
    loop.step()
    loop.add([2] * 40, max_tokens=1)
    assert chunks(loop.step())["1"] == (0, 12)  # alone it takes the step
    loop.add([3] * 4, max_tokens=1)
    both = chunks(loop.step())
    assert both["1"] == (12, 16) and both["2"] == (0, 4)  # a threshold of 128 would give the long one all


def loop_of_single_blocks(**options):
    """A stream beside which each step has a block for prompts, whatever its goal."""
    loop = loop_with_goal(1e-3, **options)
    loop.add([1] * 4, max_tokens=60)
    loop.step()
    return loop


def chunked(loop):
    """The requests with a chunk in the next step."""
    return [entry.sequence.request_id for entry in loop.step().prefills]


def test_short_prompts_take_turns_with_a_long_one_in_steps_of_one_block():
    loop = loop_of_single_blocks()
    loop.add([2] * 60, max_tokens=1)
    assert chunked(loop) == ["1"]
    for number in range(3, 6):
        loop.add([number] * 4, max_tokens=1)
    assert [chunked(loop) for _ in range(7)] == [["1"], ["2"], ["1"], ["3"], ["1"], ["4"], ["1"]]


def test_a_prompt_of_several_blocks_passes_a_long_one_whatever_the_budget_of_the_step():
    loop = loop_of_single_blocks(long_prefill_token_threshold=128, max_long_partial_prefills=1)
    loop.add([2] * 60, max_tokens=1)
    loop.step()
    loop.add([3] * 12, max_tokens=1)
    loop.add([4] * 40, max_tokens=1)  # as long as the first: it waits for it
    assert [chunked(loop) for _ in range(7)] == [["1"], ["2"], ["1"], ["2"], ["1"], ["2"], ["1"]]


@pytest.mark.parametrize("num_partial", [1, 2, 4])
def test_a_prompt_of_one_block_starts_once_each_prompt_in_progress_had_a_step(num_partial):
    """The bound that tuning.md states; and a flood of short ones holds the long ones up no more."""
    loop = loop_of_single_blocks(max_num_partial_prefills=num_partial)
    longest = [loop.add([number] * 60, max_tokens=1) for number in range(num_partial)]
    while not all(sequence.is_running for sequence in longest):
        loop.step()
    waits = []
    for step in range(4):
        first = loop.add([step] * 4, max_tokens=1)
        waits.append(next(count for count in range(9) if first.request_id in chunked(loop)))
    assert max(waits) == num_partial
    before = [sequence.num_computed_tokens for sequence in longest]
    for number in range(num_partial + 1):
        loop.add([number] * 4, max_tokens=1)
        loop.add([number] * 4, max_tokens=1)
        loop.step()
    assert all(s.num_computed_tokens > n for s, n in zip(longest, before, strict=True))


def test_in_short_steps_the_client_that_was_served_less_comes_first():
    loop = loop_of_single_blocks(max_num_seqs=8)
    for number in (2, 3, 4):
        loop.add([number] * 40, max_tokens=1, client="flood")
    loop.steps(9)
    for number in (5, 6):
        loop.add([number] * 8, max_tokens=1, client="one")
    assert [chunked(loop) for _ in range(4)] == [["4"], ["4"], ["1"], ["5"]]


def test_while_no_slot_is_free_no_budget_is_chosen():
    loop = loop_with_goal(max_num_seqs=1)
    loop.add([1] * 20, max_tokens=20)
    loop.add([2] * 40, max_tokens=1)
    loop.step()
    loop.manager.lookup = None  # of a prompt that cannot start
    loop.step()
    assert loop.scheduler.budget.stats().num_tokens == MOST


def test_an_unlimited_goal_gives_every_batch_of_no_goal():
    def batches(goal):
        limits = {"max_num_batched_tokens": 40, "long_prefill_token_threshold": 20}
        rng, scheduler = random.Random(3), make_scheduler(**limits)
        if goal is not None:
            scheduler.budget = make_budget(goal, **limits)
        loop, seen = Loop(scheduler), []
        for number in range(30):
            loop.add([number] * rng.randint(1, 50), max_tokens=rng.randint(1, 12))
            seen += [(chunks(batch), batch.num_decodes) for batch in (loop.step() for _ in range(3)) if batch]
        return seen

    assert batches(None) == batches(1e6)
    assert batches(None) != batches(0.01)
