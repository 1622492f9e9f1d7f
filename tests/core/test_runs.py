"""Steps in which a sequence draws a run of several tokens: layout, rows, outcome. Batches are built by hand."""

import random

import pytest

from nanovllm.batch import NON_FINITE, NOTHING_LEFT, ScheduledBatch, ScheduledSequence
from nanovllm.layout import build_layout
from tests.support.mock_drafts import GuessingDrafter, with_drafts
from tests.support.public_options import make_sequence
from tests.support.scheduling import Loop, make_scheduler

PROMPT = [5, 6, 7, 8, 9]


def entry(sequence, start, count, num_samples):
    return ScheduledSequence(sequence, start, count, num_samples, [1, 2, 3, 4], start)


def decoding(**params):
    """A sequence whose prompt is computed, with one token drawn; blocks of 4 tokens."""
    scheduler, sequence = make_scheduler(), make_sequence(PROMPT, **params)
    scheduler.add(sequence)
    scheduler.update(scheduler.schedule(), [1])
    return scheduler, sequence


def launch_run(scheduler, *sequences, length=3):
    """A step that computes `length` rows behind what each sequence has, all of which draw."""
    entries = []
    for sequence in sequences:
        start, manager = sequence.num_computed_tokens, scheduler.block_manager
        manager.allocate(sequence, manager.num_blocks_for(start + length) - len(sequence.block_table))
        sequence.num_computed_tokens += length
        sequence.num_known_tokens += length
        entries.append(ScheduledSequence(sequence, start, length, length, sequence.block_table, start))
    batch = ScheduledBatch(100 + scheduler.stats.num_steps, tuple(entries))
    scheduler.in_flight.append(batch)
    return batch


# ----------------------------------------------------------------------------------------------------- batch and layout


def test_a_sequence_is_sampled_as_often_as_it_draws():
    one, run, chunk = (make_sequence(range(20), arrival=arrival) for arrival in range(3))
    batch = ScheduledBatch(0, (entry(one, 4, 1, 1), entry(chunk, 0, 8, 0), entry(run, 6, 5, 3)), num_decodes=1)
    assert batch.sampling == (one, run, run, run) and batch.draws_runs
    assert not ScheduledBatch(0, batch.entries[:2], num_decodes=1).draws_runs


def test_the_sampled_rows_are_the_last_ones_of_their_entries():
    """Rows are sorted: decodes first, the longest of them first; samples keep the order of the batch."""
    chunk, run, short, long = (make_sequence(range(16), arrival=arrival) for arrival in range(4))
    entries = [entry(run, 2, 5, 3), entry(short, 3, 1, 1), entry(chunk, 0, 4, 0), entry(long, 15, 1, 1)]
    layout = build_layout(entries, 4, longest_first=True)
    assert [e.sequence for e in layout.entries] == [long, short, run, chunk]
    assert layout.sample_rows.tolist() == [4, 5, 6, 1, 0]
    assert layout.sampled_positions.tolist() == [5, 6, 7, 4, 16]
    assert layout.positions[layout.sample_rows].tolist() == [4, 5, 6, 3, 15]


def test_an_entry_without_rows_has_the_sampled_row_of_the_entry_before():
    """Samples of one prompt; decodes move in front of them."""
    prompt, sample, last, one, short = (make_sequence(range(16), arrival=arrival) for arrival in range(5))
    entries = [
        entry(one, 9, 1, 1), entry(prompt, 0, 6, 1), entry(sample, 6, 0, 1), entry(last, 6, 0, 1),
        entry(short, 0, 1, 1),
    ]  # fmt: skip
    layout = build_layout(entries, 4, longest_first=True)
    assert [e.sequence for e in layout.entries] == [one, short, prompt]
    assert layout.num_tokens == 8 and layout.num_decodes == 2
    assert layout.sample_rows.tolist() == [0, 7, 7, 7, 1]
    assert layout.sampled_positions.tolist() == [10, 6, 6, 6, 1]


def test_a_step_launched_behind_a_run_goes_on_with_its_last_token():
    run, other = make_sequence(PROMPT), make_sequence(PROMPT, arrival=1)
    in_flight = {sequence: place for place, sequence in enumerate([other, run, run, run])}
    layout = build_layout([entry(other, 5, 1, 1), entry(run, 7, 1, 1)], 4, in_flight)
    assert layout.token_ids.tolist() == [-1 - 0, -1 - 3]


def test_a_row_waits_for_tokens_of_steps_before_and_not_for_those_of_its_own_run():
    scheduler, sequence = decoding()
    sequence.needs_host_tokens = True
    assert not launch_run(scheduler, sequence).draws_late
    assert launch_run(scheduler, sequence).draws_late


# ------------------------------------------------------------------------------------------------------------- outcome


def test_update_appends_a_run_and_returns_its_sequence_once():
    scheduler, sequence = decoding()
    other = make_sequence(PROMPT, arrival=1)
    scheduler.add(other)
    scheduler.update(scheduler.schedule(), [2, 1])
    batch = launch_run(scheduler, sequence, other)
    num_before = scheduler.stats.num_output_tokens
    assert scheduler.update(batch, [3, 4, 5, 2, 3, 4]) == [sequence, other]
    assert sequence.output_token_ids == [1, 2, 3, 4, 5] and other.output_token_ids == [1, 2, 3, 4]
    assert scheduler.stats.num_output_tokens == num_before + 6
    assert sequence.num_in_flight_tokens == other.num_in_flight_tokens == 0


def test_a_block_that_a_run_fills_is_found_and_stays_so():
    scheduler, sequence = decoding()
    batch = launch_run(scheduler, sequence)
    scheduler.update(batch, [2, 3, 4])
    same = make_sequence([*PROMPT, 1, 2, 3, 4], arrival=1)
    assert scheduler.block_manager.lookup(same) == sequence.block_table[:2]
    scheduler.block_manager.withdraw(batch.step_id)  # nothing of a step that was read is undone
    assert scheduler.block_manager.lookup(same) == sequence.block_table[:2]


@pytest.mark.parametrize(
    "params, reason, kept",
    [({"stop_token_ids": [7]}, "stop", [1, 7]), ({"max_tokens": 3}, "length", [1, 7, 8])],
    ids=["stop token", "length"],
)
def test_a_run_ends_with_the_token_that_ends_its_sequence(params, reason, kept):
    scheduler, sequence = decoding(**params)
    assert scheduler.update(launch_run(scheduler, sequence), [7, 8, 9]) == [sequence]
    assert (sequence.finish_reason, sequence.output_token_ids) == (reason, kept)
    assert sequence.num_in_flight_tokens == 0
    assert scheduler.block_manager.num_free_blocks == scheduler.block_manager.num_blocks - 1


def test_a_run_ends_with_a_row_that_is_not_finite():
    scheduler, sequence = decoding(logprobs=0)
    sequence.logprobs.extend([{1: "first"}, {2: "second"}, {4: "behind the end"}])
    assert scheduler.update(launch_run(scheduler, sequence), [2, NON_FINITE, 4]) == [sequence]
    assert (sequence.finish_reason, sequence.output_token_ids) == ("error", [1, 2])
    assert "after 7 tokens are not finite" in sequence.error
    assert sequence.logprobs == [{1: "first"}, {2: "second"}]


def test_a_run_of_an_aborted_sequence_is_dropped_whole():
    scheduler, sequence = decoding()
    batch = launch_run(scheduler, sequence)
    scheduler.finish(sequence, "abort")
    assert scheduler.update(batch, [2, 3, 4]) == []
    assert sequence.output_token_ids == [1] and sequence.num_in_flight_tokens == 0


def test_a_run_that_is_undone_leaves_its_sequence_as_it_was():
    scheduler, sequence = decoding()
    table, num_free = list(sequence.block_table), scheduler.block_manager.num_free_blocks
    assert scheduler.rollback(launch_run(scheduler, sequence)) == [sequence]
    assert (sequence.num_computed_tokens, sequence.num_known_tokens) == (5, 6)
    assert (sequence.block_table, scheduler.block_manager.num_free_blocks) == (table, num_free)


# -------------------------------------------------------------------------------------------------------------- tokens


def drafted_step():
    """A step with right drafts for a sequence of one output token."""
    scheduler = with_drafts(make_scheduler(), GuessingDrafter(random.Random(0), share_right=1.0))
    loop = Loop(scheduler)
    sequence = loop.add(range(6), max_tokens=12)
    loop.step()
    batch = scheduler.schedule()
    assert len(batch.drafted) == 1 and len(batch.sampling) > 2
    return scheduler, sequence, batch


def test_a_row_that_is_not_finite_leaves_no_token_beside_it_and_no_drafts_behind_it():
    scheduler, sequence, batch = drafted_step()
    sequence.logprobs = [{}, {}]  # of the first token, and of a row of this step
    draws = [*sequence.draft, 0]
    draws[1] = NON_FINITE
    scheduler.update(batch, draws)
    assert not sequence.is_running and len(sequence.logprobs) == sequence.num_output_tokens == 1
    assert scheduler.block_manager.num_findable_blocks == 0
    assert [entry.draft for entry in scheduler.schedule().entries] == [()]
    scheduler.update(scheduler.in_flight[0], [0])
    assert not scheduler.schedule().drafted


def test_an_error_of_a_rejected_row_is_none_of_its_request():
    scheduler, sequence, batch = drafted_step()
    sequence.error = "of the second row"
    scheduler.update(batch, [(sequence.draft[0] + 1) % 8, *[NOTHING_LEFT] * len(sequence.draft)])
    assert sequence.is_running and sequence.error is None and sequence.num_output_tokens == 2
