"""`AsyncLLM`: timeouts, aborts, a full queue, and input refused before it is queued."""

import asyncio
import os
import threading
import time

import pytest

from nanovllm import AsyncLLM, QueueFullError
from tests.support.async_llms import (
    ENDLESS,
    GREEDY,
    OPTIONS,
    answer,
    answers,
    assert_idle_and_whole,
    bounded,
    collect,
    in_engine_steps,
    open_llm,
    stats_become,
)
from tests.support.refusals import invalid
from tests.support.tiny_models import tiny_model, tiny_tokenizer


@bounded
async def test_a_timeout_ends_a_stream_that_runs_and_one_that_waits(monkeypatch):
    async with open_llm(max_num_seqs=1) as llm:
        in_engine_steps(llm, monkeypatch, lambda _: time.sleep(0.01))  # no answer ends by itself
        runs = asyncio.create_task(collect(llm.generate([5] * 20, ENDLESS, timeout=1.5)))
        await asyncio.sleep(0.02)
        waits = asyncio.create_task(collect(llm.generate([6] * 20, ENDLESS, timeout=0.05)))
        (only,) = await waits
        assert (only.outputs[0].finish_reason, only.outputs[0].token_ids) == ("timeout", [])
        *_, last = await runs
        assert last.outputs[0].finish_reason == "timeout"
        expected = answers([[5] * 20], ENDLESS)[0][0]
        assert last.outputs[0].token_ids == expected[: len(last.outputs[0].token_ids)] != []
        await assert_idle_and_whole(llm)


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


@bounded
async def test_times_and_timeouts_count_from_the_call_and_not_from_when_the_prompt_is_ready():
    async with AsyncLLM(tiny_model(), tokenizer=SlowTokenizer(0.2), **OPTIONS) as llm:
        streams = [collect(llm.generate("the sea", GREEDY, timeout=t)) for t in (None, 0.3)]
        (*_, patient), (*_, hasty) = await asyncio.gather(*streams)
        assert patient.metrics.queue_time >= 0.2 and patient.metrics.ttft >= 0.2
        assert hasty.outputs[0].finish_reason == "timeout"  # its prompt is ready after 0.4 s
        await assert_idle_and_whole(llm)


@bounded
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


@bounded
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


@bounded
async def test_a_full_queue_refuses_and_takes_again_later():
    async with open_llm(max_num_seqs=1, max_queue=1) as llm:
        streams = [llm.generate([number] * 20, ENDLESS) for number in (5, 6)]
        await anext(streams[0])
        second = asyncio.create_task(anext(streams[1]))
        assert await stats_become(llm, num_waiting=1)
        with pytest.raises(QueueFullError, match="max_queue"):
            await anext(llm.generate([7], GREEDY))
        await streams[0].aclose()
        assert await answer(llm.generate([7], GREEDY)) == answers([[7]])[0]
        await second
        await streams[1].aclose()
        await assert_idle_and_whole(llm)


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
@bounded
async def test_bad_input_raises_before_anything_is_queued(prompt, options, named):
    async with open_llm() as llm:
        with pytest.raises((TypeError, ValueError), match=named):
            await anext(llm.generate(prompt, **options))
        assert (await llm.stats()).num_steps == 0
        await assert_idle_and_whole(llm)


@bounded
async def test_a_request_id_that_runs_already_is_refused_and_the_first_goes_on():
    async with open_llm() as llm:
        stream = llm.generate([5, 6, 7], ENDLESS, request_id="twin")
        seen = [await anext(stream)]
        with invalid("'twin' is running already"):
            await anext(llm.generate([8], GREEDY, request_id="twin"))
        seen += await collect(stream)
        assert seen[-1].outputs[0].token_ids == answers([[5, 6, 7]], ENDLESS)[0][0]
        await assert_idle_and_whole(llm)
