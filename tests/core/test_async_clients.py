"""`AsyncLLM`: clients that leave, cancel or do not read, event loops that close, and prompts that are prepared."""

import asyncio
import gc
import os
import threading
import time

import pytest

from nanovllm import AsyncLLM
from tests.support.async_llms import (
    ENDLESS,
    GREEDY,
    OPTIONS,
    answer,
    answers,
    assert_idle_and_whole,
    collect,
    in_engine_steps,
    open_llm,
    stats_become,
)
from tests.support.llms import greedy
from tests.support.refusals import invalid
from tests.support.tiny_models import tiny_model, tiny_tokenizer

# ----------------------------------------------------------------------------------------------------- leaving a stream


@pytest.mark.costly
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("how", ["cancel", "aclose", "drop", "abort"])
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


@pytest.mark.parametrize("pause", [0.0, 0.1], ids=["at once", "with a wake-up on its way"])
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


# ------------------------------------------------------------------------------------------------ before it is queued


class SlowTokenizer:
    """Takes its time to encode; `is_busy` tells the others that it has begun."""

    def __init__(self, seconds):
        self._tokenizer, self._seconds = tiny_tokenizer(), seconds
        self.is_busy = threading.Event()

    def __call__(self, text):
        self.is_busy.set()
        time.sleep(self._seconds)
        return self._tokenizer(text)

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)


async def test_times_and_timeouts_count_from_the_call_and_not_from_when_the_prompt_is_ready():
    async with AsyncLLM(tiny_model(), tokenizer=SlowTokenizer(0.2), **OPTIONS) as llm:
        streams = [collect(llm.generate("the sea", GREEDY, timeout=t)) for t in (None, 0.3)]
        (*_, patient), (*_, hasty) = await asyncio.gather(*streams)
        assert patient.metrics.queue_time >= 0.2 and patient.metrics.ttft >= 0.2
        assert hasty.outputs[0].finish_reason == "timeout"  # its prompt is ready after 0.4 s
        await assert_idle_and_whole(llm)


async def test_a_request_can_be_aborted_while_its_prompt_is_prepared():
    tokenizer = SlowTokenizer(0.3)
    async with AsyncLLM(tiny_model(), tokenizer=tokenizer, **OPTIONS) as llm:
        stream = asyncio.create_task(collect(llm.generate("the sea", ENDLESS, request_id="early")))
        await asyncio.to_thread(tokenizer.is_busy.wait)
        with invalid("'early' is being prepared"):
            await anext(llm.generate([5], GREEDY, request_id="early"))
        assert await llm.abort("early")
        (output,) = await stream
        assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("abort", [])
        assert not await llm.abort("early")
        await assert_idle_and_whole(llm)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system knows no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_is_refused_and_does_not_wait_for_ever():
    llm = open_llm()
    child = os.fork()
    if child == 0:  # pragma: no cover
        status = 1
        try:
            asyncio.run(asyncio.wait_for(llm.stats(), 5.0))
        except RuntimeError as error:
            status = 0 if "forked child" in str(error) else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    asyncio.run(llm.close())


async def test_a_request_whose_event_loop_is_closed_is_aborted_though_it_has_no_output_yet(monkeypatch):
    monkeypatch.setattr("nanovllm.serving.streaming.engine_thread.CLIENT_CHECK_SECONDS", 0.01)
    async with open_llm() as llm:
        in_engine_steps(llm, monkeypatch, lambda _: time.sleep(0.01))  # no answer ends by itself

        def leave():
            loop = asyncio.new_event_loop()
            stream = llm.generate([5] * 20, ENDLESS, output_kind="final")
            task = loop.create_task(anext(stream))
            loop.run_until_complete(stats_become(llm, num_running=1))
            task._log_destroy_pending = False
            loop.close()
            abandoned.append((task, stream))  # still referred to, so that nothing else ends it

        abandoned = []
        await asyncio.to_thread(leave)
        assert await stats_become(llm, num_running=0, num_used_blocks=0)
        assert (await llm.stats()).num_output_tokens < 400


@pytest.mark.parametrize(
    "prompt, options, named",
    [
        ("", {}, "empty"),
        ([5], {"sampling_params": "greedy"}, "SamplingParams"),
        ([5], {"timeout": 0}, "timeout"),
        ([5], {"request_id": ""}, "request_id"),
        ([5], {"request_id": 7}, "request_id"),
        ([5], {"output_kind": "deltas"}, "cumulative, delta, final"),
    ],
    ids=str,
)
async def test_bad_input_raises_before_anything_is_queued(prompt, options, named):
    async with open_llm() as llm:
        with pytest.raises((TypeError, ValueError), match=named):
            await anext(llm.generate(prompt, **options))
        assert (await llm.stats()).num_steps == 0
        await assert_idle_and_whole(llm)


# --------------------------------------------------------------------------------------------------------- slow readers


@pytest.mark.parametrize("kind", ["cumulative", "delta"])
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
