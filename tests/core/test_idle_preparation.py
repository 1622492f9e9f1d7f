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
    becomes_true,
    in_engine_steps,
    open_llm,
)

IDLE_SECONDS = "nanovllm.serving.streaming.engine_thread.IDLE_SECONDS"


def open_preparing(monkeypatch, capture_ahead, idle_seconds=0.0, **options):
    """An engine that calls this to prepare a step, as soon as it is idle for so long."""
    monkeypatch.setattr(ModelRunner, "capture_ahead", capture_ahead)
    monkeypatch.setattr(IDLE_SECONDS, idle_seconds)
    return open_llm(**({"prepares_when_idle": True} | options))


async def assert_answers(llm):
    assert await answer(llm.generate([5, 6, 7], GREEDY)) == answers([[5, 6, 7]])[0]


async def test_steps_are_prepared_one_at_a_time_while_the_engine_is_idle(monkeypatch):
    steps, prepared, may_go_on = [], [], threading.Event()
    answers([[5, 6, 7]])  # now, so that no request waits for them

    def capture_ahead(runner):
        prepared.append(len(steps))
        may_go_on.wait(20.0)
        return len(prepared) < 5

    async with open_preparing(monkeypatch, capture_ahead, idle_seconds=60.0) as llm:
        in_engine_steps(llm, monkeypatch, steps.append)
        for _ in range(3):
            await assert_answers(llm)
        assert not prepared  # it was idle for moments only
        monkeypatch.setattr(IDLE_SECONDS, 0.0)
        await assert_answers(llm)  # the wait before it has the old length
        assert await becomes_true(lambda: len(prepared) == 1)
        num_steps = len(steps)
        waiting = asyncio.create_task(assert_answers(llm))
        await asyncio.sleep(0.05)
        assert prepared == [num_steps] and len(steps) == num_steps
        may_go_on.set()
        await waiting
        assert await becomes_true(lambda: len(prepared) == 5)
        assert prepared == [num_steps] + [len(steps)] * 4  # the request came first
        await assert_answers(llm)
        await assert_idle_and_whole(llm)


async def test_shapes_that_later_steps_miss_are_prepared_too(monkeypatch):
    steps, prepared = [], []

    def capture_ahead(runner):
        prepared.append(len(steps))
        return False  # none is left so far

    async with open_preparing(monkeypatch, capture_ahead) as llm:
        in_engine_steps(llm, monkeypatch, steps.append)
        assert await becomes_true(lambda: bool(prepared))
        await assert_answers(llm)
        assert await becomes_true(lambda: prepared[-1] == len(steps) > 0)


async def test_a_step_that_cannot_be_prepared_does_not_end_the_engine(monkeypatch, caplog):
    def capture_ahead(runner):
        raise torch.OutOfMemoryError("no memory for a graph")

    async with open_preparing(monkeypatch, capture_ahead) as llm:
        assert await becomes_true(lambda: "preparing steps while idle failed" in caplog.text)
        await assert_answers(llm)
        await assert_idle_and_whole(llm)
    assert caplog.text.count("preparing steps while idle failed") == 1


async def test_a_device_that_fails_while_a_step_is_prepared_ends_the_engine(monkeypatch):
    def capture_ahead(runner):
        raise DeviceError("CUDA error: an illegal memory access was encountered")

    async with open_preparing(monkeypatch, capture_ahead) as llm:
        assert await becomes_true(lambda: llm.is_dead)
        with pytest.raises(EngineDeadError, match="illegal memory access"):
            await anext(llm.generate([5, 6, 7], GREEDY))


async def test_an_engine_that_prepares_steps_can_be_closed(monkeypatch):
    prepared = []

    def capture_ahead(runner):
        prepared.append(time.sleep(0.01))
        return True  # there is no end of them

    llm = open_preparing(monkeypatch, capture_ahead)
    assert await becomes_true(lambda: len(prepared) >= 2)
    await llm.close()


async def test_nothing_is_prepared_unless_it_was_asked_for(monkeypatch):
    prepared = []
    async with open_preparing(monkeypatch, lambda runner: prepared.append(1), prepares_when_idle=False) as llm:
        await assert_answers(llm)
        await asyncio.sleep(0.05)
    assert not prepared
