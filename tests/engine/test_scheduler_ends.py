"""The scheduler: ends by length and stop token, and aborts."""

import pytest

from tests.engine.loops import (
    chunks,
    make_loop,
    prompt,
    run_until_preemption,
    two_that_outgrow_the_pool,
    update_with,
    waiting,
)

# ----------------------------------------------------------------------------------------------------------------- ends


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


# --------------------------------------------------------------------------------------------------------------- aborts


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
    assert not loop.unfinished
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
