"""`AsyncLLM`: many streams at once, each with the tokens and text of the offline engine."""

import asyncio

import pytest

from nanovllm import SamplingParams
from tests.support.async_llms import (
    GREEDY,
    KINDS,
    answer,
    answers,
    assert_idle_and_whole,
    collect,
    offline,
    open_llm,
)
from tests.support.llms import mixed_requests
from tests.support.tiny_models import random_prompts


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_stream_gives_the_tokens_and_text_of_the_offline_engine(kind, overlap):
    async with open_llm(overlap=overlap) as llm:
        for prompt in ("The capital of France is", [5, 6, 7]):
            assert await answer(llm.generate(prompt, GREEDY, output_kind=kind), kind) == answers([prompt])[0]
        await assert_idle_and_whole(llm)


async def test_outputs_hold_what_their_kind_says():
    async with open_llm() as llm:
        streams = {kind: await collect(llm.generate([5, 6, 7], GREEDY, output_kind=kind)) for kind in KINDS}
    sizes = {kind: [len(output.outputs[0].token_ids) for output in outputs] for kind, outputs in streams.items()}
    assert sizes["cumulative"] == sorted(sizes["cumulative"])
    assert (sizes["cumulative"][-1], sum(sizes["delta"]), sizes["final"]) == (12, 12, [12])
    for outputs in streams.values():
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert outputs[-1].outputs[0].finish_reason == "length"
        assert outputs[-1].metrics.ttft > 0


async def test_deltas_of_several_samples_and_their_log_probabilities_join_to_those_of_the_offline_engine():
    params = SamplingParams(seed=3, n=3, max_tokens=20, logprobs=2, prompt_logprobs=1)
    (expected,) = offline().generate([[5, 6, 7]], params, use_tqdm=False)
    async with open_llm() as llm:
        outputs = await collect(slowly(llm.generate([5, 6, 7], params, output_kind="delta"), 0.005))
        await assert_idle_and_whole(llm)
    joined = outputs[0]
    for output in outputs[1:]:
        joined.extend(output)
    assert [(c.index, c.token_ids, c.text) for c in joined.outputs] == [
        (c.index, c.token_ids, c.text) for c in expected.outputs
    ]
    assert [[list(entry) for entry in c.logprobs] for c in joined.outputs] == [
        [list(entry) for entry in c.logprobs] for c in expected.outputs
    ]
    assert joined.metrics.num_output_tokens == sum(len(c.token_ids) for c in expected.outputs)
    assert joined.metrics.mean_itl <= joined.metrics.max_itl


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"overlap": True, "num_kv_blocks": 40}], ids=["roomy", "overlap, few blocks"])
async def test_two_hundred_streams_at_once_each_give_the_tokens_of_the_offline_engine(options):
    prompts, params = mixed_requests(200)
    expected = answers(prompts, params)

    async def client(llm, number):
        kind = KINDS[number % 3]
        await asyncio.sleep(number % 7 * 0.01)
        stream = llm.generate(prompts[number], params[number], output_kind=kind, priority=number % 2)
        return await answer(slowly(stream, 0.002 if number % 5 == 0 else 0.0), kind)

    async with open_llm(**options) as llm:
        assert await asyncio.gather(*(client(llm, number) for number in range(200))) == expected
        await assert_idle_and_whole(llm)


async def slowly(stream, seconds):
    async for output in stream:
        yield output
        await asyncio.sleep(seconds)


async def test_clients_in_several_event_loops_share_one_engine():
    prompts = random_prompts(4)
    async with open_llm() as llm:

        def in_another_loop(prompt):
            return asyncio.run(answer(llm.generate(prompt, GREEDY)))

        elsewhere = [asyncio.to_thread(in_another_loop, prompt) for prompt in prompts]
        here = answer(llm.generate([5, 6, 7], GREEDY))
        assert await asyncio.gather(*elsewhere, here) == answers([*prompts, [5, 6, 7]])
        await assert_idle_and_whole(llm)
