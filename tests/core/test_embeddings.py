"""`embed`: the hidden state of the last token, whatever is computed beside it; and its neighbours' tokens."""

import asyncio

import numpy as np
import pytest
import torch

from nanovllm import EmbeddingParams, ErrorKind, SamplingParams, StepError
from tests.support import async_llms
from tests.support.equality import prompts as edge_prompts
from tests.support.llms import assert_idle_and_whole, fail_in_step, generate, greedy, open_llm
from tests.support.refusals import invalid
from tests.support.tiny_models import FAMILIES, random_prompts, save_tiny, tiny_model

EMBED = EmbeddingParams()
GREEDY = greedy(20, ignore_eos=True)


def last_states(model, prompts):
    """Of `transformers`: [hidden_size] each."""
    with torch.no_grad():
        return [model.base_model(torch.tensor([prompt])).last_hidden_state[0, -1].numpy() for prompt in prompts]


def cosine(one, other):
    return float(np.dot(one, other) / np.linalg.norm(one) / np.linalg.norm(other))


def assert_embeddings(outputs, expected):
    for output, state in zip(outputs, expected, strict=True):
        assert output.embedding.dtype == np.float32
        assert cosine(output.embedding, state) >= 1 - 1e-5
        np.testing.assert_allclose(output.embedding, state, atol=2e-3)


@pytest.mark.costly
@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_the_last_hidden_states_of_transformers(family):
    model, prompts = tiny_model(family), edge_prompts()
    expected = last_states(model, prompts)
    with open_llm(model, max_num_batched_tokens=48) as llm:
        cold = llm.embed(prompts, normalize=False, use_tqdm=False)
        warm = llm.embed(prompts, normalize=False, use_tqdm=False)
        assert_idle_and_whole(llm)
    assert_embeddings(cold, expected)
    assert_embeddings(warm, expected)
    assert sum(output.num_cached_tokens for output in warm) > sum(output.num_cached_tokens for output in cold) > 0


POOLS = {
    "one step": {},
    "small chunks": {"max_num_batched_tokens": 24, "max_num_seqs": 8},
    "no cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 64},
    "tiny pool": {"num_kv_blocks": 18, "max_model_len": 256, "max_num_batched_tokens": 64, "max_num_seqs": 6},
}


# Chunks, preemption and the cache meet both ways of stepping; the other combinations are slow.
QUICK = {("one step", True), ("small chunks", False), ("no cache", False), ("tiny pool", True)}


@pytest.mark.costly
@pytest.mark.parametrize(
    "pool, overlap",
    [pytest.param(pool, overlap, marks=[] if (pool, overlap) in QUICK else pytest.mark.slow,
                  id=f"{pool}-{'overlap' if overlap else 'one by one'}")
     for pool in POOLS for overlap in (False, True)],
)  # fmt: skip
def test_neighbours_generate_what_they_generate_alone(pool, overlap):
    model, prompts = tiny_model("qwen3"), edge_prompts()
    kinds = [
        GREEDY,
        SamplingParams(seed=5, max_tokens=8, logprobs=1),
        greedy(8, prompt_logprobs=0),
        SamplingParams(seed=6, n=2, max_tokens=8, repetition_penalty=1.3),
    ]
    params = [kinds[number % 4] for number in range(len(prompts))]
    with open_llm(model, overlap=overlap, **POOLS[pool]) as llm:
        alone = generate(llm, prompts, params)
        llm.reset_prefix_cache()
        embedded = [prompt[::-1] for prompt in prompts]
        mixed = [item for pair in zip(prompts, embedded, strict=True) for item in pair]
        outputs = generate(llm, mixed, [item for own in params for item in (own, EMBED)])
        assert_idle_and_whole(llm)
        assert (llm.stats().num_preemptions > 0) == (pool == "tiny pool")
    samples = [[[c.token_ids for c in output.outputs] for output in of] for of in (alone, outputs[::2])]
    assert samples[0] == samples[1]
    assert all(output.embedding is None for output in outputs[::2])
    assert_embeddings(outputs[1::2], last_states(model, embedded))
    assert all(output.outputs[0].token_ids == [] for output in outputs[1::2])
    assert {output.outputs[0].finish_reason for output in outputs[1::2]} == {"stop"}


def test_normalised_ones_have_length_one_and_the_same_direction():
    prompts = random_prompts(3)
    with open_llm() as llm:
        raw = llm.embed(prompts, normalize=False, use_tqdm=False)
        for output, own in zip(llm.embed(prompts, use_tqdm=False), raw, strict=True):
            assert np.linalg.norm(output.embedding) == pytest.approx(1.0, abs=1e-6)
            assert cosine(output.embedding, own.embedding) == pytest.approx(1.0, abs=1e-6)
            assert (output.prompt_token_ids, output.finish_reason, output.error) == (own.prompt_token_ids, "stop", None)
            assert output.metrics.num_output_tokens == 0
            assert output.metrics.finished_time is not None


def test_truncation_keeps_the_last_tokens():
    prompt = random_prompts(1, low=90, high=90)[0]
    with open_llm() as llm:
        (cut,) = llm.embed(prompt, truncate_prompt_tokens=30, use_tqdm=False)
        (own,) = llm.embed(prompt[-30:], use_tqdm=False)
    assert cut.prompt_token_ids == prompt[-30:]
    np.testing.assert_allclose(cut.embedding, own.embedding, atol=1e-5)


def test_a_step_of_embeddings_alone_runs_no_head():
    model = tiny_model()
    calls = []
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    with open_llm(model) as llm:
        calls.clear()
        llm.embed(random_prompts(4), use_tqdm=False)
        assert calls == []
        generate(llm, [random_prompts(1)[0], [1, 2, 3]], [EMBED, SamplingParams(max_tokens=1)])
        assert calls == [1]


def test_packed_and_fused_layers_give_the_same(tmp_path):
    from nanovllm import LLM

    folder, prompts = save_tiny(tmp_path / "tiny"), edge_prompts()
    with LLM(folder, dtype="float32", block_size=16, num_kv_blocks=129, max_model_len=512) as llm:
        assert_embeddings(llm.embed(prompts, normalize=False, use_tqdm=False), last_states(tiny_model(), prompts))


def test_states_that_are_not_finite_end_their_request_alone():
    model = tiny_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = torch.nan
    with open_llm(model) as llm:
        good, bad = llm.embed([[1, 2, 3], [4, 7]], use_tqdm=False)
        assert (good.finish_reason, bad.finish_reason, bad.embedding) == ("stop", "error", None)
        assert bad.error_kind is ErrorKind.INTERNAL
        assert "not finite" in bad.error
        assert_idle_and_whole(llm)


def test_one_that_times_out_has_no_embedding():
    with open_llm() as llm:
        (output,) = llm.embed([[1] * 100], timeout=1e-9, use_tqdm=False)
    assert (output.finish_reason, output.embedding) == ("timeout", None)


def test_a_failed_step_leaves_the_engine_whole(monkeypatch):
    model, prompts = tiny_model(), random_prompts(3)
    with open_llm(model) as llm:
        fail_in_step(monkeypatch, llm, 1, RuntimeError("torn"))
        with pytest.raises(StepError, match="torn"):
            generate(llm, [*prompts, [1, 2]], [EMBED, EMBED, EMBED, GREEDY])
        assert_idle_and_whole(llm)
        assert_embeddings(llm.embed(prompts, normalize=False, use_tqdm=False), last_states(model, prompts))


def test_a_model_without_a_head_apart_is_refused():
    class Whole(type(tiny_model())):
        base_model_prefix = "nothing"  # so that it is its own base model

    model = tiny_model()
    model.__class__ = Whole
    with open_llm(model) as llm, invalid("Whole has no base model apart from its head"):
        llm.embed([1, 2, 3], use_tqdm=False)


def test_prompts_that_cannot_be_embedded_are_refused_by_number():
    with open_llm(max_model_len=64) as llm:
        with invalid("prompt 1: the prompt has 64 tokens, which leaves no room"):
            llm.embed([[1], [1] * 64], use_tqdm=False)
        with invalid("truncate_prompt_tokens is 0; it must be at least 1"):
            llm.embed([1], truncate_prompt_tokens=0)
        assert llm.embed([], use_tqdm=False) == []


async def test_asynchronous_ones_are_the_same_beside_streams():
    prompts = random_prompts(6, low=5, high=80)
    expected = last_states(tiny_model(num_layers=1), prompts)
    async with async_llms.open_llm(max_num_batched_tokens=32) as llm:
        stream = asyncio.create_task(async_llms.answer(llm.generate([9, 8, 7], async_llms.GREEDY)))
        outputs = await llm.embed(prompts, normalize=False)
        assert_embeddings(outputs, expected)
        assert await stream == async_llms.answers([[9, 8, 7]])[0]
        (one,) = await llm.embed(prompts[0], normalize=False)
        assert_embeddings([one], expected[:1])
        for kind in ("cumulative", "delta"):  # which have no tokens to show
            (output,) = await async_llms.collect(llm.generate(prompts[1], EMBED, output_kind=kind))
            assert_embeddings([output], expected[1:2])
            assert output.outputs[0].text == ""
        with invalid("the prompt is empty"):
            await llm.embed([])
        await async_llms.assert_idle_and_whole(llm)


async def test_a_cancelled_call_frees_its_blocks():
    async with async_llms.open_llm(max_num_batched_tokens=24) as llm:
        task = asyncio.create_task(llm.embed([[number] * 400 for number in range(8)]))
        assert await async_llms.comes_true(lambda: _runs(llm))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await async_llms.stats_become(llm, num_running=0, num_waiting=0)
        await async_llms.assert_idle_and_whole(llm)


async def _runs(llm):
    return (await llm.stats()).num_running > 0
