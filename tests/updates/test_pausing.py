"""Pauses: nothing is scheduled and nothing is lost, and the engine's thread sleeps meanwhile."""

import asyncio
import time

import pytest

from nanovllm.features.updates.pausing import MAX_REST_SECONDS, Pause
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Scheduler
from tests.support.async_llms import ENDLESS, answer, answers, assert_idle_and_whole, becomes_true, comes_true, open_llm
from tests.support.llms import GREEDY, OVERLAP, generate, greedy, token_ids
from tests.support.llms import assert_idle_and_whole as sync_idle
from tests.support.llms import open_llm as open_sync
from tests.support.tiny_models import random_prompts

PROMPTS = random_prompts(4, low=5, high=90, seed=3)


def step_count(llm):
    return llm._run(lambda engine: engine.scheduler.stats.num_steps)


async def is_still(llm):
    """Whether the engine has read its steps and launches no other."""
    assert await comes_true(lambda: llm._run(lambda engine: not engine._in_flight))
    before = await step_count(llm)
    for _ in range(20):
        await llm.stats()  # each call wakes the engine's thread, and a step follows
    return await step_count(llm) == before


async def begun(llm, count=2):
    """A stream of an endless request, from which some tokens were read."""
    stream = llm.generate(PROMPTS[0], ENDLESS)
    for _ in range(count):
        await anext(stream)
    return stream


@OVERLAP
def test_running_and_new_requests_wait_with_their_kv_and_go_on_with_the_same_tokens(overlap):
    async def run():
        async with open_llm(overlap=overlap) as llm:
            params = greedy(40)
            stream = llm.generate(PROMPTS[0], params)
            await anext(stream)
            await llm.pause_generation()
            await llm.pause_generation()  # again, which changes nothing
            assert await llm.is_paused() and await is_still(llm)
            later = [asyncio.ensure_future(answer(llm.generate(prompt, params))) for prompt in PROMPTS[1:]]
            assert await comes_true(lambda: llm._run(lambda engine: len(engine.scheduler.waiting) == 3))
            stats = await llm.stats()
            assert await is_still(llm) and not any(task.done() for task in later)
            assert stats.num_running == 1 and stats.num_used_blocks and not stats.num_preemptions
            await llm.resume_generation()
            await llm.resume_generation()
            assert not await llm.is_paused()
            found = [await answer(stream), *(await asyncio.gather(*later))]
            assert found == answers(PROMPTS, params)
            assert not (await llm.stats()).num_preemptions
            await assert_idle_and_whole(llm)

    asyncio.run(run())


def test_aborts_and_closed_streams_end_requests_of_a_paused_engine():
    async def run():
        async with open_llm() as llm:
            closed = await begun(llm)
            named = llm.generate(PROMPTS[1], ENDLESS, request_id="named")
            await anext(named)
            await llm.pause_generation()
            waiting = asyncio.ensure_future(answer(llm.generate(PROMPTS[2], ENDLESS, request_id="waiting")))
            assert await comes_true(lambda: llm._run(lambda engine: len(engine.scheduler.waiting) == 1))
            assert await llm.abort("named") and await llm.abort("waiting")
            assert [output async for output in named][-1].outputs[0].finish_reason == "abort"
            assert (await waiting)[0] == []
            await closed.aclose()
            assert await comes_true(lambda: llm._run(lambda engine: not engine.requests))
            await llm.resume_generation()
            await assert_idle_and_whole(llm)

    asyncio.run(run())


def test_a_deadline_ends_a_request_of_a_paused_engine():
    async def run():
        async with open_llm() as llm:
            await llm.pause_generation()
            (output,) = [each async for each in llm.generate(PROMPTS[0], ENDLESS, timeout=0.05)]
            assert output.outputs[0].finish_reason == "timeout" and await llm.is_paused()

    asyncio.run(run())


def test_a_paused_engine_closes_and_ends_its_streams():
    async def run():
        async with open_llm() as llm:
            stream = await begun(llm)
            await llm.pause_generation()
            reader = asyncio.ensure_future(answer(stream))
        await reader

    asyncio.run(run())


def test_the_engines_thread_sleeps_and_the_watchdog_takes_no_pause_for_a_step_that_hangs(monkeypatch):
    times = []
    schedule = Scheduler.schedule
    monkeypatch.setattr(Scheduler, "schedule", lambda self: times.append(time.monotonic()) or schedule(self))

    async def run():
        async with open_llm(step_timeout=2.5 * MAX_REST_SECONDS) as llm:
            stream = await begun(llm)
            await llm.pause_generation()
            assert await is_still(llm)
            times.clear()
            assert await becomes_true(lambda: len(times) > 4)
            assert times[4] - times[1] > 2.9 * MAX_REST_SECONDS  # beyond the timeout
            assert not llm.is_dead
            await llm.resume_generation()
            await anext(stream)
            await stream.aclose()

    asyncio.run(run())


def test_drafts_go_on_after_a_pause():
    async def run():
        async with open_llm(speculation="suffix") as llm:
            proposer = await llm.inspect(lambda engine: engine.scheduler.proposer)
            stream = llm.generate(PROMPTS[0], params := greedy(60))
            await anext(stream)
            await llm.pause_generation()
            assert (await llm.stats()).speculation is not None  # the drafts' own figures
            await llm.resume_generation()
            assert await llm.inspect(lambda engine: engine.scheduler.proposer) is proposer
            assert await answer(stream) == answers(PROMPTS[:1], params)[0]

    asyncio.run(run())


def test_calls_of_a_paused_llm_raise_an_error_that_names_the_remedy():
    with open_sync() as llm:
        expected = token_ids(generate(llm, PROMPTS))
        stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=50))
        next(stream)
        llm.pause_generation()
        assert llm.is_paused
        for call in (lambda: generate(llm, PROMPTS), lambda: next(llm.stream(PROMPTS[0], GREEDY)), lambda: [*stream]):
            with pytest.raises(RuntimeError, match=r"is paused.*resume_generation\(\)"):
                call()
        llm.resume_generation()
        assert not llm.is_paused
        assert token_ids(generate(llm, PROMPTS)) == expected
        sync_idle(llm)


def test_a_pause_asks_its_proposer_for_everything_else():
    class Inner:
        def waits(self, running, in_flight):
            return False

        def place(self, step):
            return step + 1

    assert Pause(Inner()).place(1) == 2 and Pause(Inner()).waits([], [])
