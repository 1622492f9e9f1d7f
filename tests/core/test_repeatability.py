"""Nothing but the request decides its tokens: neighbours, chunks, preemption and order do not."""

import functools

import pytest

from nanovllm import SamplingParams
from tests.support.llms import SAMPLED, assert_idle_and_whole, generate, mixed_requests, open_llm, shared_llm, token_ids
from tests.support.tiny_models import random_prompts


def test_seeded_requests_repeat_across_calls_and_engines():
    prompts = random_prompts(6)
    first = token_ids(generate(shared_llm(), prompts, SAMPLED))
    assert token_ids(generate(shared_llm(), prompts, SAMPLED)) == first
    assert token_ids(generate(open_llm(seed=99), prompts, SAMPLED)) == first


def test_ten_equal_unseeded_prompts_give_ten_samples():
    outputs = generate(shared_llm(), ["Once upon a time"] * 10, SamplingParams(max_tokens=12))
    assert len(set(map(tuple, token_ids(outputs)))) == 10


def test_unseeded_requests_draw_afresh_in_each_call():
    params = SamplingParams(max_tokens=12)
    draws = [token_ids(generate(shared_llm(), "Once upon a time", params))[0] for _ in range(5)]
    assert len(set(map(tuple, draws))) == 5


@functools.cache
def answers_alone(count):
    """Each request by itself, in an engine without a prefix cache."""
    llm = open_llm(enable_prefix_caching=False)
    return [token_ids(generate(llm, p, q))[0] for p, q in zip(*mixed_requests(count), strict=True)]


@pytest.mark.costly
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 32, "max_num_seqs": 16},
        {"max_num_batched_tokens": 64, "max_num_seqs": 3},
        {"block_size": 64},
        {"enable_prefix_caching": False},
        {"max_model_len": 192, "num_kv_blocks": 14},  # room for one sequence of full length and a bit
    ],
    ids=str,
)
def test_a_requests_tokens_do_not_depend_on_its_neighbours_on_chunks_or_on_preemption(options):
    prompts, params = mixed_requests(15)
    llm = open_llm(**options)
    assert token_ids(generate(llm, prompts, params)) == answers_alone(15)
    assert (llm.stats().num_preemptions > 0) == ("num_kv_blocks" in options)
    assert_idle_and_whole(llm)


def test_a_requests_tokens_do_not_depend_on_the_order_of_submission():
    prompts, params = mixed_requests(15)
    outputs = generate(open_llm(), prompts[::-1], params[::-1])
    assert token_ids(outputs)[::-1] == answers_alone(15)
