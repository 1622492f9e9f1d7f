"""Priorities: a lower number runs first, in admission and in preemption; with ageing no request starves."""

from itertools import pairwise

import pytest

from nanovllm import LLM, SamplingParams
from tests.support.public_options import make_sequence
from tests.support.scheduling import Loop, make_scheduler
from tests.support.tiny_models import random_prompts, tiny_model, tiny_tokenizer

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


def test_equal_priorities_stay_in_order_of_arrival_with_ageing():
    loop = crowded_loop(10.0)
    for _ in range(5):
        loop.add([1, 2], max_tokens=1)
        loop.now += 3.0
    ended = []
    while loop.unfinished:
        loop.step()
        ended.append([sequence.arrival for sequence in loop.sequences if sequence.is_finished])
    assert all(len(after) == len(before) + 1 for before, after in pairwise(ended))
    assert ended[-1] == sorted(ended[-1])


def test_an_aged_request_is_not_preempted_for_a_more_urgent_but_younger_one():
    """The victim is the last in the order that ageing gives, whatever the priorities say."""
    loop = Loop(make_scheduler(max_model_len=24, num_kv_blocks=8, priority_ageing_s=1.0))
    old = loop.add([1] * 8, max_tokens=16, priority=5)
    loop.now = 10.0
    young = loop.add([2] * 8, max_tokens=16, priority=0)
    loop.finish()
    assert (old.num_preemptions, young.num_preemptions > 0) == (0, True)


def generate(llm, prompts, **options):
    return llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=60), use_tqdm=False, **options)


def open_llm(**options):
    return LLM(tiny_model(), tokenizer=tiny_tokenizer(), enforce_eager=True, block_size=16, **options)


def test_whoever_is_preempted_is_of_the_lowest_priority_and_its_tokens_are_the_same():
    prompts = random_prompts(3, low=40, high=50)
    alone = [output.outputs[0].token_ids for output in generate(open_llm(num_kv_blocks=129), prompts)]
    with open_llm(num_kv_blocks=14, max_model_len=160) as llm:
        outputs = generate(llm, prompts, priority=[0, 2, 1])
        assert llm.stats().num_preemptions > 0
    assert [output.outputs[0].token_ids for output in outputs] == alone
    preemptions = [output.metrics.num_preemptions for output in outputs]
    assert preemptions[0] == 0
    assert preemptions[1] >= max(1, preemptions[2])


@pytest.mark.costly
@pytest.mark.parametrize("use", [lambda llm: generate(llm, [[5], [6]], priority=[0, 2**31]),
                                 lambda llm: next(llm.stream([5], priority=-(2**40)))])  # fmt: skip
def test_a_priority_out_of_range_is_refused_with_its_value_and_the_limit(use):
    with open_llm(num_kv_blocks=65, max_model_len=256) as llm:
        with pytest.raises(ValueError, match=r"priority is .*between -2147483647 and 2147483647"):
            use(llm)
        assert llm.stats().num_waiting == 0
