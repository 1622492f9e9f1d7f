"""Bugs that other engines had, each with the test that keeps it out of this one.

Those of scheduler, block manager and options; the mock model checks every read.
"""

import pytest

from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.sampling_params import SamplingParams
from tests.engine.loops import chunks, generate_alone
from tests.support.scheduling import Loop, make_scheduler

SIZE = 4


def make_loop(**limits):
    return Loop(make_scheduler(block_size=SIZE, **limits))


def prompt(length, first=0):
    """Tokens that no prompt with another `first` begins with."""
    return [first, *(position % 7 for position in range(length - 1))]


def finish(loop):
    loop.finish()


# ----------------------------------------------------------------------------------------------------- the loop


@pytest.mark.parametrize("length", [k * SIZE + extra for k in (1, 2, 3) for extra in (-1, 0, 1)])
def test_a_fully_cached_prompt_still_computes_its_last_token(length):
    loop = make_loop()
    for _ in range(3):
        loop.add(prompt(length), max_tokens=6)
        start, end = chunks(loop.step())[str(len(loop.sequences) - 1)]
        assert end == length
        assert start <= length - 1
        finish(loop)
    assert start == (length - 1) // SIZE * SIZE


def test_nothing_to_schedule_is_an_answer_and_no_endless_loop():
    loop = make_loop()
    assert loop.launch() is None
    loop.add(prompt(5), max_tokens=1)
    loop.launch()
    assert loop.launch() is None  # its last token is in flight
    assert loop.unfinished
    loop.read()
    assert loop.launch() is None
    assert not loop.unfinished


def test_the_only_running_request_never_preempts_itself():
    loop = make_loop(num_kv_blocks=1 + 8, max_model_len=32)
    loop.add(prompt(5))
    assert loop.drain() == 32 - 5
    assert loop.scheduler.stats.num_preemptions == 0
    loop.check_outputs()


def test_two_requests_that_both_need_the_whole_pool_do_not_preempt_each_other_for_ever():
    loop = make_loop(num_kv_blocks=1 + 8, max_model_len=32)
    loop.add(prompt(5))
    loop.add(prompt(5, 1))
    assert loop.drain() <= 2 * 32
    assert loop.sequences[0].num_preemptions == 0
    loop.check_outputs()


@pytest.mark.parametrize("budget", [9, 10, 11, 12, 13, 17, 24, 100])
@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 8])
def test_slots_and_lengths_are_right_at_every_chunk_boundary(budget, block_size):
    scheduler = make_scheduler(block_size=block_size, max_num_batched_tokens=max(budget, block_size + 1))
    loop = Loop(scheduler)
    for number in range(6):
        loop.add(prompt(1 + 7 * number, number), max_tokens=5)
    finish(loop)


def test_an_unfinished_chunk_samples_nothing():
    loop = make_loop(max_num_batched_tokens=8)
    sequence = loop.add(prompt(20), max_tokens=3)
    for _ in range(2):
        assert loop.step().sampling == ()
        assert sequence.num_output_tokens == 0
    assert loop.step().sampling == (sequence,)
    finish(loop)


def test_a_preempted_request_with_output_is_computed_in_chunks_like_any_other():
    loop = make_loop(max_num_batched_tokens=8, enable_prefix_caching=False)
    sequence = loop.add(prompt(9), max_tokens=8)
    while len(sequence.token_ids) < 13:
        loop.step()
    loop.scheduler.preempt_all()
    steps = [loop.step() for _ in range(3)]
    assert [chunks(step)["0"] for step in steps] == [(0, 8), (8, 13), (13, 14)]
    assert [step.sampling for step in steps] == [(), (sequence,), (sequence,)]
    finish(loop)


@pytest.mark.parametrize("length", range(1, 2 * SIZE + 2))
def test_a_block_is_taken_with_its_first_token_and_found_with_its_last(length):
    loop = make_loop()
    sequence = loop.add(prompt(length), max_tokens=2 * SIZE + 1)
    while True:
        loop.step()
        if sequence.is_finished:
            break
        assert len(sequence.block_table) == -(-sequence.num_computed_tokens // SIZE)
        assert loop.manager.num_findable_blocks == sequence.num_computed_tokens // SIZE
    loop.check_outputs()


def test_token_id_0_is_a_token_like_any_other():
    loop = make_loop()
    plain, stopped = loop.add([0] * 9, max_tokens=3), loop.add([0] * 9, stop_token_ids=[0])
    advanced = loop.scheduler.update(loop.scheduler.schedule(), [0, 0])
    assert advanced == [plain, stopped]
    assert plain.output_token_ids == [0]
    assert (stopped.finish_reason, stopped.stop_reason, stopped.output_token_ids) == ("stop", 0, [0])
    assert plain.num_cached_tokens + stopped.num_cached_tokens == 8


def test_max_num_seqs_bounds_decodes_and_prefills_together():
    loop = make_loop(max_num_seqs=4, max_num_batched_tokens=12)
    for number in range(12):
        loop.add(prompt(1 + number, number), max_tokens=1 + number % 5)
    while loop.unfinished:
        assert len(loop.step().entries) <= 4
        assert len(loop.scheduler.running) <= 4
    loop.check_outputs()


def test_limits_on_prefills_count_those_of_earlier_steps():
    loop = make_loop(
        max_num_batched_tokens=16,
        max_num_seqs=8,
        long_prefill_token_threshold=8,
        max_num_partial_prefills=2,
        max_long_partial_prefills=1,
    )
    for number in range(5):
        loop.add(prompt(50, number), max_tokens=2)
    num_partial, num_long = [], []
    while loop.unfinished:
        loop.step()
        lacking = [s.num_prompt_tokens - s.num_computed_tokens for s in loop.scheduler.running]
        num_partial.append(sum(count > 0 for count in lacking))
        num_long.append(sum(count > 8 for count in lacking))
    assert (max(num_partial), max(num_long)) == (2, 1)
    loop.check_outputs()


def test_admission_counts_blocks_that_prefills_of_earlier_steps_will_need():
    loop = make_loop(
        num_kv_blocks=1 + 12,
        max_model_len=48,
        max_num_batched_tokens=16,
        max_num_seqs=8,
        long_prefill_token_threshold=8,
    )
    loop.add(prompt(40), max_tokens=1)
    loop.step()
    loop.add(prompt(8, 1), max_tokens=1)
    loop.step()
    assert loop.sequences[1].num_computed_tokens == 0  # budget and blocks are there, but the blocks not for long
    finish(loop)
    assert loop.scheduler.stats.num_preemptions == 0


# --------------------------------------------------------------------------------------------------- the prefix cache


def test_no_map_entry_outlives_the_reuse_of_its_block():
    loop = make_loop(num_kv_blocks=1 + 6, max_model_len=24)
    for number in (0, 1, 0, 2, 1, 0):
        loop.add(prompt(17, number), max_tokens=6)
        finish(loop)
        assert loop.manager.num_findable_blocks <= 6
    assert loop.manager.num_evictions > 0


@pytest.mark.parametrize("freed_first", [0, 1])
def test_freeing_one_of_two_blocks_with_the_same_content_leaves_the_other_findable(freed_first):
    loop = make_loop(num_kv_blocks=1 + 10, max_model_len=40)
    twins = [loop.add(prompt(8), max_tokens=20) for _ in range(2)]  # the second recomputes the last block
    loop.step()
    assert twins[0].block_table[1] != twins[1].block_table[1]
    loop.abort(twins[freed_first])
    loop.add(prompt(23, 1), max_tokens=1)  # takes every free block
    loop.step()
    loop.add([*prompt(8), 3], max_tokens=1)
    assert chunks(loop.step())["3"] == (8, 9)
    finish(loop)


def test_a_prompt_of_whole_blocks_run_twice_does_not_cut_the_chain_of_the_next_turn():
    loop = make_loop()
    for _ in range(2):
        sequence = loop.add(prompt(2 * SIZE), max_tokens=2 * SIZE + 1)
        finish(loop)
    loop.add([*sequence.token_ids, 5], max_tokens=1)
    assert chunks(loop.step())["2"] == (4 * SIZE, 4 * SIZE + 2)


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


def test_budget_and_blocks_are_counted_after_the_hit_and_not_before():
    loop = make_loop(num_kv_blocks=1 + 16, max_model_len=48, max_num_batched_tokens=12, max_num_seqs=8)
    loop.add(prompt(40), max_tokens=1)
    finish(loop)
    hit = loop.add([*prompt(40), 5, 5], max_tokens=4)
    loop.add(prompt(8, 1), max_tokens=1)
    assert chunks(loop.step()) == {"1": (40, 42), "2": (0, 8)}
    assert len(hit.block_table) == 11
    finish(loop)


def test_blocks_of_a_request_that_is_not_admitted_do_not_leak():
    loop = make_loop(num_kv_blocks=1 + 6, max_model_len=24)
    loop.add(prompt(12), max_tokens=8)
    loop.step()
    refused = loop.add(prompt(12) + [5] * 8, max_tokens=2)  # three hits, three more to take, three free but one short
    refused.max_num_tokens = 22
    free = loop.manager.num_free_blocks
    loop.step()
    assert refused.block_table == []
    assert loop.manager.num_free_blocks == free - 1  # the running one's next block
    finish(loop)


def test_a_revived_free_block_is_not_counted_as_still_free():
    loop = make_loop(num_kv_blocks=1 + 6, max_model_len=24)
    loop.add(prompt(12), max_tokens=1)
    finish(loop)
    loop.add(prompt(6, 1), max_tokens=2)
    loop.step()
    assert loop.manager.num_free_blocks == 4  # three of them cached
    revived = loop.add(prompt(12) + [5] * 4, max_tokens=2)  # five blocks with one more token: three to revive, two more
    loop.step()
    assert revived.num_computed_tokens == 0
    finish(loop)


def test_hits_are_counted_once_though_a_request_is_preempted_and_undone():
    loop = make_loop()
    loop.add(prompt(12), max_tokens=1)
    finish(loop)
    again = loop.add(prompt(12) + [5] * 3, max_tokens=8)
    loop.launch()
    loop.fail()
    loop.step()
    loop.scheduler.preempt_all()
    finish(loop)
    stats = loop.scheduler.stats
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits, again.num_cached_tokens) == (12 + 15, 12, 12)


def test_one_scheduler_inherits_nothing_from_another():
    first, second = make_loop(), make_loop()
    first.add(prompt(20), max_tokens=4)
    first.step()
    second.add(prompt(20), max_tokens=4)
    assert chunks(second.step()) == {"0": (0, 20)}
    assert second.scheduler.stats.prefix_cache_hits == 0
    finish(first)
    finish(second)


# --------------------------------------------------------------------------------------------------------- options


def test_max_tokens_0_is_refused():
    with pytest.raises(ValueError, match="max_tokens is 0; it must be at least 1"):
        SamplingParams(max_tokens=0)


@pytest.mark.parametrize("length", [1, 14, 15])
def test_no_position_lies_beyond_the_model_s_last(length):
    loop = make_loop(max_model_len=16)
    sequence = loop.add(prompt(length), max_tokens=1000)
    while loop.unfinished:
        entry = loop.step().entries[0]
        assert entry.start + entry.num_new_tokens <= 16
    assert len(sequence.token_ids) == 16
    loop.check_outputs()


def test_max_model_len_beyond_the_model_s_positions_is_refused():
    with pytest.raises(ValueError, match="max_model_len is 4097, but the model has positions for 4096 tokens"):
        EngineConfig(max_model_len=4097).resolve_limits("cpu", 4096)


def test_unknown_options_are_not_dropped():
    with pytest.raises(TypeError, match=r"unknown engine option 'max_num_seq'.*max_num_seqs"):
        EngineConfig.from_options(max_num_seq=4)
