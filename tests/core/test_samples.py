"""Several samples of a request (n): the same tokens under any chunking, preemption and overlap."""

import functools
import itertools
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.errors import StepError
from nanovllm.model_runner import ModelRunner, PendingTokens
from nanovllm.sampling_params import sample_seeds
from tests.support import llms
from tests.support.chi_squared import SIGNIFICANCE, p_value
from tests.support.llms import assert_idle_and_whole, submit
from tests.support.samples import answers, requests
from tests.support.tiny_models import random_prompts, save_tiny, tiny_model

POOLS = {
    "roomy pool": {},
    "small chunks": {"max_num_batched_tokens": 40, "max_num_seqs": 8},
    "tiny pool": {"num_kv_blocks": 17, "max_model_len": 230, "max_num_batched_tokens": 80},
}


def open_llm(model=None, pool="roomy pool", **options):
    return llms.open_llm(model, **(POOLS[pool] | options))


def generate(llm, prompts, params):
    outputs = llms.generate(llm, prompts, params)
    assert_idle_and_whole(llm)
    return outputs


def prompt_of(length):
    return random_prompts(1, low=length, high=length)[0]


def tokens_of(output):
    assert [completion.index for completion in output.outputs] == list(range(len(output.outputs)))
    return [completion.token_ids for completion in output.outputs]


# -------------------------------------------------------------------------------------------------------------- samples


def test_the_first_sample_is_the_one_of_a_request_for_one():
    with open_llm() as llm:
        one, two, four = (
            tokens_of(generate(llm, [[5, 6, 7]], SamplingParams(seed=3, max_tokens=12, n=n))[0]) for n in (1, 2, 4)
        )
    assert (four[:1], four[:2]) == (one, two)
    assert len(set(map(tuple, four))) == 4


def test_asking_for_samples_leaves_the_noise_of_the_requests_behind_alone():
    with open_llm(seed=7) as llm:
        expected = generate(llm, [[5, 6], [7, 8]], SamplingParams(max_tokens=12))
    with open_llm(seed=7) as llm:
        params = [SamplingParams(max_tokens=12, n=5), SamplingParams(max_tokens=12)]
        outputs = generate(llm, [[5, 6], [7, 8]], params)
    assert [tokens_of(output)[0] for output in outputs] == [tokens_of(output)[0] for output in expected]


def test_samples_are_independent_draws_from_the_models_distribution():
    model, prompt, num_requests, n = tiny_model(), [5, 6, 7], 250, 8
    with torch.no_grad():
        probabilities = model(torch.tensor([prompt])).logits[0, -1].softmax(dim=-1)
    with open_llm(model) as llm:
        params = [SamplingParams(seed=seed, max_tokens=1, n=n) for seed in range(num_requests)]
        outputs = generate(llm, [prompt] * num_requests, params)
    tokens = torch.tensor([tokens_of(output) for output in outputs])[..., 0]  # [num_requests, n]
    likely = probabilities.topk(6).indices
    groups = torch.cat([probabilities[likely], 1 - probabilities[likely].sum(dim=0, keepdim=True)])
    first_is = tokens[:, 0] == likely[0]
    assert p_value(group_counts(tokens, likely), groups) > SIGNIFICANCE
    for chosen in (tokens[first_is, 1:], tokens[~first_is, 1:]):  # whatever the first sample is
        assert p_value(group_counts(chosen, likely), groups) > SIGNIFICANCE


def group_counts(tokens, likely):
    counts = torch.stack([(tokens == token_id).sum() for token_id in likely])
    return torch.cat([counts, tokens.numel() - counts.sum(dim=0, keepdim=True)])


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("length", [1, 96, 97, 100])
def test_the_prompt_is_computed_once_with_its_begun_block(length, enable_prefix_caching):
    prompt = prompt_of(length)
    with open_llm(enable_prefix_caching=enable_prefix_caching) as llm:
        (output,) = generate(llm, [prompt], SamplingParams(n=5, max_tokens=4, ignore_eos=True))
        assert llm.stats().num_scheduled_tokens == length + 5 * 3
        assert llm.stats().num_steps == 4
    assert output.num_cached_tokens == 0  # what it shares with itself was not there before


def test_samples_in_small_chunks_share_the_prompt_too():
    with open_llm(pool="small chunks", num_kv_blocks=80) as llm:
        generate(llm, random_prompts(3, low=90, high=90), SamplingParams(n=2, max_tokens=4, ignore_eos=True))
        assert llm.stats().num_scheduled_tokens == 3 * (90 + 2 * 3)


@functools.cache
def each_alone(length, n):
    """The samples of a prompt, each as a request for one with its seed."""
    prompt, found = prompt_of(length), []
    with open_llm(overlap=False, enable_prefix_caching=False) as llm:
        for seed in sample_seeds(length, n, engine_seed=0, request_number=0):
            found += tokens_of(generate(llm, [prompt], SamplingParams(seed=seed, max_tokens=40, ignore_eos=True))[0])
    return found


@pytest.mark.full
@pytest.mark.parametrize("options", [
    {}, {"overlap": False}, {"enable_prefix_caching": False}, {"speculation": "suffix"},
    {"max_num_batched_tokens": 40, "max_num_seqs": 5}, {"num_kv_blocks": 12, "max_model_len": 150},
    {"num_kv_blocks": 12, "max_model_len": 150, "enable_prefix_caching": False, "overlap": False},
    {"prefix_cache_host_bytes": 2**24, "num_kv_blocks": 12, "max_model_len": 150},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("n", [2, 4])
def test_each_sample_is_the_request_with_its_seed_alone(n, options):
    lengths = (1, 16, 33, 47, 100)
    prompts = [prompt_of(length) for length in lengths]
    params = [SamplingParams(seed=length, n=n, max_tokens=40, ignore_eos=True) for length in lengths]
    with open_llm(**options) as llm:
        outputs = generate(llm, prompts, params)
        assert (llm.stats().num_preemptions > 0) == ("num_kv_blocks" in options)
        assert llm._engine.scheduler.stats.num_failed_steps == 0
    assert [tokens_of(output) for output in outputs] == [each_alone(length, n) for length in lengths]


@pytest.mark.full
def test_ranks_draw_the_samples_of_one_process(tmp_path):
    folder, prompt = save_tiny(tmp_path, "llama"), prompt_of(47)
    found = []
    for num_ranks in (1, 2):
        with open_llm(folder, tensor_parallel_size=num_ranks) as llm:
            params = SamplingParams(seed=1, n=4, max_tokens=12, ignore_eos=True, logprobs=1)
            found.append(tokens_of(generate(llm, [prompt], params)[0]))
            assert llm.stats().num_scheduled_tokens == 47 + 4 * 11
    assert found[0] == found[1]


def fails_once(call, number):
    """The function, whose call of this number fails."""
    count = itertools.count()

    def counted(*arguments):
        if next(count) == number:
            raise RuntimeError("once")
        return call(*arguments)

    return counted


@pytest.mark.full
@pytest.mark.parametrize("fails", ["launch", "read"])
def test_a_failed_step_of_forks_changes_no_sample(fails, monkeypatch):
    """The step that computes the prompt fails, or the one that copies its begun block, or one of those behind."""
    prompt = prompt_of(47)
    failing = {"launch": (ModelRunner, "launch"), "read": (PendingTokens, "result")}
    for number in range(4):
        with open_llm() as llm:
            with monkeypatch.context() as patch:
                patch.setattr(*failing[fails], fails_once(getattr(*failing[fails]), number))
                engine, params = llm._engine, SamplingParams(seed=47, n=4, max_tokens=40, ignore_eos=True)
                submit(engine, "r", prompt, params)
                while engine.has_unfinished:
                    with suppress(StepError):
                        engine.step()
                output = engine.outputs.pop()
            assert llm.stats().num_failed_steps > 0
            assert_idle_and_whole(llm)
        assert tokens_of(output) == each_alone(47, 4)


def test_more_samples_than_run_at_once_wait_their_turn():
    found = []
    for options in ({}, {"max_num_seqs": 3}):
        with open_llm(**options) as llm:
            found += generate(llm, [[5, 6, 7]], SamplingParams(n=10, seed=1, max_tokens=9))
    assert tokens_of(found[0]) == tokens_of(found[1])
    assert len(tokens_of(found[0])) == 10


@pytest.mark.parametrize("overlap", [False, True])
def test_each_sample_ends_in_its_own_way_and_the_request_with_the_last(overlap):
    with open_llm(overlap=overlap) as llm:
        params = SamplingParams(n=4, seed=1, max_tokens=30)
        (free,) = generate(llm, [[5, 6, 7]], params)
        stop_token = tokens_of(free)[1][3]
        stop = next(c for c in free.outputs[2].text[8:] if c.isalpha())
        (ended,) = generate(llm, [[5, 6, 7]], replace(params, stop_token_ids=[stop_token], stop=[stop]))
    assert {completion.finish_reason for completion in ended.outputs} <= {"stop", "length"}
    assert len({len(tokens) for tokens in tokens_of(ended)}) > 1
    for before, after in zip(free.outputs, ended.outputs, strict=True):
        assert after.token_ids == before.token_ids[: len(after.token_ids)]
        if after.finish_reason == "length":
            assert len(after.token_ids) == 30
        elif after.stop_reason == stop_token:
            assert after.token_ids[-1] == stop_token
            assert stop_token not in after.token_ids[:-1]
        else:
            assert after.stop_reason == stop
            assert before.text.startswith(after.text + stop)
            assert stop not in after.text
    assert ended.finished
    assert ended.metrics.finished_time >= ended.metrics.first_token_time


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stream_shows_all_samples_after_each_step(overlap):
    params = SamplingParams(n=3, seed=1, max_tokens=8, stop=["e"])
    with open_llm(overlap=overlap) as llm:
        (whole,) = generate(llm, [[5, 6, 7]], params)
        seen = list(llm.stream([5, 6, 7], params))
        assert_idle_and_whole(llm)
    assert tokens_of(seen[-1]) == tokens_of(whole)
    assert [output.finished for output in seen] == [False] * (len(seen) - 1) + [True]
    for earlier, later in pairwise(seen):
        for before, after in zip(earlier.outputs, later.outputs, strict=True):
            assert after.token_ids[: len(before.token_ids)] == before.token_ids
            assert after.text.startswith(before.text)


def test_a_sample_that_fails_leaves_its_siblings_alone():
    def fails_for_some(token_ids, row):
        if len(token_ids) == 5 and token_ids[3] % 2:
            raise RuntimeError("odd")
        return row

    params = SamplingParams(n=8, seed=1, max_tokens=6)
    with open_llm() as llm:
        (free,) = generate(llm, [[5, 6, 7]], params)
        (some,) = generate(llm, [[5, 6, 7]], replace(params, logits_processors=fails_for_some))
    is_odd = [tokens[0] % 2 == 1 for tokens in tokens_of(free)]
    assert True in is_odd and False in is_odd
    assert [completion.finish_reason == "error" for completion in some.outputs] == is_odd
    assert "RuntimeError: odd" in some.error
    for odd, before, after in zip(is_odd, tokens_of(free), tokens_of(some), strict=True):
        assert after == (before[:2] if odd else before)


@pytest.mark.parametrize("value, error", [(0, ValueError), (1025, ValueError), (1.0, TypeError), (True, TypeError)])
def test_what_is_no_number_of_samples_is_refused(value, error):
    with pytest.raises(error, match=r"n (is|must be)"):
        SamplingParams(n=value)


# ------------------------------------------------------------------------------------------------ the same in every way


@functools.cache
def alone():
    """Every request with a cold engine for itself, without chunks, overlap or neighbours."""
    found = []
    for prompt, params in zip(*requests(), strict=True):
        with open_llm(overlap=False, max_num_batched_tokens=512) as llm:
            found += answers(generate(llm, [prompt], params))
    return found


@pytest.mark.costly
@pytest.mark.parametrize(
    "pool, overlap",
    [*((pool, True) for pool in POOLS), ("tiny pool", False)],
    ids=[*(f"{pool}-overlap" for pool in POOLS), "tiny pool-one by one"],
)
def test_a_seeded_request_draws_the_same_in_every_way_of_stepping(pool, overlap):
    prompts, params = requests()
    with open_llm(pool=pool, overlap=overlap) as llm:
        assert answers(generate(llm, prompts, params)) == alone(), "in a crowd"
        assert (llm.stats().num_preemptions > 0) == (pool == "tiny pool")
        assert answers(generate(llm, prompts, params)) == alone(), "with a warm cache"
        for number in (0, 4, 7):
            *_, last = llm.stream(prompts[number], params[number])
            assert answers([last]) == [alone()[number]], "as a stream"
