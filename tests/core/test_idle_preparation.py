"""`AsyncLLM`: steps prepared while the engine is idle."""

import asyncio
import threading
import time

import pytest
import torch

from nanovllm import EngineDeadError
from nanovllm.errors import DeviceError
from nanovllm.model_runner import ModelRunner
from tests.support.async_llms import (
    GREEDY,
    answer,
    answers,
    assert_idle_and_whole,
    bounded,
    comes_true,
    in_engine_steps,
    open_llm,
)


@bounded
async def test_steps_are_prepared_one_at_a_time_while_the_engine_is_idle(monkeypatch):
    steps, prepared, may_go_on = [], [], threading.Event()

    def capture_ahead(runner):
        prepared.append(len(steps))
        may_go_on.wait(20.0)
        return len(prepared) < 5

    async def all_are_prepared():
        return len(prepared) == 5

    async def one_is_begun():
        return len(prepared) == 1

    monkeypatch.setattr(ModelRunner, "capture_ahead", capture_ahead)
    async with open_llm(prepares_when_idle=True) as llm:
        in_engine_steps(llm, monkeypatch, steps.append)
        for _ in range(3):
            assert await answer(llm.generate([5, 6, 7], GREEDY)) == answers([[5, 6, 7]])[0]
        assert not prepared  # it was idle for moments only
        num_steps = len(steps)
        assert await comes_true(one_is_begun)
        waiting = asyncio.create_task(answer(llm.generate([5, 6, 7], GREEDY)))
        await asyncio.sleep(0.05)
        assert prepared == [num_steps] and len(steps) == num_steps
        may_go_on.set()
        assert await waiting == answers([[5, 6, 7]])[0]
        assert await comes_true(all_are_prepared)
        assert prepared == [num_steps] + [len(steps)] * 4  # the request came first
        assert await answer(llm.generate([5, 6, 7], GREEDY)) == answers([[5, 6, 7]])[0]
        await assert_idle_and_whole(llm)


@bounded
async def test_shapes_that_later_steps_miss_are_prepared_too(monkeypatch):
    steps, prepared = [], []

    def capture_ahead(runner):
        prepared.append(len(steps))
        return False  # none is left so far

    async def it_was_asked():
        return bool(prepared)

    async def it_was_asked_again():
        return prepared[-1] == len(steps) > 0

    monkeypatch.setattr(ModelRunner, "capture_ahead", capture_ahead)
    monkeypatch.setattr("nanovllm.serving.streaming.engine_thread.IDLE_SECONDS", 0.0)
    async with open_llm(prepares_when_idle=True) as llm:
        in_engine_steps(llm, monkeypatch, steps.append)
        assert await comes_true(it_was_asked)
        assert await answer(llm.generate([5, 6, 7], GREEDY)) == answers([[5, 6, 7]])[0]
        assert await comes_true(it_was_asked_again)


@bounded
async def test_a_step_that_cannot_be_prepared_does_not_end_the_engine(monkeypatch, caplog):
    def capture_ahead(runner):
        raise torch.OutOfMemoryError("no memory for a graph")

    async def it_was_tried():
        return "preparing steps while idle failed" in caplog.text

    monkeypatch.setattr(ModelRunner, "capture_ahead", capture_ahead)
    monkeypatch.setattr("nanovllm.serving.streaming.engine_thread.IDLE_SECONDS", 0.0)
    async with open_llm(prepares_when_idle=True) as llm:
        assert await comes_true(it_was_tried)
        assert await answer(llm.generate([5, 6, 7], GREEDY)) == answers([[5, 6, 7]])[0]
        await assert_idle_and_whole(llm)
    assert caplog.text.count("preparing steps while idle failed") == 1


@bounded
async def test_a_device_that_fails_while_a_step_is_prepared_ends_the_engine(monkeypatch):
    def capture_ahead(runner):
        raise DeviceError("CUDA error: an illegal memory access was encountered")

    async def is_dead():
        return llm.is_dead

    monkeypatch.setattr(ModelRunner, "capture_ahead", capture_ahead)
    monkeypatch.setattr("nanovllm.serving.streaming.engine_thread.IDLE_SECONDS", 0.0)
    async with open_llm(prepares_when_idle=True) as llm:
        assert await comes_true(is_dead)
        with pytest.raises(EngineDeadError, match="illegal memory access"):
            await anext(llm.generate([5, 6, 7], GREEDY))


@bounded
async def test_an_engine_that_prepares_steps_can_be_closed(monkeypatch):
    prepared = []

    async def two_are_begun():
        return len(prepared) >= 2

    def capture_ahead(runner):
        prepared.append(time.sleep(0.01))
        return True  # there is no end of them

    monkeypatch.setattr(ModelRunner, "capture_ahead", capture_ahead)
    monkeypatch.setattr("nanovllm.serving.streaming.engine_thread.IDLE_SECONDS", 0.0)
    llm = open_llm(prepares_when_idle=True)
    assert await comes_true(two_are_begun)
    await llm.close()


@bounded
async def test_nothing_is_prepared_unless_it_was_asked_for(monkeypatch):
    prepared = []
    monkeypatch.setattr(ModelRunner, "capture_ahead", lambda runner: prepared.append(1))
    monkeypatch.setattr("nanovllm.serving.streaming.engine_thread.IDLE_SECONDS", 0.0)
    async with open_llm() as llm:
        assert await answer(llm.generate([5, 6, 7], GREEDY)) == answers([[5, 6, 7]])[0]
        await asyncio.sleep(0.05)
    assert not prepared
