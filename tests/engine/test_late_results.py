"""The scheduler with overlap: a step is scheduled before the one before it is read."""

import pytest

from tests.engine.loops import (
    chunks,
    make_loop,
    preempted_with_a_token_in_flight,
    prompt,
    two_that_outgrow_the_pool,
    waiting,
)


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


def test_a_block_is_not_found_before_its_last_token_is_computed():
    loop = make_loop()
    first = loop.add(prompt(7), max_tokens=4)
    loop.step()
    known = first.token_ids.tolist()
    loop.abort(first)
    loop.add([*known, 1])
    assert chunks(loop.step()) == {"1": (4, 9)}


def test_a_preempted_sequence_keeps_its_token_in_flight_and_does_not_return_before_it_is_read():
    loop = preempted_with_a_token_in_flight()
    victim = loop.sequences[1]
    loop.abort(loop.sequences[0])
    num_known = victim.num_known_tokens
    while victim.num_in_flight_tokens:
        assert loop.launch() is None
        loop.read()
    assert len(victim.token_ids) == num_known
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
