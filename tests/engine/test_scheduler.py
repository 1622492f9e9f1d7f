"""The scheduler: the token budget of each step, limits on partial prefills, admission."""

import subprocess
import sys
from pathlib import Path

import pytest

import nanovllm
from nanovllm import admission
from tests.engine.loops import chunks, generate_alone, make_loop, prompt, running, waiting

# -------------------------------------------------------------------------------------------------------------- imports


def test_importing_the_scheduler_does_not_import_torch():
    code = "import sys, nanovllm.scheduler; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    root = Path(nanovllm.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0


# ----------------------------------------------------------------------------------------------------- budget and order


def test_a_step_without_work_schedules_nothing():
    loop = make_loop()
    assert loop.launch() is None
    assert loop.scheduler.stats.num_steps == 0
    assert not loop.unfinished


def test_a_prompt_that_fits_is_computed_in_one_step_and_samples():
    loop = make_loop()
    loop.add(prompt(10))
    batch = loop.launch()
    assert chunks(batch) == {"0": (0, 10)}
    assert [entry.num_samples for entry in batch.entries] == [1]


def test_a_running_sequence_computes_its_newest_token_and_samples_the_next():
    loop = make_loop()
    sequence = loop.add(prompt(10), max_tokens=3)
    steps = [chunks(loop.step()) for _ in range(3)]
    assert steps == [{"0": (0, 10)}, {"0": (10, 11)}, {"0": (11, 12)}]
    assert sequence.output_token_ids == generate_alone(sequence)


def test_no_step_exceeds_the_budget():
    loop = make_loop(max_num_batched_tokens=12, max_num_seqs=8)
    for length in (30, 5, 17, 1, 9, 40):
        loop.add(prompt(length, length), max_tokens=10)
    sizes = []
    while loop.unfinished:
        sizes.append(loop.step().num_tokens)
    assert max(sizes) == 12
    loop.check_outputs()


def test_decodes_go_before_prefills_in_progress_before_waiting_requests():
    loop = make_loop(max_num_batched_tokens=16)
    loop.add(prompt(4))
    loop.step()
    loop.add(prompt(20, 1))
    loop.step()
    loop.add(prompt(3, 2))
    assert chunks(loop.step()) == {"0": (5, 6), "1": (12, 20), "2": (0, 3)}


def test_a_batch_lists_its_decodes_first():
    loop = make_loop(max_num_batched_tokens=16)
    loop.add(prompt(30))
    loop.step()
    loop.add(prompt(1, 1), priority=-1)
    loop.step()
    assert list(chunks(loop.step())) == ["1", "0"]


def test_waiting_requests_start_by_priority_and_then_by_arrival():
    loop = make_loop()
    for priority in (1, 0, 1, -5, 0):
        loop.add(prompt(4, priority + 6), priority=priority)
    assert list(chunks(loop.step())) == ["3", "1", "4", "0", "2"]


def test_with_ageing_a_request_gains_a_level_for_each_interval_that_it_waits():
    loop = make_loop(max_num_seqs=1, priority_ageing_s=10.0)
    for priority, arrival_time in ((1, 0.0), (0, 9.0), (0, 11.0)):
        loop.add(prompt(5, priority), priority=priority, arrival_time=arrival_time, max_tokens=1)
    assert [[*chunks(loop.step())] for _ in range(3)] == [["1"], ["0"], ["2"]]
    assert [loop.scheduler.waiting.rank(sequence) for sequence in loop.sequences] == [(1,), (0,), (1,)]


def test_a_chunk_is_cut_to_the_budget_that_is_left():
    loop = make_loop(max_num_batched_tokens=16)
    loop.add(prompt(8))
    loop.add(prompt(20, 1))
    assert chunks(loop.step()) == {"0": (0, 8), "1": (0, 8)}


def test_a_chunk_ends_on_a_block_boundary_unless_it_ends_the_known_tokens():
    loop = make_loop(max_num_batched_tokens=11)
    loop.add(prompt(21))
    assert [chunks(loop.step())["0"] for _ in range(3)] == [(0, 8), (8, 16), (16, 21)]


def test_a_chunk_samples_only_when_it_ends_the_known_tokens():
    loop = make_loop(max_num_batched_tokens=12)
    loop.add(prompt(20))
    first, second = loop.step(), loop.step()
    assert [entry.num_samples for entry in first.entries + second.entries] == [0, 1]
    assert [*second.sampling] == loop.sequences


def test_the_budget_is_spent_on_two_prompts_at_once_when_one_cannot_use_it_all():
    loop = make_loop(max_num_batched_tokens=16, long_prefill_token_threshold=8)
    loop.add(prompt(6))
    loop.add(prompt(7, 1))
    assert chunks(loop.step()) == {"0": (0, 6), "1": (0, 7)}


def test_max_num_seqs_bounds_the_running_sequences_and_not_just_the_new_ones():
    loop = make_loop(max_num_seqs=3)
    for number in range(5):
        loop.add(prompt(4, number), max_tokens=2 + number)
    assert list(chunks(loop.step())) == ["0", "1", "2"]
    assert list(chunks(loop.step())) == ["0", "1", "2"]
    assert list(chunks(loop.step())) == ["1", "2", "3"]
    loop.drain()
    loop.check_outputs()


# ------------------------------------------------------------------------------------------- limits on partial prefills


def test_one_long_prompt_takes_at_most_the_threshold_while_others_want_the_budget():
    loop = make_loop(max_num_batched_tokens=20, long_prefill_token_threshold=8)
    loop.add(prompt(60))
    loop.add(prompt(8, 1))
    loop.add(prompt(4, 2))
    assert chunks(loop.step()) == {"0": (0, 8), "1": (0, 8), "2": (0, 4)}


def test_leftover_budget_goes_to_the_chunks_that_the_threshold_capped():
    loop = make_loop(max_num_batched_tokens=32, long_prefill_token_threshold=8)
    loop.add(prompt(60))
    loop.add(prompt(5, 1), max_tokens=1)
    assert chunks(loop.step()) == {"0": (0, 24), "1": (0, 5)}
    assert chunks(loop.step()) == {"0": (24, 56)}


@pytest.mark.parametrize("waits", [False, True])
def test_leftover_budget_delays_decodes_only_while_a_request_waits(waits):
    """Else a prompt that arrives alone would hold up every stream for a whole step of the budget."""
    loop = make_loop(max_num_batched_tokens=32, long_prefill_token_threshold=8, max_long_partial_prefills=1)
    loop.add(prompt(5, 1))
    loop.step()
    loop.add(prompt(60))
    if waits:
        loop.add(prompt(60, 2))
    assert chunks(loop.step()) == {"0": (5, 6), "1": (0, 28 if waits else 8)}
    loop.drain()
    loop.check_outputs()


def test_a_threshold_below_a_block_leaves_each_prompt_a_block():
    loop = make_loop(max_num_batched_tokens=8, long_prefill_token_threshold=2)
    for number in range(2):
        loop.add(prompt(12, number))
    assert chunks(loop.step()) == {"0": (0, 4), "1": (0, 4)}


def test_a_step_looks_past_a_bounded_number_of_requests_that_cannot_start():
    for num_held in (admission.MAX_LOOK_PAST - 1, admission.MAX_LOOK_PAST):
        loop = make_loop(max_num_partial_prefills=1, max_num_batched_tokens=16, long_prefill_token_threshold=8)
        for number in range(1 + num_held):
            loop.add(prompt(40, number))
        loop.add([2])
        assert len(chunks(loop.step())) == (2 if num_held < admission.MAX_LOOK_PAST else 1)


def test_short_prompts_pass_a_second_long_one():
    loop = make_loop(max_num_batched_tokens=32, long_prefill_token_threshold=8, max_long_partial_prefills=1)
    for number, length in enumerate((60, 60, 5, 6)):
        loop.add(prompt(length, number), max_tokens=40 if number > 1 else 4)
    assert list(chunks(loop.step())) == ["0", "2", "3"]
    assert waiting(loop) == ["1"]
    while "0" in running(loop):
        loop.step()
    assert "1" in running(loop)
    loop.drain()
    loop.check_outputs()


def test_a_long_prompt_that_is_mostly_cached_counts_as_a_short_one():
    loop = make_loop(max_num_batched_tokens=24, long_prefill_token_threshold=8, max_long_partial_prefills=1)
    loop.add(prompt(40, 1), max_tokens=1)
    loop.drain()
    loop.add(prompt(60, 2))
    loop.add(prompt(44, 1))
    assert chunks(loop.step()) == {"1": (0, 20), "2": (40, 44)}


def test_partial_prefills_are_limited_in_number():
    loop = make_loop(max_num_batched_tokens=32, long_prefill_token_threshold=8, max_num_partial_prefills=2)
    for number in range(4):
        loop.add(prompt(30, number))
    assert list(chunks(loop.step())) == ["0", "1"]


def test_partial_prefills_of_earlier_steps_count():
    loop = make_loop(max_num_batched_tokens=32, long_prefill_token_threshold=8, max_num_partial_prefills=2)
    for number in range(2):
        loop.add(prompt(60, number))
    loop.step()
    loop.add(prompt(30, 2))
    loop.add(prompt(8, 3))
    assert list(chunks(loop.step())) == ["0", "1", "3"]  # a prompt computed at once is not partial


def test_a_partial_prefill_that_ends_makes_room_for_another_in_the_same_step():
    loop = make_loop(max_num_batched_tokens=16, long_prefill_token_threshold=8, max_num_partial_prefills=1)
    loop.add(prompt(20))
    loop.add(prompt(20, 1))
    loop.step()
    assert chunks(loop.step()) == {"0": (16, 20), "1": (0, 12)}


# --------------------------------------------------------------------------------------------------- bounded overtaking


def test_a_request_whose_chunk_rounds_down_to_nothing_stays_first_in_line():
    loop = make_loop(max_num_batched_tokens=11, max_num_seqs=7)
    loop.add(prompt(12))
    loop.add(prompt(10, 1))
    loop.add(prompt(3, 2))
    assert chunks(loop.step()) == {"0": (0, 8), "2": (0, 3)}
    assert waiting(loop) == ["1"]
    assert loop.sequences[1].num_times_passed == 1
    assert chunks(loop.step()) == {"2": (3, 4), "0": (8, 12), "1": (0, 4)}


def test_overtaking_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(admission, "MAX_TIMES_PASSED", 4)
    loop = make_loop(max_model_len=256, max_num_batched_tokens=11, max_num_seqs=7)
    loop.add(prompt(200))
    loop.add(prompt(10, 1))
    for _ in range(30):
        loop.add([2], max_tokens=1)
    num_admitted_before = 0
    while "1" not in chunks(batch := loop.step()):
        num_admitted_before += sum(entry.sequence.arrival > 1 for entry in batch.entries)
    assert 4 <= num_admitted_before < 4 + 3  # three slip past in each step, also in the one that reaches the limit
    assert loop.sequences[1].num_times_passed == 0  # it started
    loop.drain()
    loop.check_outputs()


# ---------------------------------------------------------------------------------------------------- admission reserve


def test_admission_needs_room_for_all_known_tokens_and_one_more():
    for length, admitted in ((11, True), (12, False)):
        loop = make_loop(num_kv_blocks=1 + 5, max_model_len=20)
        loop.add(prompt(5), max_tokens=2)  # holds two blocks
        loop.step()
        loop.add(prompt(length, 1))
        loop.step()
        assert ("1" in running(loop)) == admitted


def test_admission_leaves_what_prefills_in_progress_still_need():
    limits = {"max_model_len": 40, "long_prefill_token_threshold": 12, "max_num_batched_tokens": 24}
    for length, admitted in ((11, True), (12, False)):
        loop = make_loop(num_kv_blocks=1 + 10, **limits)
        loop.add(prompt(24))  # 7 blocks with one more token: 3 now, 4 reserved
        loop.add(prompt(length, 1))
        batch = loop.step()
        assert ("1" in chunks(batch)) == admitted


def test_admission_charges_cached_blocks_that_are_free_and_not_those_in_use():
    loop = make_loop(num_kv_blocks=1 + 6, max_model_len=24)
    loop.add(prompt(12), max_tokens=1)
    loop.drain()
    loop.add([*prompt(12), 6], max_tokens=9)  # revives three blocks, takes one
    loop.step()
    assert loop.manager.num_free_blocks == 2
    loop.add(prompt(12) + [5] * 4)  # shares three blocks, needs two
    loop.step()
    assert running(loop) == ["1", "2"]


def test_a_request_that_must_wait_for_blocks_is_not_passed_by_a_smaller_one():
    loop = make_loop(num_kv_blocks=1 + 6, max_model_len=24)
    loop.add(prompt(15), max_tokens=4)
    loop.step()
    loop.add(prompt(14, 1))
    loop.add(prompt(2, 2))
    loop.step()
    assert waiting(loop) == ["1", "2"]


@pytest.mark.costly
def test_a_request_that_lacks_a_block_of_budget_is_passed_by_its_own_client_alone():
    for client, starts in (("a", ["0", "2"]), ("b", ["0"])):
        loop = make_loop(max_num_batched_tokens=12)
        for length, of_client in ((10, "a"), (6, "a"), (2, client)):
            loop.add(prompt(length, length), client=of_client, max_tokens=2)
        assert [*chunks(loop.step())] == starts
        loop.drain()
        loop.check_outputs()
