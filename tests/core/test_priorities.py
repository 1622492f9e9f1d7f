"""Priorities: a lower number runs first, in admission and in preemption; with ageing no request starves."""

import pytest

from tests.support.public_options import make_sequence
from tests.support.scheduling import Loop, make_scheduler

NUM_ROUNDS = 200


def crowded_loop(ageing):
    return Loop(make_scheduler(max_num_seqs=1, max_num_batched_tokens=64, priority_ageing_s=ageing))


def step_when_the_patient_ends(loop, priority):
    """A request of low priority in an engine for one, where one of priority 0 arrives every second, as fast as it
    serves them; returns the step that ended it, or None after many."""
    loop.add([1, 2], max_tokens=1)
    patient = loop.add([1, 2, 3], max_tokens=1, priority=priority)
    for number in range(NUM_ROUNDS):
        loop.add([4, number % 8], max_tokens=1)
        loop.step()
        if patient.is_finished:
            return number
        loop.now += 1.0
    return None


def test_without_ageing_a_low_priority_starves_while_others_come():
    assert step_when_the_patient_ends(crowded_loop(None), priority=3) is None


@pytest.mark.parametrize("priority", [1, 3, 7])
def test_with_ageing_a_low_priority_waits_as_long_as_its_levels_last(priority):
    """After `priority` levels of 10 seconds it is as urgent as one that arrives then; those before it come first."""
    ended = step_when_the_patient_ends(crowded_loop(10.0), priority=priority)
    assert ended is not None
    assert 10 * priority <= ended <= 10 * priority + 2


@pytest.mark.parametrize("ageing", [0, 0.0, None])
def test_ageing_of_zero_is_none(ageing):
    scheduler = make_scheduler(priority_ageing_s=ageing)
    sequence = make_sequence([1], arrival=1, priority=4, arrival_time=1000.0)
    scheduler.add(sequence)
    assert sequence.key == (4, 1)


def test_an_aged_request_is_not_preempted_for_a_more_urgent_but_younger_one():
    """The victim is the last in the order that ageing gives, whatever the priorities say."""
    loop = Loop(make_scheduler(max_model_len=24, num_kv_blocks=8, priority_ageing_s=1.0))
    old = loop.add([1] * 8, max_tokens=16, priority=5)
    loop.now = 10.0
    young = loop.add([2] * 8, max_tokens=16, priority=0)
    loop.finish()
    assert (old.num_preemptions, young.num_preemptions > 0) == (0, True)
