"""The scheduler: a failed step is undone with the steps launched after it."""

import pytest

from tests.engine.loops import (
    Loop,
    chunks,
    make_loop,
    preempted_with_a_token_in_flight,
    prefill_between_decodes_that_need_blocks,
    prompt,
    waiting,
)


def snapshot(loop: Loop) -> list[tuple[object, ...]]:
    return [
        (
            (sequence.is_running, sequence.is_finished),
            len(sequence.token_ids),
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


def test_a_step_that_nobody_needs_does_not_count_as_failed():
    loop = make_loop()
    loop.add(prompt(9), max_tokens=2)
    for has_failed in (False, True):
        loop.launch()
        loop.fail(has_failed=has_failed)
        assert loop.scheduler.stats.num_failed_steps == has_failed


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
    assert (prefill.is_running, prefill.is_finished, prefill.num_computed_tokens) == (False, False, 0)
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
