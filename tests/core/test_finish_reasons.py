"""Ends of requests: what is no end, and outputs that stay as they were given."""

from nanovllm import SamplingParams
from tests.support.llms import GREEDY, generate, greedy, open_llm, script, shared_llm, token_ids
from tests.support.tiny_models import VOCAB_SIZE, tiny_model


def stopped(monkeypatch, text, **params):
    """The output of a model that says `text`, under stop strings."""
    llm = shared_llm()
    says = script(monkeypatch, llm, text)
    (output,) = generate(llm, "ask", SamplingParams(**({"max_tokens": len(says)} | params)))
    return output.outputs[0]


def test_a_stop_string_in_the_prompt_does_not_end_the_request(monkeypatch):
    assert stopped(monkeypatch, "fine", stop="ask").finish_reason == "length"


def test_a_stop_string_passed_over_by_min_tokens_stays_passed_over_whatever_the_others_are(monkeypatch):
    """A longer one among them must not make the search begin before the text that is new."""
    alone = stopped(monkeypatch, "zq and on and on and on", stop="zq", min_tokens=8)
    beside = stopped(monkeypatch, "zq and on and on and on", stop=["zq", "something much longer"], min_tokens=8)
    assert (alone.token_ids, alone.finish_reason) == (beside.token_ids, beside.finish_reason)


def test_an_output_of_a_stream_does_not_change_after_it_was_given():
    first, *_, last = shared_llm().stream([5] * 40, GREEDY)
    assert first.metrics.finished_time is None
    assert last.metrics.finished_time is not None
    assert len(first.outputs[0].token_ids) == 1


def test_an_end_of_sequence_token_outside_the_vocabulary_is_never_looked_for():
    model = tiny_model()
    model.generation_config.eos_token_id = [VOCAB_SIZE + 7, VOCAB_SIZE]
    params = greedy(4, min_tokens=4)  # suppresses them until then
    assert len(token_ids(generate(open_llm(model), [5, 6, 7], params))[0]) == 4
