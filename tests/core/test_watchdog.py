"""A step that does not end within step_timeout: its requests end with an error that names them, and nothing hangs."""

import asyncio
import contextlib
import logging
import threading

import pytest

from nanovllm import EngineDeadError
from nanovllm.observability.step_records import OnStep
from tests.support.async_llms import ENDLESS, GREEDY, answer, answers, becomes_true, collect, open_llm
from tests.support.tiny_models import random_prompts


class Hanging:
    """What a step calls: it ends once `may_end` is set."""

    def __init__(self):
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self, _):
        self.begun.set()
        self.may_end.wait(60.0)


@contextlib.contextmanager
def hanging_steps(llm):
    step = Hanging()
    llm.observers.append(OnStep(step))
    try:
        yield step
    finally:
        step.may_end.set()


async def test_a_step_that_hangs_ends_its_requests_by_name_and_later_calls_are_refused(caplog):
    llm = open_llm(step_timeout=0.3)
    thread = llm._engine_thread._thread
    with hanging_steps(llm) as step:
        names = [f"request-{number}" for number in range(9)]
        streams = [llm.generate([5, 6, 7], ENDLESS, request_id=name, output_kind="final") for name in names]
        found = await asyncio.gather(*map(collect, streams), return_exceptions=True)
        assert {type(each) for each in found} == {EngineDeadError}
        assert "step_timeout" in str(found[0]) and "0.3 s" in str(found[0])
        assert llm.is_dead and llm.heartbeat().age == 0.0
        with pytest.raises(EngineDeadError, match="step_timeout"):
            await collect(llm.generate([5], GREEDY))
        with pytest.raises(EngineDeadError, match="step_timeout"):
            await llm.stats()
        await llm.close()  # does not wait for the step
        assert thread.is_alive() and not step.may_end.is_set()
        named = next(record.getMessage() for record in caplog.records if record.levelname == "ERROR")
        assert "request-" in named
    with caplog.at_level(logging.ERROR, "nanovllm"):
        caplog.clear()
        assert await becomes_true(lambda: not thread.is_alive())
        assert not caplog.records  # the step's late end closes the engine in order
    assert not llm._engine_thread._engine.requests and llm.is_dead


async def test_a_call_between_two_steps_that_hangs_counts_as_a_step(caplog):
    llm = open_llm(step_timeout=0.3)
    thread, call = llm._engine_thread._thread, Hanging()
    try:
        found = await asyncio.gather(llm.inspect(call), collect(llm.generate([5, 6], ENDLESS)), return_exceptions=True)
        assert [type(each) for each in found] == [EngineDeadError] * 2
    finally:
        call.may_end.set()
    assert await becomes_true(lambda: not thread.is_alive())
    await llm.close()
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1, "its late end is none"


async def test_a_step_that_fails_after_it_was_given_up_changes_nothing(caplog):
    llm = open_llm(step_timeout=0.3)
    thread = llm._engine_thread._thread
    may_fail = threading.Event()

    def fail(_):
        may_fail.wait(60.0)
        raise SystemError("late")

    execute = llm._engine_thread._engine.model_runner.execute
    llm._engine_thread._engine.model_runner.execute = lambda batch: (fail(batch), execute(batch))
    with pytest.raises(EngineDeadError, match="step_timeout"):
        await collect(llm.generate([5, 6], ENDLESS))
    may_fail.set()
    assert await becomes_true(lambda: not thread.is_alive())
    with pytest.raises(EngineDeadError, match="step_timeout"):
        await llm.stats()
    await llm.close()


async def test_an_engine_whose_steps_end_and_one_without_work_are_left_alone():
    prompts = random_prompts(4)
    async with open_llm(step_timeout=1000.0) as llm:
        thread = llm._engine_thread
        streams = [answer(llm.generate(prompt, GREEDY)) for prompt in prompts]
        assert not thread._give_up(1000.0)
        assert await asyncio.gather(*streams) == answers(prompts)
        assert await becomes_true(lambda: thread._busy_since is None)
        assert not thread._give_up(0.0) and not llm.is_dead
        assert await asyncio.gather(*(answer(llm.generate(prompt, GREEDY)) for prompt in prompts)) == answers(prompts)


async def test_the_watchdog_ends_with_its_engine():
    llm = open_llm()
    watchdogs = [each for each in threading.enumerate() if each.name == "nanovllm-watchdog"]
    await llm.close()
    assert await becomes_true(lambda: not all(thread.is_alive() for thread in watchdogs))
