"""A request that ran in another engine goes on in this one: same tokens, same text, no gap and no repeat."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nanovllm import SamplingParams
from nanovllm.core.outputs import OutputKind, RequestMetrics
from nanovllm.core.sequence import Resumed, ResumedSample
from tests.support.llms import open_llm
from tests.support.tiny_models import random_prompts

PROMPT = random_prompts(1, low=40, high=40, seed=3)[0]
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=20),
    "sampled": SamplingParams(seed=5, max_tokens=20, top_p=0.9),
    "penalties": SamplingParams(seed=5, max_tokens=20, frequency_penalty=0.7, repetition_penalty=1.2),
    "stop": SamplingParams(seed=5, max_tokens=40, stop=["o", "e"], min_tokens=6),
    "logprobs": SamplingParams(seed=5, max_tokens=20, logprobs=2, prompt_logprobs=1),
    "samples": SamplingParams(seed=5, max_tokens=20, n=3, stop=["th", "o"], min_tokens=3),
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


def assert_logprobs_close(left, right):
    assert (left is None) == (right is None)
    for one, other in zip(left or (), right or (), strict=True):
        assert (one and one.keys()) == (other and other.keys())
        for token_id, logprob in (one or {}).items():
            assert logprob.logprob == pytest.approx(other[token_id].logprob, abs=1e-4)


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
    assert_logprobs_close(shown.prompt_logprobs, expected.prompt_logprobs)
    for left, right in zip(shown.outputs, expected.outputs, strict=True):
        assert_logprobs_close(left.logprobs, right.logprobs)


@pytest.mark.parametrize("name", PARAMS)
def test_a_final_output_has_what_came_before(llms, name):
    one, other = llms
    deltas = run(one, PARAMS[name], OutputKind.DELTA)
    resumed, _ = so_far(deltas[:4], deltas[3].metrics)
    (expected,) = run(one, PARAMS[name], OutputKind.FINAL)
    (output,) = run(other, PARAMS[name], OutputKind.FINAL, resumed)
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
