"""A request that ran in another engine goes on in this one: same tokens, same text, no gap and no repeat."""

import re
from contextlib import closing
from dataclasses import replace
from itertools import islice

import pytest

from nanovllm import SamplingParams, StructuredOutput
from nanovllm.features.resume.resumption import Resumed, ResumedSample
from nanovllm.outputs import OutputKind, RequestMetrics
from tests.support import structured
from tests.support.llms import generate, greedy, open_llm
from tests.support.logprobs import assert_same_reports
from tests.support.tiny_models import random_prompts

PROMPT = random_prompts(1, low=40, high=40, seed=3)[0]
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=20),
    "sampled": SamplingParams(seed=5, max_tokens=20, top_p=0.9),
    "penalties": SamplingParams(seed=5, max_tokens=20, frequency_penalty=0.7, repetition_penalty=1.2),
    "stop": SamplingParams(seed=5, max_tokens=40, stop=["o", "e"], min_tokens=6),
    "logprobs": SamplingParams(seed=5, max_tokens=20, logprobs=2, prompt_logprobs=1),
    "samples": SamplingParams(seed=7, max_tokens=20, n=3, stop=["th", "o"], min_tokens=3),
}


def run(llm, params, kind, resumed=None):
    """Every output of a request, as an engine delivers them."""
    engine = llm._engine
    new = engine.input_processor.process_one("0", PROMPT, params, output_kind=kind)
    engine.add(replace(new, resumed=resumed))
    outputs = []
    while engine.requests:
        engine.step()
        outputs += engine.outputs
        engine.outputs.clear()
    return outputs


def so_far(outputs, metrics):
    """A request after these deltas, to be resumed."""
    first = outputs[0]
    for output in outputs[1:]:
        first.extend(output)
    samples = [ResumedSample(c.token_ids, c.logprobs, c.finish_reason, c.stop_reason) for c in first.outputs]
    return Resumed(samples, metrics, first.prompt_logprobs), first


def rows(output):
    return [(c.index, c.text, c.token_ids, c.finish_reason, c.stop_reason) for c in output.outputs]


@pytest.fixture(scope="module")
def llms():
    with open_llm() as one, open_llm() as other:
        yield one, other


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("num_outputs", [1, 5])
def test_a_stream_goes_on_in_another_engine_without_gap_or_repeat(llms, name, num_outputs):
    one, other = llms
    whole = run(one, PARAMS[name], OutputKind.DELTA)
    assert len(whole) > num_outputs + 1
    resumed, shown = so_far(run(one, PARAMS[name], OutputKind.DELTA)[:num_outputs], whole[num_outputs - 1].metrics)
    for output in run(other, PARAMS[name], OutputKind.DELTA, resumed):
        shown.extend(output)
    expected = so_far(whole, whole[-1].metrics)[1]
    assert rows(shown) == rows(expected)
    assert_same_reports(shown.prompt_logprobs, expected.prompt_logprobs)
    for left, right in zip(shown.outputs, expected.outputs, strict=True):
        assert_same_reports(left.logprobs, right.logprobs)


@pytest.mark.parametrize("name", PARAMS)
def test_a_final_output_has_what_came_before(llms, name):
    one, other = llms
    deltas = run(one, PARAMS[name], OutputKind.DELTA)
    resumed, _ = so_far(deltas[:4], deltas[3].metrics)
    (expected,) = run(one, PARAMS[name], OutputKind.FINAL)
    (output,) = run(other, PARAMS[name], OutputKind.FINAL, resumed)
    assert name != "samples" or resumed.samples[0].finish_reason == "stop"  # the text ends before its stop string
    assert rows(output) == rows(expected)
    assert len(output.prompt_logprobs or ()) == len(expected.prompt_logprobs or ())


def test_metrics_go_on_too(llms):
    one, other = llms
    before = run(one, PARAMS["greedy"], OutputKind.DELTA)[2].metrics
    ids = [1, 2, 3]
    resumed = Resumed([ResumedSample(ids)], replace(before, max_itl=7.0, num_cached_tokens=16, num_preemptions=1))
    (output,) = run(other, PARAMS["greedy"], OutputKind.FINAL, resumed)
    after = output.metrics
    assert output.outputs[0].token_ids[:3] == ids and after.num_output_tokens == 20
    assert (after.scheduled_time, after.first_token_time) == (before.scheduled_time, before.first_token_time)
    assert (after.max_itl, after.num_cached_tokens, after.num_preemptions) == (7.0, 16, 1)
    assert after.mean_itl == (after.last_token_time - before.first_token_time) / 19


def test_what_had_not_begun_begins_anew(llms):
    one, other = llms
    resumed = Resumed([ResumedSample([])], RequestMetrics(arrival_time=0.0))
    (output,) = run(other, PARAMS["logprobs"], OutputKind.FINAL, replace(resumed, samples=[ResumedSample([], [])]))
    (expected,) = run(one, PARAMS["logprobs"], OutputKind.FINAL)
    assert rows(output) == rows(expected) and len(output.prompt_logprobs) == len(PROMPT)


def test_log_probabilities_of_the_output_are_left_out_of_a_request_that_asks_for_none(llms):
    llm, _ = llms
    (cut,) = generate(llm, PROMPT, replace(PARAMS["logprobs"], max_tokens=4))
    *_, last = llm.resume(cut, greedy(1))
    assert len(cut.outputs[0].logprobs) == 4 and last.outputs[0].logprobs is None


@pytest.mark.costly
@pytest.mark.parametrize("name", ["greedy", "sampled", "penalties"])
@pytest.mark.parametrize("end", ["length", "abort"])
def test_an_output_that_was_cut_goes_on_as_if_it_had_not_been(llms, name, end):
    llm, _ = llms
    params = replace(PARAMS[name], max_tokens=100)
    (whole,) = generate(llm, PROMPT, params)
    if end == "length":
        (cut,) = generate(llm, PROMPT, replace(params, max_tokens=41))
    else:
        with closing(llm.stream(PROMPT, params)) as stream:
            cut = list(islice(stream, 41))[-1]
    outputs = list(llm.resume(cut, replace(params, max_tokens=59)))
    assert rows(outputs[-1]) == rows(whole)
    assert len(outputs[0].outputs[0].token_ids) == 42 and outputs[0].outputs[0].text.startswith(cut.outputs[0].text)


def test_what_was_computed_before_a_cut_comes_from_the_prefix_cache():
    steps = []
    with open_llm(on_step=steps.append) as llm:
        (cut,) = generate(llm, PROMPT, greedy(41))
        steps.clear()
        list(llm.resume(cut, greedy(1)))
        # 40 + 41 tokens: five full blocks of 16 are found, and the newest token's K and V were never computed.
        assert [step.num_prefill_tokens + step.num_decode_tokens for step in steps] == [1]


def test_a_structured_answer_that_was_cut_ends_in_its_form():
    params = SamplingParams(seed=3, max_tokens=60, structured_output=StructuredOutput(regex="[a-c]{30}"))
    with structured.open_llm() as llm:
        (cut,) = generate(llm, PROMPT, replace(params, max_tokens=8))
        *_, last = llm.resume(cut, params)
    assert re.fullmatch("[a-c]{30}", last.outputs[0].text) and last.outputs[0].finish_reason == "stop"


def test_what_cannot_go_on_is_refused_with_the_reason(llms):
    llm, _ = llms
    (ended,) = generate(llm, PROMPT, replace(PARAMS["stop"], min_tokens=0, max_tokens=400))
    (full,) = generate(llm, PROMPT, SamplingParams(temperature=0.0, ignore_eos=True))
    (several,) = generate(llm, PROMPT, PARAMS["samples"])
    (cut,) = generate(llm, PROMPT, PARAMS["greedy"])
    for output, params, words in (
        (ended, None, "finish_reason is 'stop'"),
        (full, None, r"512 tokens and fill max_model_len \(512\)"),
        (several, None, "3 samples"),
        (cut, SamplingParams(logprobs=2), "logprobs is 2"),
    ):
        with pytest.raises(ValueError, match=words):
            llm.resume(output, params)
