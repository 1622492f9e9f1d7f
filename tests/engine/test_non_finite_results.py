"""The scheduler: logits that are not finite end their request, and its blocks are never found."""

from nanovllm.batch import EMBEDDED, NON_FINITE, NOTHING_LEFT, end_without_token
from tests.engine.blocks import make_sequence
from tests.engine.loops import chunks, generate_alone, make_loop, prompt, running, update_with, waiting


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


def test_a_result_without_a_token_says_why_unless_the_request_knows_it_already():
    sequence = make_sequence([1])
    assert (end_without_token(sequence, EMBEDDED), sequence.error) == ("stop", None)
    sequence.error = "a processor raised"
    assert (end_without_token(sequence, NOTHING_LEFT), sequence.error) == ("error", "a processor raised")
    assert end_without_token(sequence, NON_FINITE) == "error" and "not finite" in sequence.error
