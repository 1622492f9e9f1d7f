"""`AsyncLLM`: clients that leave, cancel or do not read, and event loops that close."""

import asyncio
import gc
import threading
import time

import pytest

from tests.support.async_llms import (
    ENDLESS,
    GREEDY,
    answer,
    answers,
    assert_idle_and_whole,
    bounded,
    collect,
    in_engine_steps,
    open_llm,
    stats_become,
)
from tests.support.llms import greedy

# ----------------------------------------------------------------------------------------------------- leaving a stream


@pytest.mark.costly
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("how", ["cancel", "aclose", "drop", "abort"])
@bounded
async def test_a_stream_that_is_left_frees_its_blocks_within_a_step_and_no_other_is_hurt(how, overlap, monkeypatch):
    async with open_llm(overlap=overlap) as llm:
        in_engine_steps(llm, monkeypatch, lambda _: time.sleep(0.01))  # no answer ends by itself
        neighbour = asyncio.create_task(answer(llm.generate([5, 6, 7], greedy(60))))
        stream = llm.generate([9] * 100, ENDLESS, request_id="left")
        await anext(stream)
        held = -(-101 // 16)
        assert (await llm.stats()).num_used_blocks >= held
        if how == "cancel":
            task = asyncio.create_task(collect(stream))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif how == "aclose":
            await stream.aclose()
        elif how == "drop":
            del stream
            await asyncio.sleep(0.01)  # the event loop closes it
        else:
            assert await llm.abort("left")
            outputs = await collect(stream)
            assert outputs[-1].outputs[0].finish_reason == "abort"
            assert len(outputs[-1].outputs[0].token_ids) > 0
        stats = await llm.stats()  # asked for behind the abort, so not a step more was taken for it
        assert stats.num_used_blocks <= -(-(3 + 60) // 16)
        assert stats.num_running + stats.num_waiting <= 1
        assert await neighbour == answers([[5, 6, 7]], greedy(60))[0]
        await assert_idle_and_whole(llm)


@bounded
async def test_cancelling_before_the_request_is_queued_queues_nothing(monkeypatch):
    async with open_llm() as llm:
        is_tokenising, may_go_on = threading.Event(), threading.Event()
        prepare = llm._input_processor.process_each

        def slow(*arguments, **options):
            is_tokenising.set()
            may_go_on.wait(10)
            return prepare(*arguments, **options)

        monkeypatch.setattr(llm._input_processor, "process_each", slow)
        task = asyncio.create_task(collect(llm.generate([5] * 40, ENDLESS)))
        await asyncio.to_thread(is_tokenising.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_go_on.set()  # its thread goes on, and finds nobody who waits
        await asyncio.sleep(0.05)
        assert (await llm.stats()).num_steps == 0
        await assert_idle_and_whole(llm)


@bounded
async def test_a_busy_event_loop_holds_up_no_request_that_is_prepared(monkeypatch):
    async with open_llm() as llm:
        is_tokenising = threading.Event()
        prepare = llm._input_processor.process_each

        def slow(*arguments, **options):
            is_tokenising.set()
            return prepare(*arguments, **options)

        monkeypatch.setattr(llm._input_processor, "process_each", slow)
        task = asyncio.create_task(collect(llm.generate([5] * 40, GREEDY)))
        while not is_tokenising.is_set():
            await asyncio.sleep(0)
        while llm._engine_thread._engine.has_unfinished or not llm._engine_thread._engine.num_output_tokens():
            time.sleep(0.01)  # a callback of the caller's
        ended = time.monotonic()
        metrics = (await task)[-1].metrics
        assert metrics.finished_time < ended


@bounded
async def test_aborting_what_does_not_run_says_so():
    async with open_llm() as llm:
        assert not await llm.abort("nobody")


@pytest.mark.parametrize("pause", [0.0, 0.1], ids=["at once", "with a wake-up on its way"])
@bounded
async def test_streams_of_an_event_loop_that_is_closed_are_aborted(pause):
    async with open_llm() as llm:
        left = []

        def forget():
            loop = asyncio.new_event_loop()
            stream = llm.generate([9] * 100, ENDLESS)
            left.append(stream)
            loop.run_until_complete(anext(stream))
            time.sleep(pause)
            loop.close()

        await asyncio.to_thread(forget)
        assert await stats_become(llm, num_used_blocks=0)
        assert (await llm.stats()).num_output_tokens < 450
        await assert_idle_and_whole(llm)
        assert not llm._router._due
        left.clear()
        gc.collect()


# --------------------------------------------------------------------------------------------------------- slow readers


@pytest.mark.parametrize("kind", ["cumulative", "delta"])
@bounded
async def test_a_client_that_does_not_read_stalls_nobody_and_finds_everything_in_one_output(kind):
    params = greedy(200)
    async with open_llm() as llm:
        idle = llm.generate([9] * 20, params, output_kind=kind, request_id="idle")
        first = await anext(idle)
        assert await answer(llm.generate([5, 6, 7], GREEDY)) == answers([[5, 6, 7]])[0]
        assert await stats_become(llm, num_running=0)
        (last,) = await collect(idle)
        token_ids, text = answers([[9] * 20], params)[0]
        shown = len(first.outputs[0].token_ids) if kind == "delta" else 0
        assert (last.outputs[0].token_ids, last.finished) == (token_ids[shown:], True)
        assert (first.outputs[0].text if kind == "delta" else "") + last.outputs[0].text == text


@bounded
async def test_a_blocked_event_loop_keeps_one_output_for_each_stream_and_one_call():
    steps = []
    async with open_llm(on_step=steps.append) as llm:
        streams = [llm.generate([number] * 20, ENDLESS, output_kind="delta") for number in range(4)]
        for stream in streams:
            await anext(stream)
        loop = asyncio.get_running_loop()
        latest = len(steps) + 25
        deadline = time.monotonic() + 20.0
        while len(steps) < latest and time.monotonic() < deadline:
            time.sleep(0.01)  # the client stands still
        waiting = len(loop._ready)  # type: ignore[attr-defined]
        assert len(steps) >= latest
        assert waiting <= 2
        for stream in streams:
            await stream.aclose()
        await assert_idle_and_whole(llm)
