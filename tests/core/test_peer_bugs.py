"""Bugs that other engines had, each with the test that keeps it out of this one.

Those that the tests of the engine do not meet; the mock model checks every read.
"""

import pytest

from tests.engine.loops import chunks, generate_alone, prompt
from tests.support.scheduler_loops import make_loop


def test_two_requests_that_both_need_the_whole_pool_do_not_preempt_each_other_for_ever():
    loop = make_loop(num_kv_blocks=1 + 8, max_model_len=32)
    loop.add(prompt(5))
    loop.add(prompt(5, 1))
    assert loop.drain() <= 2 * 32
    assert loop.sequences[0].num_preemptions == 0
    loop.check_outputs()


def test_a_preempted_request_with_output_is_computed_in_chunks_like_any_other():
    loop = make_loop(max_num_batched_tokens=8, enable_prefix_caching=False)
    sequence = loop.add(prompt(9), max_tokens=8)
    while len(sequence.token_ids) < 13:
        loop.step()
    loop.scheduler.preempt_all()
    steps = [loop.step() for _ in range(3)]
    assert [chunks(step)["0"] for step in steps] == [(0, 8), (8, 13), (13, 14)]
    assert [step.sampling for step in steps] == [(), (sequence,), (sequence,)]
    loop.finish()


def test_admission_counts_blocks_that_prefills_of_earlier_steps_will_need():
    limits = {"max_model_len": 48, "max_num_batched_tokens": 16, "long_prefill_token_threshold": 8}
    loop = make_loop(num_kv_blocks=1 + 12, **limits)
    loop.add(prompt(40), max_tokens=1)
    loop.step()
    loop.add(prompt(8, 1), max_tokens=1)
    loop.step()
    assert loop.sequences[1].num_computed_tokens == 0  # budget and blocks are there, but the blocks not for long
    loop.finish()
    assert loop.scheduler.stats.num_preemptions == 0


@pytest.mark.parametrize("same_step", [True, False])
@pytest.mark.parametrize("step_fails", [True, False])
def test_a_block_found_before_it_is_computed_is_right_although_its_request_is_aborted(same_step, step_fails):
    loop = make_loop()
    first = loop.add(prompt(12), max_tokens=4)
    if not same_step:
        loop.launch()
    second = loop.add([*prompt(12), 5], max_tokens=4)
    loop.launch()
    assert second.num_cached_tokens == 12
    loop.abort(first)
    if step_fails:
        loop.fail(0)
    loop.drain(depth=2)
    assert second.output_token_ids == generate_alone(second)
    loop.check_outputs()
