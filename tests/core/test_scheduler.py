"""The scheduler: who computes how much in each step, who waits, who yields, and what becomes of failures."""

import subprocess
import sys
from pathlib import Path

import pytest

import nanovllm
from nanovllm import scheduler as scheduler_module
from nanovllm.batch import NON_FINITE
from nanovllm.sequence import Sequence, SequenceStatus
from tests.support.scheduling import Loop, chunks, generate_alone, make_scheduler


def make_loop(**limits: int) -> Loop:
    return Loop(make_scheduler(**limits))


def prompt(length: int, first: int = 0) -> list[int]:
    """Tokens that no prompt with another `first` begins with."""
    return [first, *(position % 7 for position in range(length - 1))]


def running(loop: Loop) -> list[str]:
    return [sequence.request_id for sequence in loop.scheduler.running]


def waiting(loop: Loop) -> list[str]:
    return [sequence.request_id for sequence in loop.scheduler.waiting]


# ---------------------------------------------------------------------------------------------------- imports


def test_importing_the_scheduler_does_not_import_torch():
    code = "import sys, nanovllm.scheduler; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    root = Path(nanovllm.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0


# ----------------------------------------------------------------------------------------- budget and order


def test_a_step_without_work_schedules_nothing():
    loop = make_loop()
    assert loop.launch() is None
    assert loop.scheduler.stats.num_steps == 0
    assert not loop.scheduler.has_unfinished


def test_a_prompt_that_fits_is_computed_in_one_step_and_samples():
    loop = make_loop()
    loop.add(prompt(10))
    batch = loop.launch()
    assert chunks(batch) == {"0": (0, 10)}
    assert [entry.samples for entry in batch.entries] == [True]


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
    assert [entry.samples for entry in first.entries + second.entries] == [False, True]
    assert second.sampling == loop.sequences


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


# --------------------------------------------------------------------------------- limits on partial prefills


def test_one_long_prompt_takes_at_most_the_threshold_while_others_want_the_budget():
    loop = make_loop(max_num_batched_tokens=20, long_prefill_token_threshold=8)
    loop.add(prompt(60))
    loop.add(prompt(8, 1))
    loop.add(prompt(4, 2))
    assert chunks(loop.step()) == {"0": (0, 8), "1": (0, 8), "2": (0, 4)}


def test_the_budget_that_nobody_else_wants_goes_to_the_chunks_that_the_threshold_cut():
    loop = make_loop(max_num_batched_tokens=32, long_prefill_token_threshold=8)
    loop.add(prompt(60))
    loop.add(prompt(5, 1))
    assert chunks(loop.step()) == {"0": (0, 24), "1": (0, 5)}
    assert chunks(loop.step()) == {"1": (5, 6), "0": (24, 52)}


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


# ---------------------------------------------------------------------------------------- bounded overtaking


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
    monkeypatch.setattr(scheduler_module, "MAX_TIMES_PASSED", 4)
    loop = make_loop(max_model_len=256, max_num_batched_tokens=11, max_num_seqs=7)
    loop.add(prompt(200))
    loop.add(prompt(10, 1))
    for _ in range(30):
        loop.add([2], max_tokens=1)
    num_admitted_before = 0
    while "1" not in chunks(batch := loop.step()):
        num_admitted_before += sum(entry.sequence.arrival > 1 for entry in batch.entries)
    assert 4 <= num_admitted_before < 4 + 3  # three slip past in each step, also in the one that reaches the limit
    loop.drain()
    loop.check_outputs()


# ------------------------------------------------------------------------------------------- admission reserve


@pytest.mark.parametrize(("length", "admitted"), [(11, True), (12, False)])
def test_admission_needs_room_for_all_known_tokens_and_one_more(length: int, admitted: bool):
    loop = make_loop(num_kv_blocks=1 + 5, max_model_len=20)
    loop.add(prompt(5), max_tokens=2)  # holds two blocks
    loop.step()
    loop.add(prompt(length, 1))
    loop.step()
    assert ("1" in running(loop)) == admitted


@pytest.mark.parametrize(("length", "admitted"), [(11, True), (12, False)])
def test_admission_leaves_what_prefills_in_progress_still_need(length: int, admitted: bool):
    loop = make_loop(num_kv_blocks=1 + 10, max_model_len=40, long_prefill_token_threshold=12, max_num_batched_tokens=24)
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


# --------------------------------------------------------------------------------------------------- preemption


def two_that_outgrow_the_pool(**options: int) -> Loop:
    """Two running sequences of two blocks and a half in a pool of six: one of them needs a fourth block first."""
    loop = make_loop(num_kv_blocks=1 + 6, max_model_len=24)
    loop.add(prompt(10), max_tokens=14)
    loop.add(prompt(9, 1), max_tokens=15, **options)
    return loop


def run_until_preemption(loop: Loop) -> None:
    while not loop.scheduler.stats.num_preemptions:
        loop.step()


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


def test_only_as_many_are_preempted_as_blocks_are_needed():
    loop = make_loop(num_kv_blocks=1 + 9, max_model_len=36)
    loop.add(prompt(10), max_tokens=20)
    for number in (1, 2):
        loop.add(prompt(9, number), max_tokens=20)
    run_until_preemption(loop)
    assert running(loop) == ["0", "1"]


def prefill_between_decodes_that_need_blocks() -> Loop:
    """Request 4 has a chunk of 8 of its 13 tokens in flight, and of four decodes, two older and two younger than it,
    each needs a new block now; two blocks are free."""
    loop = make_loop(num_kv_blocks=1 + 8, max_model_len=32, max_num_batched_tokens=12, max_num_seqs=8)
    for number, priority in enumerate((0, 0, 2, 2)):
        loop.add(prompt(3, number), max_tokens=5, priority=priority)
    loop.step()
    loop.add(prompt(13, 4), max_tokens=2, priority=1)
    assert chunks(loop.launch()) == {"0": (3, 4), "1": (3, 4), "2": (3, 4), "3": (3, 4), "4": (0, 8)}
    assert loop.manager.num_free_blocks == 2
    return loop


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


def test_a_preempted_request_comes_back_mostly_from_the_cache():
    loop = two_that_outgrow_the_pool()
    run_until_preemption(loop)
    victim = loop.sequences[1]
    loop.abort(loop.sequences[0])
    start, end = chunks(loop.step())["1"]
    assert end == victim.num_tokens - 1  # its newest token was sampled in this step
    assert start == (end - 1) // 4 * 4


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


# ---------------------------------------------------------------------------------------------- shared prefixes


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


# --------------------------------------------------------------------------------------------------------- ends


def update_with(loop: Loop, *token_ids: int) -> list[Sequence]:
    """Schedule a step and answer it with tokens of the test's choice."""
    return loop.scheduler.update(loop.scheduler.schedule(), token_ids)


def test_a_request_ends_by_length_at_max_tokens():
    loop = make_loop()
    sequence = loop.add(prompt(4), max_tokens=2)
    assert update_with(loop, 5) == [sequence]
    assert not sequence.is_finished
    update_with(loop, 6)
    assert (sequence.finish_reason, sequence.output_token_ids) == ("length", [5, 6])
    assert loop.manager.num_free_blocks == loop.manager.num_blocks - 1


@pytest.mark.parametrize("max_tokens", [None, 100])
def test_max_tokens_is_cut_to_the_room_that_max_model_len_leaves(max_tokens: int | None):
    loop = make_loop(max_model_len=16)
    sequence = loop.add(prompt(13), max_tokens=max_tokens)
    loop.drain()
    assert sequence.num_output_tokens == 3
    assert sequence.finish_reason == "length"


@pytest.mark.parametrize("options", [{"stop_token_ids": [5, 6]}, {"eos_token_ids": [6, 7]}])
def test_a_request_ends_at_a_stop_token_which_its_output_keeps(options: dict[str, list[int]]):
    loop = make_loop()
    sequence = loop.add(prompt(4), **options)
    update_with(loop, 3)
    update_with(loop, 6)
    assert (sequence.finish_reason, sequence.stop_reason, sequence.output_token_ids) == ("stop", 6, [3, 6])


def test_a_stop_token_that_is_also_the_last_one_counts_as_a_stop():
    loop = make_loop()
    sequence = loop.add(prompt(4), max_tokens=1, stop_token_ids=[6])
    update_with(loop, 6)
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", 6)


def test_a_request_that_ignores_the_end_of_sequence_still_obeys_its_own_stop_tokens():
    loop = make_loop()
    sequence = loop.add(prompt(4), ignore_eos=True, stop_token_ids=[6], eos_token_ids=[5])
    update_with(loop, 5)
    assert not sequence.is_finished
    update_with(loop, 6)
    assert sequence.finish_reason == "stop"


def test_update_returns_the_sequences_that_advanced_and_not_those_in_their_prompt():
    loop = make_loop(max_num_batched_tokens=12)
    short = loop.add(prompt(4))
    loop.add(prompt(30, 1))
    assert update_with(loop, 3) == [short]


def test_an_update_out_of_order_is_refused_and_changes_nothing():
    loop = make_loop()
    sequence = loop.add(prompt(4))
    first, second = loop.scheduler.schedule(), loop.scheduler.schedule()
    with pytest.raises(RuntimeError, match="not the oldest in flight"):
        loop.scheduler.update(second, [3])
    loop.scheduler.update(first, [3])
    with pytest.raises(RuntimeError, match="not the oldest in flight"):
        loop.scheduler.update(first, [3])
    loop.scheduler.update(second, [4])
    assert sequence.output_token_ids == [3, 4]


# -------------------------------------------------------------------------------------------------------- aborts


def states_to_abort_in() -> dict[str, tuple[int, int]]:
    """Name -> (calls of launch, calls of read) before the abort of a request of 20 tokens in steps of 8."""
    return {
        "waiting": (0, 0),
        "first chunk in flight": (1, 0),
        "in the middle of its prompt": (1, 1),
        "last chunk in flight": (3, 2),
        "decoding": (4, 4),
        "decode in flight": (4, 3),
        "two in flight": (4, 2),
    }


@pytest.mark.parametrize("state", states_to_abort_in())
def test_an_abort_frees_everything_at_once(state: str):
    num_launches, num_reads = states_to_abort_in()[state]
    loop = make_loop(max_num_batched_tokens=11)
    sequence = loop.add(prompt(20), max_tokens=9)
    for number in range(num_launches):
        loop.launch()
        if number < num_reads:
            loop.read()
    output = sequence.output_token_ids
    loop.abort(sequence)
    assert sequence.finish_reason == "abort"
    assert loop.manager.num_free_blocks == loop.manager.num_blocks - 1
    assert not loop.scheduler.has_unfinished
    assert loop.launch() is None
    while loop.in_flight:
        assert loop.read() == []
    assert sequence.output_token_ids == output


def test_an_abort_of_a_preempted_request_leaves_the_queue():
    loop = two_that_outgrow_the_pool()
    run_until_preemption(loop)
    loop.abort(loop.sequences[1])
    assert waiting(loop) == []
    loop.drain()
    loop.check_outputs()


def test_blocks_of_an_aborted_request_serve_others_while_its_step_is_still_in_flight():
    loop = make_loop()
    aborted = loop.add(prompt(20))
    loop.launch()
    loop.abort(aborted)
    loop.add(prompt(20), max_tokens=3)
    assert chunks(loop.launch()) == {"1": (16, 20)}
    loop.drain(depth=2)
    loop.check_outputs()


# ------------------------------------------------------------------------------------------ results one step late


def test_a_step_can_be_scheduled_before_the_one_before_it_is_read():
    loop = make_loop()
    sequence = loop.add(prompt(6), max_tokens=4)
    assert chunks(loop.launch()) == {"0": (0, 6)}
    assert chunks(loop.launch()) == {"0": (6, 7)}
    assert sequence.num_output_tokens == 0
    loop.read()
    assert sequence.num_output_tokens == 1
    assert chunks(loop.launch()) == {"0": (7, 8)}
    loop.drain(depth=2)
    loop.check_outputs()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_same_tokens_come_out_however_late_they_are_read(depth: int):
    loop = make_loop(max_num_batched_tokens=12, max_num_seqs=6, num_kv_blocks=1 + 16)
    for number in range(12):
        loop.add(prompt(3 + 4 * number, number % 3), max_tokens=10, stop_token_ids=[number % 8])
    loop.drain(depth)
    loop.check_outputs()


def test_no_step_is_launched_for_a_token_beyond_the_last():
    loop = make_loop()
    loop.add(prompt(6), max_tokens=2)
    assert loop.launch() is not None
    assert loop.launch() is not None
    assert loop.launch() is None
    loop.drain()
    loop.check_outputs()


def test_the_step_launched_behind_a_stop_token_is_dropped():
    loop = make_loop()
    sequence = loop.add(prompt(6), stop_token_ids=range(8))
    loop.launch()
    loop.launch()
    assert loop.read() == [sequence]
    assert sequence.is_finished
    assert loop.read() == []
    assert sequence.num_output_tokens == 1
    loop.check_outputs()


def test_a_block_that_ends_with_a_token_in_flight_is_found_once_that_token_is_read():
    loop = make_loop()
    sequence = loop.add(prompt(7), max_tokens=9)
    loop.launch()
    loop.launch()  # computes position 7, whose token nobody has read
    assert loop.manager.num_findable_blocks == 1
    loop.read()
    assert loop.manager.num_findable_blocks == 2
    loop.add([*sequence.token_ids, 6], max_tokens=2)
    assert chunks(loop.launch())["1"] == (8, 9)
    loop.drain(depth=2)
    loop.check_outputs()


def preempted_with_a_token_in_flight() -> Loop:
    loop = two_that_outgrow_the_pool()
    while not loop.scheduler.stats.num_preemptions:
        if len(loop.in_flight) == 2:
            loop.read()
        loop.launch()
    assert loop.sequences[1].num_in_flight_tokens > 0
    return loop


def test_a_preempted_sequence_keeps_its_token_in_flight_and_does_not_return_before_it_is_read():
    loop = preempted_with_a_token_in_flight()
    victim = loop.sequences[1]
    loop.abort(loop.sequences[0])
    num_known = victim.num_known_tokens
    while victim.num_in_flight_tokens:
        assert loop.launch() is None
        loop.read()
    assert victim.num_tokens == num_known
    assert chunks(loop.launch())["1"][1] == num_known
    loop.drain(depth=2)
    loop.check_outputs()


def test_a_preempted_sequence_whose_token_in_flight_is_its_last_ends_in_the_queue():
    loop = two_that_outgrow_the_pool()
    loop.sequences[1].max_num_tokens = 12
    while not loop.scheduler.stats.num_preemptions:
        if len(loop.in_flight) == 2:
            loop.read()
        loop.launch()
    assert waiting(loop) == ["1"]
    loop.drain(depth=2)
    assert loop.sequences[1].finish_reason == "length"
    loop.check_outputs()


# ------------------------------------------------------------------------------------------------- failed steps


def snapshot(loop: Loop) -> list[tuple[object, ...]]:
    return [
        (
            sequence.status,
            sequence.num_tokens,
            sequence.num_in_flight_tokens,
            sequence.num_computed_tokens,
            tuple(sequence.block_table),
        )
        for sequence in loop.sequences
    ]


def test_a_failed_step_leaves_the_sequences_as_they_were_before_it():
    loop = make_loop(max_num_batched_tokens=16)
    loop.add(prompt(3))
    loop.add(prompt(40, 1))
    loop.step()
    loop.add(prompt(3, 2))
    before, findable = snapshot(loop), loop.manager.num_findable_blocks
    assert list(chunks(loop.launch())) == ["0", "1", "2"]
    loop.fail()
    assert snapshot(loop) == before
    assert loop.manager.num_findable_blocks == findable
    loop.drain()
    loop.check_outputs()


def test_a_failed_step_names_its_requests():
    loop = make_loop()
    for number in range(3):
        loop.add(prompt(5, number))
    loop.step()
    loop.launch()
    assert {sequence.request_id for sequence in loop.fail()} == {"0", "1", "2"}


def test_a_failed_step_does_not_name_requests_that_ended_meanwhile():
    loop = make_loop()
    loop.add(prompt(5))
    aborted = loop.add(prompt(5, 1))
    loop.launch()
    loop.abort(aborted)
    assert [sequence.request_id for sequence in loop.fail()] == ["0"]


def test_what_a_failed_step_would_have_computed_is_not_found():
    loop = make_loop()
    loop.add(prompt(20))
    loop.add(prompt(20))
    loop.launch()
    loop.fail()
    assert loop.manager.num_findable_blocks == 0
    assert chunks(loop.launch()) == {"0": (0, 20), "1": (16, 20)}


def test_a_failed_step_takes_the_steps_launched_after_it_along():
    loop = make_loop()
    loop.add(prompt(6), max_tokens=6)
    before = snapshot(loop)
    for _ in range(3):
        loop.launch()
    loop.fail(0)
    assert snapshot(loop) == before
    assert loop.scheduler.stats.num_failed_steps == 3
    loop.drain()
    loop.check_outputs()


def test_a_failed_step_leaves_the_steps_launched_before_it_alone():
    loop = make_loop()
    loop.add(prompt(6), max_tokens=6)
    loop.launch()
    after_first = snapshot(loop)
    loop.launch()
    loop.launch()
    loop.fail(1)
    assert snapshot(loop) == after_first
    loop.read()
    loop.drain()
    loop.check_outputs()


@pytest.mark.parametrize("length", range(5, 13))
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_failed_steps_are_undone_wherever_blocks_begin_and_end(length: int, depth: int):
    loop = make_loop()
    loop.add(prompt(length), max_tokens=9)
    loop.step()
    before = snapshot(loop)
    for _ in range(depth):
        loop.launch()
    loop.fail(0)
    assert snapshot(loop) == before
    loop.drain()
    loop.check_outputs()


def test_a_chunk_in_flight_is_undone_although_the_next_one_had_to_be_given_up():
    loop = prefill_between_decodes_that_need_blocks()
    loop.launch()
    loop.fail(0)
    prefill = loop.sequences[4]
    assert (prefill.status, prefill.num_computed_tokens) == (SequenceStatus.WAITING, 0)
    loop.drain(depth=2)
    loop.check_outputs()


def test_a_chunk_that_has_to_be_given_up_returns_the_blocks_that_it_had_found():
    loop = make_loop(
        num_kv_blocks=1 + 10,
        max_model_len=40,
        max_num_batched_tokens=17,
        max_num_seqs=8,
        long_prefill_token_threshold=8,
    )
    for number, priority in enumerate((0, 0, 2, 2)):
        loop.add(prompt(3, number), max_tokens=5, priority=priority)
    loop.step()
    slow, fast = (loop.add(prompt(13, 4), max_tokens=3, priority=1) for _ in range(2))
    assert chunks(loop.launch()) == {"0": (3, 4), "1": (3, 4), "2": (3, 4), "3": (3, 4), "4": (0, 8), "5": (8, 13)}
    before = slow.num_computed_tokens, list(slow.block_table)
    batch = loop.launch()  # slow finds the block that fast fills, but the decodes took the one that it needs behind it
    assert "4" not in chunks(batch)
    assert loop.manager.lookup(slow) == fast.block_table[2:3]
    assert (slow.num_computed_tokens, slow.block_table) == before
    loop.drain(depth=2)
    loop.check_outputs()


def test_a_sequence_preempted_by_a_failed_step_stays_in_the_queue_and_keeps_its_tokens():
    loop = preempted_with_a_token_in_flight()
    loop.fail(len(loop.in_flight) - 1)
    assert waiting(loop) == ["1"]
    loop.drain(depth=2)
    loop.check_outputs()


def test_a_late_registration_is_withdrawn_with_the_step_that_computes_its_block():
    loop = make_loop()
    loop.add(prompt(7), max_tokens=9)
    loop.launch()
    loop.launch()
    loop.read()
    assert loop.manager.num_findable_blocks == 2
    loop.fail()
    assert loop.manager.num_findable_blocks == 1
    loop.drain()
    loop.check_outputs()


def test_undoing_a_step_that_is_not_in_flight_is_refused_and_changes_nothing():
    loop = make_loop()
    loop.add(prompt(6), max_tokens=6)
    first = loop.step()
    loop.launch()
    before = snapshot(loop)
    with pytest.raises(RuntimeError, match="not in flight"):
        loop.scheduler.rollback(first)
    assert snapshot(loop) == before


def test_nothing_is_kept_of_steps_that_were_read():
    loop = make_loop()
    loop.add(prompt(20), max_tokens=9)
    loop.drain(depth=2)
    assert loop.manager._uncommitted == {}


# ------------------------------------------------------------------------------------------- non-finite results


def test_a_non_finite_result_ends_its_request_with_an_error_that_says_so():
    loop = make_loop()
    loop.add(prompt(6))
    spoilt = loop.add(prompt(6, 1))
    assert update_with(loop, 3, NON_FINITE) == loop.sequences
    assert spoilt.finish_reason == "error"
    assert "'1'" in spoilt.error and "not finite" in spoilt.error and "6 tokens" in spoilt.error
    assert spoilt.output_token_ids == []
    assert running(loop) == ["0"]


def test_blocks_of_a_non_finite_request_are_never_found():
    loop = make_loop()
    loop.add(prompt(12), max_tokens=4)
    loop.launch(non_finite={"0"})
    loop.read()
    assert loop.manager.num_findable_blocks == 0
    loop.add([*prompt(12), 5], max_tokens=4)
    assert chunks(loop.step()) == {"1": (0, 13)}
    loop.drain()
    loop.check_outputs()


def test_blocks_of_a_non_finite_request_are_not_found_although_it_was_preempted_before_that_was_known():
    loop = make_loop(num_kv_blocks=1 + 8, max_model_len=32)
    for number in range(2):
        loop.add(prompt(7, number), max_tokens=4)
    loop.step()
    spoilt = loop.add(prompt(12, 2), max_tokens=4)
    loop.launch(non_finite={"2"})
    loop.launch()  # both older ones need a block, and one is free
    assert waiting(loop) == ["2"]
    loop.read()
    assert spoilt.finish_reason == "error"
    loop.drain()
    successor = loop.add([*prompt(12, 2), 5], max_tokens=2)
    loop.drain()
    assert successor.output_token_ids == generate_alone(successor)


def test_blocks_of_a_non_finite_request_are_not_found_although_it_was_aborted_before_that_was_known():
    loop = make_loop()
    spoilt = loop.add(prompt(12), max_tokens=4)
    loop.launch(non_finite={"0"})
    loop.abort(spoilt)
    loop.read()
    assert spoilt.finish_reason == "abort"
    successor = loop.add([*prompt(12), 5], max_tokens=2)
    loop.drain()
    assert successor.output_token_ids == generate_alone(successor)


def test_blocks_that_were_reused_since_are_not_hidden_with_their_last_owner():
    loop = make_loop(num_kv_blocks=1 + 4, max_model_len=16)
    spoilt = loop.add(prompt(12), max_tokens=4)
    loop.launch(non_finite={"0"})
    loop.abort(spoilt)
    loop.add(prompt(13, 1), max_tokens=2)
    loop.launch()
    findable = loop.manager.num_findable_blocks
    loop.read()
    assert loop.manager.num_findable_blocks == findable
    loop.drain()
    loop.check_outputs()


# ---------------------------------------------------------------------------------------------------- statistics


def test_statistics_count_tokens_looked_up_and_found():
    loop = make_loop()
    loop.add(prompt(20), max_tokens=1)
    loop.drain()
    again = loop.add([*prompt(20), 6], max_tokens=1)
    loop.drain()
    stats = loop.scheduler.stats
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (20 + 21, 20)
    assert again.num_cached_tokens == 20
    assert (stats.num_steps, stats.num_scheduled_tokens) == (2, 20 + 1)


def test_a_request_that_comes_back_from_preemption_is_not_counted_again():
    loop = two_that_outgrow_the_pool()
    loop.drain()
    stats = loop.scheduler.stats
    assert stats.num_preemptions > 0
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (10 + 9, 0)
    assert [sequence.num_cached_tokens for sequence in loop.sequences] == [0, 0]


def test_a_request_that_comes_back_from_a_failed_step_is_not_counted_again():
    loop = make_loop()
    loop.add(prompt(20), max_tokens=2)
    loop.launch()
    loop.fail()
    loop.drain()
    assert loop.scheduler.stats.prefix_cache_queries == 20


def test_a_lookup_that_did_not_lead_to_admission_is_not_counted():
    loop = make_loop(num_kv_blocks=1 + 6, max_model_len=24)
    loop.add(prompt(20), max_tokens=4)
    loop.add(prompt(20, 1))
    loop.step()
    loop.step()
    assert waiting(loop) == ["1"]
    assert loop.scheduler.stats.prefix_cache_queries == 20


def test_tokens_found_in_the_middle_of_a_prompt_count_as_cached():
    loop = make_loop(max_num_batched_tokens=12, max_num_seqs=8, max_long_partial_prefills=4)
    for _ in range(3):
        loop.add(prompt(33), max_tokens=1)
    loop.drain()
    assert sum(sequence.num_cached_tokens for sequence in loop.sequences) == 2 * 32
    assert loop.scheduler.stats.prefix_cache_hits == 2 * 32


def test_states_are_what_they_say():
    loop = make_loop()
    sequence = loop.add(prompt(5), max_tokens=1)
    assert sequence.status is SequenceStatus.WAITING
    loop.launch()
    assert sequence.status is SequenceStatus.RUNNING
    loop.read()
    assert sequence.status is SequenceStatus.FINISHED
