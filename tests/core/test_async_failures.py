"""`AsyncLLM`: failed steps are tried again; an error ends its own request and no other."""

import asyncio

import pytest

from nanovllm import EngineDeadError, ErrorKind, SamplingParams
from nanovllm.errors import DeviceError
from tests.support.async_llms import (
    ENDLESS,
    GREEDY,
    KINDS,
    answer,
    answers,
    assert_idle_and_whole,
    collect,
    in_engine_steps,
    open_llm,
    stats_become,
)
from tests.support.tiny_models import random_prompts


async def test_a_step_that_fails_now_and_then_is_tried_again_without_a_trace_in_the_answers(monkeypatch):
    prompts = random_prompts(5)
    async with open_llm() as llm:
        numbers = iter(range(1, 10_000))

        def fail_sometimes(batch):
            if next(numbers) in (1, 4, 5, 9):
                raise RuntimeError("out of memory, for a moment")

        in_engine_steps(llm, monkeypatch, fail_sometimes)
        streams = [answer(llm.generate(prompt, GREEDY, output_kind="delta"), "delta") for prompt in prompts]
        assert await asyncio.gather(*streams) == answers(prompts)
        assert (await llm.stats()).num_failed_steps == 4
        await assert_idle_and_whole(llm)


async def test_steps_that_fail_here_and_there_end_no_long_prompt(monkeypatch):
    prompt = random_prompts(1, low=300, high=300)[0]
    async with open_llm(max_num_batched_tokens=32, max_num_seqs=4) as llm:
        numbers = iter(range(1, 10_000))

        def fail_sometimes(batch):
            if next(numbers) in (2, 3, 6, 7, 10, 11):
                raise RuntimeError("out of memory, for a moment")

        in_engine_steps(llm, monkeypatch, fail_sometimes)
        assert await answer(llm.generate(prompt, GREEDY)) == answers([prompt])[0]
        assert (await llm.stats()).num_failed_steps == 6


@pytest.mark.parametrize("overlap", [False, True])
async def test_a_request_that_makes_every_step_fail_ends_with_an_error_and_its_neighbours_go_on(monkeypatch, overlap):
    long = SamplingParams(temperature=0.0, max_tokens=60)
    async with open_llm(overlap=overlap) as llm:

        def choke(batch):
            if any(entry.sequence.request_id == "poison" for entry in batch.entries):
                raise RuntimeError("cannot swallow this")

        in_engine_steps(llm, monkeypatch, choke)
        neighbour = llm.generate([5, 6, 7], long)
        await anext(neighbour)
        (output,) = await collect(llm.generate([9] * 30, long, request_id="poison"))
        assert output.outputs[0].finish_reason == "error"
        assert "cannot swallow this" in output.error
        assert await answer(neighbour) == answers([[5, 6, 7]], long)[0]
        await assert_idle_and_whole(llm)


async def test_steps_that_always_fail_end_their_requests_and_not_in_an_endless_loop(monkeypatch):
    async with open_llm() as llm:
        num_tried = 0

        def fail(batch):
            nonlocal num_tried
            num_tried += 1
            if num_tried > 5:
                raise RuntimeError("no more")

        in_engine_steps(llm, monkeypatch, fail)
        ends = await asyncio.gather(*(collect(llm.generate([n], GREEDY)) for n in range(3)))
        assert [outputs[-1].outputs[0].finish_reason for outputs in ends] == ["error"] * 3
        assert num_tried <= 5 + 3 * 3
        assert not llm.is_dead
        await assert_idle_and_whole(llm)


@pytest.mark.parametrize("error", [DeviceError("it fell off the bus"), RuntimeError("a slip of bookkeeping")], ids=repr)
async def test_an_error_that_ends_the_engine_reaches_every_client_with_its_cause(monkeypatch, error):
    llm = open_llm(max_num_seqs=2)
    engine = llm._engine_thread._engine
    streams = [llm.generate([number] * 20, ENDLESS) for number in range(2)]
    for stream in streams:
        await anext(stream)
    waiting = asyncio.create_task(anext(llm.generate([7], ENDLESS)))
    assert await stats_become(llm, num_waiting=1)

    def fail(*_):
        raise error

    place = (engine.model_runner, "execute") if isinstance(error, DeviceError) else (engine.scheduler, "schedule")
    monkeypatch.setattr(*place, fail)
    tasks = [asyncio.create_task(collect(stream)) for stream in streams]
    results = await asyncio.gather(*tasks, waiting, return_exceptions=True)
    assert [type(result) for result in results] == [EngineDeadError] * 3
    assert all(result.__cause__ is error and str(error) in str(result) for result in results)
    assert len({id(result) for result in results}) == 3
    assert llm.is_dead
    for use in (lambda: anext(llm.generate([5])), llm.stats, lambda: llm.abort("a"), llm.reset_prefix_cache):
        with pytest.raises(EngineDeadError, match=str(error)):
            await use()
    await llm.close()
    with pytest.raises(EngineDeadError, match=str(error)):
        await anext(llm.generate([5]))


async def test_a_tokenizer_that_cannot_decode_one_answer_hurts_no_neighbour(monkeypatch):
    prompts = random_prompts(3)
    expected = answers(prompts)
    broken = expected[1][0][3]
    assert all(broken not in expected[number][0] for number in (0, 2))
    async with open_llm() as llm:
        decode = llm.tokenizer.decode

        def failing(ids, **options):
            if broken in ids:
                raise IndexError("piece id is out of range")
            return decode(ids, **options)

        monkeypatch.setattr(llm.tokenizer, "decode", failing)
        for kind in KINDS:
            streams = [collect(llm.generate(prompt, GREEDY, output_kind=kind)) for prompt in prompts]
            first, second, third = [outputs[-1] for outputs in await asyncio.gather(*streams)]
            assert second.outputs[0].finish_reason == "error"
            assert "piece id is out of range" in second.error and second.error_kind is ErrorKind.INTERNAL
            if kind == "cumulative":  # what was shown is not taken back
                assert second.outputs[0].text and expected[1][1].startswith(second.outputs[0].text)
            assert [o.outputs[0].finish_reason for o in (first, third)] == ["length", "length"]
        await assert_idle_and_whole(llm)


async def test_a_tokenizer_that_cannot_encode_a_prompt_hurts_its_caller_alone(monkeypatch):
    async with open_llm() as llm:
        stream = llm.generate([5, 6, 7], GREEDY)
        await anext(stream)

        def failing(text):
            raise OverflowError("too much text")

        monkeypatch.setattr(llm._input_processor, "tokenizer", failing)
        with pytest.raises(OverflowError, match="too much text"):
            await anext(llm.generate("text", GREEDY))
        assert await answer(stream) == answers([[5, 6, 7]])[0]
