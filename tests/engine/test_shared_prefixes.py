"""The scheduler: a prefix that several requests share is computed once, also within a step."""

import pytest

from tests.engine.loops import chunks, make_loop, prompt


def test_64_requests_with_one_new_system_prompt_compute_it_once_in_the_same_step():
    loop = make_loop(max_num_seqs=64)
    system = prompt(32)
    for number in range(64):
        loop.add([*system, number % 8, number // 8], max_tokens=3)
    batch = loop.step()
    assert len(batch.entries) == 64
    assert batch.num_tokens == 32 + 64 * 2
    loop.drain()
    loop.check_outputs()


def test_a_system_prompt_longer_than_the_threshold_is_computed_once_too():
    loop = make_loop(max_num_batched_tokens=64, long_prefill_token_threshold=16, max_long_partial_prefills=1)
    system = prompt(24)
    for number in range(8):
        loop.add([*system, number], max_tokens=1)
    loop.drain()
    assert loop.scheduler.stats.num_scheduled_tokens == 24 + 8


@pytest.mark.parametrize("budget", [12, 20, 28])
def test_requests_that_start_together_share_a_prefix_that_takes_many_steps(budget: int):
    loop = make_loop(max_num_batched_tokens=budget, max_num_seqs=8, max_long_partial_prefills=4)
    system = prompt(48)
    for number in range(6):
        loop.add([*system, number], max_tokens=1)
    loop.drain()
    assert loop.scheduler.stats.num_scheduled_tokens == 48 + 6
    loop.check_outputs()


def test_samples_of_one_prompt_share_its_whole_blocks():
    loop = make_loop()
    for _ in range(8):
        loop.add(prompt(19), max_tokens=2)
    assert loop.step().num_tokens == 16 + 8 * 3


def test_the_lookup_is_repeated_before_every_chunk():
    loop = make_loop(max_num_batched_tokens=16, max_num_seqs=8, long_prefill_token_threshold=8)
    loop.add(prompt(40), max_tokens=2)
    loop.add(prompt(40), max_tokens=2)
    assert chunks(loop.step()) == {"0": (0, 8), "1": (8, 16)}
    assert chunks(loop.step()) == {"0": (16, 24), "1": (24, 32)}
    assert chunks(loop.step()) == {"0": (32, 40), "1": (36, 40)}
    loop.drain()
    loop.check_outputs()


def test_without_prefix_caching_every_prompt_is_computed_in_full():
    loop = make_loop(enable_prefix_caching=False)
    for _ in range(3):
        loop.add(prompt(20), max_tokens=2)
    assert loop.step().num_tokens == 60
    loop.drain()
    loop.check_outputs()
    assert loop.scheduler.stats.prefix_cache_hits == 0


def test_samples_wait_for_the_prompt_that_the_first_of_them_computes_and_keep_their_slots():
    loop = make_loop(max_num_seqs=2, max_num_batched_tokens=16, long_prefill_token_threshold=8)
    loop.add_samples(2, prompt(30), max_tokens=3)
    loop.add(prompt(4, 1))
    assert chunks(loop.step()) == {"0": (0, 16)}
    loop.drain()
    loop.check_outputs()


def test_samples_start_behind_a_more_urgent_request_and_from_the_last_row_of_their_prompt_alone():
    loop = make_loop(num_kv_blocks=1 + 6, max_model_len=24, max_num_batched_tokens=8)
    first, _ = loop.add_samples(2, prompt(15), max_tokens=3)
    loop.step()
    urgent = loop.add(prompt(20, 1), priority=-1)  # lacks blocks
    assert loop.step().sampling == (first,)
    loop.abort(urgent)
    loop.scheduler.preempt_all()
    loop.manager.reset_prefix_cache()
    loop.step()
    assert loop.step().sampling == (first,)  # from the row behind the prompt
    loop.drain()
    loop.check_outputs()


def test_a_sample_that_reports_its_prompt_computes_it():
    loop = make_loop()
    first, second = loop.add_samples(2, prompt(10), max_tokens=3)
    second.prompt_logprobs = [None]
    assert loop.step().sampling == (first,)
    assert chunks(loop.step())[second.request_id] == (0, 10)
