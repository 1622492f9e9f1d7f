"""The scheduler: who is preempted when blocks run out, and how they come back."""

import pytest

from tests.engine.loops import (
    chunks,
    make_loop,
    prefill_between_decodes_that_need_blocks,
    prompt,
    run_until_preemption,
    running,
    two_that_outgrow_the_pool,
    waiting,
)


def test_the_youngest_yields_when_blocks_run_out():
    loop = two_that_outgrow_the_pool()
    run_until_preemption(loop)
    assert running(loop) == ["0"]
    assert waiting(loop) == ["1"]
    assert loop.sequences[1].num_preemptions == 1
    loop.drain()
    loop.check_outputs()


def test_a_lower_priority_yields_before_a_younger_request():
    loop = two_that_outgrow_the_pool(priority=-1)
    run_until_preemption(loop)
    assert running(loop) == ["1"]
    assert waiting(loop) == ["0"]


def test_the_youngest_waits_rather_than_preempt_an_older_one():
    loop = make_loop(num_kv_blocks=1 + 6, max_model_len=24)
    loop.add(prompt(9), max_tokens=15)
    loop.add(prompt(11, 1), max_tokens=10)  # reaches its next block first
    for _ in range(3):
        batch = loop.step()
    assert list(chunks(batch)) == ["0"]
    assert running(loop) == ["0", "1"]
    assert loop.scheduler.stats.num_preemptions == 0
    loop.drain()
    loop.check_outputs()


def test_a_decode_takes_no_block_of_an_older_prompt_in_progress():
    loop = make_loop(num_kv_blocks=1 + 9, max_model_len=24, max_num_batched_tokens=17, long_prefill_token_threshold=8)
    loop.add(prompt(20))
    for number in (1, 2, 3):
        loop.add(prompt(3, number), max_tokens=5)
    loop.step()
    loop.step()
    assert loop.manager.num_free_blocks == 2  # and each of the three decodes needs one
    loop.step()
    assert [sequence.num_preemptions for sequence in loop.sequences] == [0, 0, 0, 1]


def test_leftover_budget_preempts_nothing():
    loop = make_loop(num_kv_blocks=1 + 26, max_model_len=36, max_num_batched_tokens=64, long_prefill_token_threshold=8)
    for number in range(8):
        loop.add(prompt(3, number), max_tokens=9)
    loop.step()
    older, younger = (loop.add(prompt(32, number)) for number in (8, 9))
    loop.step()
    loop.step()
    assert loop.manager.num_free_blocks == 2
    loop.add(prompt(32, 10))  # while it waits, leftover budget is spent
    assert chunks(loop.step())[older.request_id] == (16, 24)
    assert younger.num_preemptions == 0


def test_blocks_of_a_preempted_sequence_are_wanted_until_it_starts_again():
    loop = make_loop(num_kv_blocks=1 + 8, max_model_len=32)
    for number in range(2):
        loop.add(prompt(12, number), max_tokens=12)
    run_until_preemption(loop)
    assert [*loop.manager.wanted] == loop.sequences[1].block_hashes
    loop.drain()
    loop.check_outputs()


def test_only_as_many_are_preempted_as_blocks_are_needed():
    loop = make_loop(num_kv_blocks=1 + 9, max_model_len=36)
    loop.add(prompt(10), max_tokens=20)
    for number in (1, 2):
        loop.add(prompt(9, number), max_tokens=20)
    run_until_preemption(loop)
    assert running(loop) == ["0", "1"]


def test_a_sequence_that_is_already_part_of_the_step_is_not_preempted():
    loop = prefill_between_decodes_that_need_blocks()
    assert list(chunks(loop.launch())) == ["0", "1", "2"]  # 2 made 3 yield; 4 is older than 2 and has to wait
    assert running(loop) == ["0", "1", "4", "2"]
    assert waiting(loop) == ["3"]
    loop.drain(depth=2)
    loop.check_outputs()


def test_a_step_that_preempted_admits_nobody():
    loop = two_that_outgrow_the_pool()
    loop.step()
    loop.add([2], max_tokens=2, priority=-1)
    run_until_preemption(loop)
    assert loop.manager.num_free_blocks > 0
    assert waiting(loop) == ["2", "1"]
    loop.drain()
    loop.check_outputs()


def test_a_step_that_preempted_forks_no_sample():
    loop = make_loop(num_kv_blocks=1 + 12, max_model_len=24, max_num_batched_tokens=16)
    for number in range(3):
        loop.add(prompt(2, number), max_tokens=9)
    youngest = loop.add(prompt(15, 3), max_tokens=9, priority=1)
    loop.step()
    loop.step()
    first, second = loop.add_samples(2, prompt(18), max_tokens=3)
    loop.step()
    batch = loop.step()
    assert youngest.num_preemptions == 1
    assert first in batch.sampling and second not in batch.sampling
    loop.drain()
    loop.check_outputs()


def test_a_preempted_request_comes_back_mostly_from_the_cache():
    loop = two_that_outgrow_the_pool()
    run_until_preemption(loop)
    victim = loop.sequences[1]
    loop.abort(loop.sequences[0])
    start, end = chunks(loop.step())["1"]
    assert end == len(victim.token_ids) - 1  # its newest token was sampled in this step
    assert start == (end - 1) // 4 * 4
    assert victim.num_cached_tokens == 0  # it had computed them before


def test_a_preempted_request_keeps_its_sampled_tokens():
    loop = two_that_outgrow_the_pool()
    run_until_preemption(loop)
    victim = loop.sequences[1]
    tokens = victim.output_token_ids
    assert len(tokens) > 0
    loop.drain()
    assert victim.output_token_ids[: len(tokens)] == tokens
    loop.check_outputs()


def test_preempt_all_makes_every_running_sequence_start_again():
    loop = make_loop()
    for number in range(3):
        loop.add(prompt(9, number), max_tokens=6)
    loop.step()
    loop.step()
    loop.scheduler.preempt_all()
    loop.manager.reset_prefix_cache()
    loop.check()
    assert running(loop) == []
    assert chunks(loop.step()) == {"0": (0, 11), "1": (0, 11), "2": (0, 11)}
    loop.drain()
    loop.check_outputs()


def test_preempt_all_is_refused_while_a_step_is_in_flight():
    loop = make_loop()
    loop.add(prompt(9))
    loop.launch()
    with pytest.raises(RuntimeError, match="in flight"):
        loop.scheduler.preempt_all()
    assert running(loop) == ["0"]
