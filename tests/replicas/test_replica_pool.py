"""Two replicas are used like one engine, and answer like it."""

import itertools
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from nanovllm import LLM, QueueFullError, SamplingParams
from tests.support.llms import comes_true, generate, greedy
from tests.support.replicas import (
    ENDLESS,
    OPTIONS,
    STEPS,
    assert_as_one_engine,
    completions,
    one_engine,
    shared_pool,
    tiny_folder,
)
from tests.support.samples import requests
from tests.support.tiny_models import random_prompts

pytestmark = pytest.mark.usefixtures("programs_are_forked")


@pytest.fixture
def llm():
    return shared_pool()


def mixed():
    """Requests with every kind of option, but functions."""
    prompts, params = requests()
    kept = [number for number, one in enumerate(params) if not one.logits_processors]
    return [prompts[number] for number in kept], [params[number] for number in kept]


def test_greedy_tokens_are_those_of_transformers(llm):
    prompts = random_prompts(6, seed=1)
    outputs = generate(llm, prompts, greedy(12))
    model = AutoModelForCausalLM.from_pretrained(tiny_folder(), dtype=torch.float32).eval()
    for prompt, output in zip(prompts, outputs, strict=True):
        whole = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
        assert output.outputs[0].token_ids == whole[0, len(prompt) :].tolist()


def test_mixed_requests_get_what_one_engine_gives(llm):
    prompts, params = mixed()
    outputs, expected = generate(llm, prompts, params), generate(one_engine(), prompts, params)
    assert completions(outputs) == completions(expected)
    for output, other in zip(outputs, expected, strict=True):
        assert output.prompt_token_ids == other.prompt_token_ids
        assert len(output.prompt_logprobs or ()) == len(other.prompt_logprobs or ())
        for mine, theirs in zip(output.outputs, other.outputs, strict=True):
            assert (mine.logprobs is None) == (theirs.logprobs is None)
            for left, right in zip(mine.logprobs or (), theirs.logprobs or (), strict=True):
                assert [(key, value.rank) for key, value in left.items()] == [(k, v.rank) for k, v in right.items()]
                assert logprobs_of(left) == pytest.approx(logprobs_of(right), abs=1e-4)


def logprobs_of(report):
    return {token_id: value.logprob for token_id, value in report.items()}


def is_free(llm):
    """Whether no replica has anything left of a request."""
    llm._engine.step()
    stats = llm.stats()
    return (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)


def test_both_replicas_work(llm):
    generate(llm, random_prompts(8, seed=5), SamplingParams(seed=1, max_tokens=200))
    streams = [llm.stream(prompt, ENDLESS) for prompt in random_prompts(4, seed=6)]
    for stream in streams:
        next(stream)
    numbers = [replica.num_running for replica in llm.replicas()]
    assert sum(numbers) == 4 and all(numbers)
    for stream in streams:
        stream.close()
    assert [replica.num_running for replica in llm.replicas()] == [0, 0]


def test_a_prompt_goes_where_its_prefix_is_cached(llm):
    shared = random_prompts(1, low=96, high=96, seed=8)[0]
    generate(llm, shared, greedy(4))
    hits = [generate(llm, shared + tail, greedy(4))[0].num_cached_tokens for tail in random_prompts(4, seed=9)]
    assert hits == [96] * 4
    llm.reset_prefix_cache()
    assert generate(llm, [*shared, 1], greedy(4))[0].num_cached_tokens == 0


def test_reports_of_a_prompts_end_cross_and_its_beginning_is_found_in_the_cache(llm):
    prompt = random_prompts(1, low=96, high=96, seed=12)[0]
    params = greedy(4, prompt_logprobs=1, prompt_logprobs_start=90)
    (expected,) = generate(one_engine(), prompt, params)
    cold, warm = (generate(llm, prompt, params)[0] for _ in range(2))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 80)
    for output in (cold, warm):
        assert output.prompt_logprobs[:90] == [None] * 90
        for told, own in zip(output.prompt_logprobs[90:], expected.prompt_logprobs[90:], strict=True):
            assert logprobs_of(told) == pytest.approx(logprobs_of(own), abs=1e-4)


def test_a_closed_stream_frees_its_blocks_in_its_replica(llm):
    stream = llm.stream(random_prompts(1, seed=10)[0], ENDLESS)
    for _ in range(5):
        next(stream)
    stream.close()
    comes_true(partial(is_free, llm))


def test_calls_of_several_threads_run_together(llm):
    prompts, params = random_prompts(6, seed=12), SamplingParams(seed=4, max_tokens=30)
    with ThreadPoolExecutor(6) as threads:
        outputs = list(threads.map(lambda prompt: generate(llm, prompt, params)[0], prompts))
    assert completions(outputs) == completions(generate(one_engine(), prompts, params))


def test_the_queue_has_the_places_of_both(llm):
    places = 2 * llm.config.max_num_seqs + 64
    with pytest.raises(QueueFullError, match=rf"2 x max_num_seqs \({places - 64}\) to run and max_queue \(64\)"):
        generate(llm, [[1, 2]] * (places + 1), ENDLESS)
    assert llm.stats().num_running == llm.stats().num_waiting == 0


def test_counters_add_up(llm):
    comes_true(partial(is_free, llm))  # a replica counts what it drew of an aborted request
    before = llm.stats()
    generate(llm, random_prompts(6, seed=13), SamplingParams(seed=4, max_tokens=7, ignore_eos=True))
    after = llm.stats()
    assert after.num_output_tokens - before.num_output_tokens == 42
    assert after.num_blocks == 2 * 128


@pytest.mark.usefixtures("sigint_is_heeded")
def test_ctrl_c_ends_a_call_and_the_next_one_works(llm):
    prompts = random_prompts(4, seed=15)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        generate(llm, prompts, ENDLESS)
    assert [replica.state for replica in llm.replicas()] == ["up", "up"]
    assert_as_one_engine(llm, prompts, greedy(8))


def test_unseeded_requests_draw_what_one_engine_draws(llm, monkeypatch):
    """Their seeds are given by the front, in the order in which they come."""
    prompts, params = random_prompts(4, seed=2), [SamplingParams(max_tokens=10, n=n) for n in (1, 2, 1, 3)]
    monkeypatch.setattr(llm._engine, "_numbers", itertools.count())
    got = completions(generate(llm, prompts, params))
    with LLM(tiny_folder(), **OPTIONS) as one:
        assert got == completions(generate(one, prompts, params))


def test_on_step_sees_the_steps_of_all_replicas_in_the_thread_of_the_call(llm):
    generate(llm, random_prompts(4, seed=15), SamplingParams(max_tokens=1))
    del STEPS[:]
    generate(llm, random_prompts(4, seed=14), SamplingParams(seed=4, max_tokens=9, ignore_eos=True))
    # A replica's last step may be seen by the next call: of this one, or of the one before.
    assert 4 * 9 - 8 <= sum(record.num_sequences for _, record in STEPS) <= 4 * 9 + 8
    assert {thread for thread, _ in STEPS} == {threading.get_ident()}
    ids = [record.step_id for _, record in STEPS]
    assert ids == list(range(ids[0], ids[0] + len(ids)))


def test_a_salt_that_cannot_be_sent_is_refused_and_nothing_is_kept(llm):
    params = SamplingParams(seed=1, max_tokens=2, ignore_eos=True)
    with pytest.raises(ValueError, match="cache_salt holds half of a surrogate pair"):
        generate(llm, [[1, 2, 3]], params, cache_salt="\ud800")
    assert not llm._engine.requests and llm._engine.stats().num_running == 0
    assert len(generate(llm, [[1, 2, 3]], params)[0].outputs[0].token_ids) == 2
