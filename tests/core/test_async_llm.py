"""`AsyncLLM`: many clients, each with the tokens of the offline engine, whatever the others do, and an end for all."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, AsyncLLM, EngineDeadError, QueueFullError, RequestOutput, SamplingParams
from nanovllm.errors import DeviceError
from nanovllm.model_runner import ModelRunner
from tests.support.tiny_models import VOCAB_SIZE, random_prompts, tiny_model, tiny_tokenizer

OPTIONS: dict[str, Any] = {"enforce_eager": True, "block_size": 16, "num_kv_blocks": 129, "max_model_len": 512}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=450)
KINDS = ["cumulative", "delta", "final"]


def open_llm(**options: Any) -> AsyncLLM:
    return AsyncLLM(tiny_model(), tokenizer=tiny_tokenizer(), **(OPTIONS | options))


def bounded(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """An async test as one that pytest runs; a minute is far more than any of them needs."""

    @functools.wraps(test)
    def run(*arguments: Any, **options: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **options), 60.0))

    return run


@functools.cache
def offline() -> LLM:
    return LLM(tiny_model(), tokenizer=tiny_tokenizer(), **OPTIONS)


def answers(prompts: list[Any], params: Any = GREEDY) -> list[tuple[list[int], str]]:
    outputs = offline().generate(prompts, params, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].text) for output in outputs]


async def collect(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


async def answer(stream: AsyncIterator[RequestOutput], kind: str = "cumulative") -> tuple[list[int], str]:
    """Tokens and text of a whole stream."""
    completions = [output.outputs[0] for output in await collect(stream)]
    if kind != "delta":
        return completions[-1].token_ids, completions[-1].text
    return [token_id for c in completions for token_id in c.token_ids], "".join(c.text for c in completions)


async def assert_idle_and_whole(llm: AsyncLLM) -> None:
    stats = await llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    await llm._run(lambda engine: engine.check_integrity())
    assert not llm._router._streams


async def comes_true(condition: Callable[[], Awaitable[bool]], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if await condition():
            return True
        await asyncio.sleep(0.005)
    return False


def in_engine_steps(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, before: Callable[[Any], None]) -> None:
    """Call `before(batch)` at the begin of each execution, in the engine's thread."""
    runner = llm._engine_thread._engine.model_runner
    execute = runner.execute

    def watched(batch: Any) -> Any:
        before(batch)
        return execute(batch)

    monkeypatch.setattr(runner, "execute", watched)


# -------------------------------------------------------------------------------------------------------------- outputs


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@bounded
async def test_a_stream_gives_the_tokens_and_text_of_the_offline_engine(kind, overlap):
    async with open_llm(overlap=overlap) as llm:
        for prompt in ("The capital of France is", [5, 6, 7]):
            assert await answer(llm.generate(prompt, GREEDY, output_kind=kind), kind) == answers([prompt])[0]
        await assert_idle_and_whole(llm)


@bounded
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


@bounded
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


@bounded
async def test_a_timeout_ends_all_samples_of_a_request():
    params = SamplingParams(seed=3, n=3, max_tokens=450)
    async with open_llm() as llm:
        *_, last = await collect(llm.generate([5, 6, 7], params, timeout=0.1))
        assert [c.finish_reason for c in last.outputs] == ["timeout"] * 3
        await assert_idle_and_whole(llm)


@bounded
async def test_chat_answers_through_the_chat_template():
    async with open_llm() as llm:
        *_, last = await collect(llm.chat([{"role": "user", "content": "What is it?"}], GREEDY, request_id="mine"))
    assert tiny_tokenizer().decode(last.prompt_token_ids) == "<|user|>What is it?<|end|><|assistant|>"
    assert last.request_id == "mine"


def mixed_requests(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"top_k": 20}, {"top_p": 0.8}]
    params = [SamplingParams(seed=n, max_tokens=8 + n % 9, **kinds[n % len(kinds)]) for n in range(count)]
    return random_prompts(count, low=1, high=60, seed=1), params


@pytest.mark.parametrize("options", [{}, {"overlap": True, "num_kv_blocks": 40}], ids=["roomy", "overlap, few blocks"])
@bounded
async def test_two_hundred_streams_at_once_each_give_the_tokens_of_the_offline_engine(options):
    prompts, params = mixed_requests(200)
    expected = answers(prompts, params)

    async def client(llm: AsyncLLM, number: int) -> tuple[list[int], str]:
        kind = KINDS[number % 3]
        await asyncio.sleep(number % 7 * 0.01)
        stream = llm.generate(prompts[number], params[number], output_kind=kind, priority=number % 2)
        return await answer(slowly(stream, 0.002 if number % 5 == 0 else 0.0), kind)

    async with open_llm(**options) as llm:
        assert await asyncio.gather(*(client(llm, number) for number in range(200))) == expected
        await assert_idle_and_whole(llm)


async def slowly(stream: AsyncIterator[RequestOutput], seconds: float) -> AsyncIterator[RequestOutput]:
    async for output in stream:
        yield output
        await asyncio.sleep(seconds)


@bounded
async def test_clients_in_several_event_loops_share_one_engine():
    prompts = random_prompts(4)
    async with open_llm() as llm:

        def in_another_loop(prompt: list[int]) -> tuple[list[int], str]:
            return asyncio.run(answer(llm.generate(prompt, GREEDY)))

        elsewhere = [asyncio.to_thread(in_another_loop, prompt) for prompt in prompts]
        here = answer(llm.generate([5, 6, 7], GREEDY))
        assert await asyncio.gather(*elsewhere, here) == answers([*prompts, [5, 6, 7]])
        await assert_idle_and_whole(llm)


# ----------------------------------------------------------------------------------------------------- leaving a stream


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("how", ["cancel", "aclose", "drop", "abort"])
@bounded
async def test_a_stream_that_is_left_frees_its_blocks_within_a_step_and_no_other_is_hurt(how, overlap):
    async with open_llm(overlap=overlap) as llm:
        neighbour = asyncio.create_task(answer(llm.generate([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=60))))
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
        assert await neighbour == answers([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=60))[0]
        await assert_idle_and_whole(llm)


@bounded
async def test_cancelling_before_the_request_is_queued_queues_nothing(monkeypatch):
    async with open_llm() as llm:
        is_tokenising, may_go_on = threading.Event(), threading.Event()
        prepare = llm._input_processor.process_each

        def slow(*arguments: Any, **options: Any) -> Any:
            is_tokenising.set()
            may_go_on.wait(10)
            return prepare(*arguments, **options)

        monkeypatch.setattr(llm._input_processor, "process_each", slow)
        task = asyncio.create_task(collect(llm.generate([5] * 40, ENDLESS)))
        await asyncio.to_thread(is_tokenising.wait, 10)
        task.cancel()
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.05)
        assert (await llm.stats()).num_steps == 0
        await assert_idle_and_whole(llm)


@bounded
async def test_aborting_what_does_not_run_says_so():
    async with open_llm() as llm:
        assert not await llm.abort("nobody")


@pytest.mark.parametrize("pause", [0.0, 0.1], ids=["at once", "with a wake-up on its way"])
@bounded
async def test_streams_of_an_event_loop_that_is_closed_are_aborted(pause):
    async with open_llm() as llm:
        left: list[Any] = []

        def forget() -> None:
            loop = asyncio.new_event_loop()
            stream = llm.generate([9] * 100, ENDLESS)
            left.append(stream)
            loop.run_until_complete(anext(stream))
            time.sleep(pause)
            loop.close()

        await asyncio.to_thread(forget)

        async def is_idle() -> bool:
            return (await llm.stats()).num_used_blocks == 0

        assert await comes_true(is_idle)
        assert (await llm.stats()).num_output_tokens < 450
        await assert_idle_and_whole(llm)
        assert not llm._router._due
        left.clear()
        gc.collect()


# -------------------------------------------------------------------------------------------------------- slow readers


@pytest.mark.parametrize("kind", ["cumulative", "delta"])
@bounded
async def test_a_client_that_does_not_read_stalls_nobody_and_finds_everything_in_one_output(kind):
    params = SamplingParams(temperature=0.0, max_tokens=200)
    async with open_llm() as llm:
        idle = llm.generate([9] * 20, params, output_kind=kind, request_id="idle")
        first = await anext(idle)
        assert await answer(llm.generate([5, 6, 7], GREEDY)) == answers([[5, 6, 7]])[0]

        async def has_ended() -> bool:
            return (await llm.stats()).num_running == 0

        assert await comes_true(has_ended)
        (last,) = await collect(idle)
        token_ids, text = answers([[9] * 20], params)[0]
        shown = len(first.outputs[0].token_ids) if kind == "delta" else 0
        assert (last.outputs[0].token_ids, last.finished) == (token_ids[shown:], True)
        assert (first.outputs[0].text if kind == "delta" else "") + last.outputs[0].text == text


@bounded
async def test_an_event_loop_that_stands_still_keeps_one_output_for_each_stream_and_one_call():
    async with open_llm() as llm:
        streams = [llm.generate([number] * 20, ENDLESS, output_kind="delta") for number in range(4)]
        for stream in streams:
            await anext(stream)
        loop = asyncio.get_running_loop()
        before = (await llm.stats()).num_steps
        time.sleep(0.5)  # the client stands still
        waiting = len(loop._ready)  # type: ignore[attr-defined]
        assert (await llm.stats()).num_steps > before + 20
        assert waiting <= 2
        for stream in streams:
            await stream.aclose()
        await assert_idle_and_whole(llm)


# -------------------------------------------------------------------------------------------------------------- limits


@bounded
async def test_a_timeout_ends_a_stream_that_runs_and_one_that_waits():
    async with open_llm(max_num_seqs=1) as llm:
        runs = asyncio.create_task(collect(llm.generate([5] * 20, ENDLESS, timeout=0.2)))
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

    def __init__(self, seconds: float) -> None:
        self._tokenizer, self._seconds = tiny_tokenizer(), seconds
        self.is_busy = threading.Event()

    def __call__(self, text: str) -> Any:
        self.is_busy.set()
        time.sleep(self._seconds)
        return self._tokenizer(text)

    def __getattr__(self, name: str) -> Any:
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
        with pytest.raises(ValueError, match="'early' is being prepared"):
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
async def test_a_request_whose_event_loop_is_closed_is_aborted_though_it_has_nothing_to_tell_yet(monkeypatch):
    monkeypatch.setattr("nanovllm.streaming.engine_thread.CLIENT_CHECK_SECONDS", 0.01)
    async with open_llm() as llm:

        def leave() -> None:
            loop = asyncio.new_event_loop()
            stream = llm.generate([5] * 20, ENDLESS, output_kind="final")
            task = loop.create_task(anext(stream))

            async def begun() -> None:
                while not (await llm.stats()).num_running:
                    await asyncio.sleep(0.001)

            loop.run_until_complete(begun())
            task._log_destroy_pending = False
            loop.close()
            abandoned.append((task, stream))  # still referred to, so that nothing else ends it

        abandoned: list[Any] = []
        await asyncio.to_thread(leave)

        async def is_idle() -> bool:
            stats = await llm.stats()
            return stats.num_running == stats.num_used_blocks == 0

        assert await comes_true(is_idle)
        assert (await llm.stats()).num_output_tokens < 400


@bounded
async def test_a_full_queue_refuses_and_takes_again_later():
    async with open_llm(max_num_seqs=1, max_queue=1) as llm:
        streams = [llm.generate([number] * 20, ENDLESS) for number in (5, 6)]
        await anext(streams[0])
        second = asyncio.create_task(anext(streams[1]))

        async def waits() -> bool:
            return (await llm.stats()).num_waiting == 1

        assert await comes_true(waits)
        with pytest.raises(QueueFullError, match="max_queue"):
            await anext(llm.generate([7], GREEDY))
        await streams[0].aclose()
        assert await answer(llm.generate([7], GREEDY)) == answers([[7]])[0]
        await second
        await streams[1].aclose()
        await assert_idle_and_whole(llm)


@pytest.mark.parametrize(
    ("prompt", "options", "named"),
    [
        ("", {}, "empty"),
        ([], {}, "empty"),
        ([VOCAB_SIZE], {}, "vocabulary"),
        ([5] * 512, {}, "max_model_len"),
        (["one", "two"], {}, "whole numbers"),
        (5, {}, "a string or a list of token ids"),
        ([5], {"sampling_params": "greedy"}, "SamplingParams"),
        ([5], {"priority": 1.5}, "priority"),
        ([5], {"timeout": 0}, "timeout"),
        ([5], {"cache_salt": 5}, "cache_salt"),
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


@pytest.mark.parametrize(
    "messages", [[], "hello", [5], [[]], [{"role": "user"}], {"role": "user", "content": "hello"}], ids=str
)
@bounded
async def test_a_bad_conversation_is_refused(messages):
    async with open_llm() as llm:
        with pytest.raises(ValueError, match="conversation"):
            await anext(llm.chat(messages))


@bounded
async def test_a_request_id_that_runs_already_is_refused_and_the_first_goes_on():
    async with open_llm() as llm:
        stream = llm.generate([5, 6, 7], GREEDY, request_id="twin")
        seen = [await anext(stream)]
        with pytest.raises(ValueError, match="'twin' is running already"):
            await anext(llm.generate([8], GREEDY, request_id="twin"))
        seen += await collect(stream)
        assert seen[-1].outputs[0].token_ids == answers([[5, 6, 7]])[0][0]
        await assert_idle_and_whole(llm)


# ----------------------------------------------------------------------------------------------------------- idle time


@bounded
async def test_steps_are_prepared_while_nobody_wants_anything_one_at_a_time(monkeypatch):
    steps, prepared, may_go_on = [], [], threading.Event()

    def capture_ahead(runner: ModelRunner) -> bool:
        prepared.append(len(steps))
        may_go_on.wait(20.0)
        return len(prepared) < 5

    async def all_are_prepared() -> bool:
        return len(prepared) == 5

    async def one_is_begun() -> bool:
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
        assert len(prepared) == 5  # none was left


@bounded
async def test_a_step_that_cannot_be_prepared_does_not_end_the_engine(monkeypatch, caplog):
    def capture_ahead(runner: ModelRunner) -> bool:
        raise torch.OutOfMemoryError("no memory for a graph")

    async def it_was_tried() -> bool:
        return "not prepared ahead any more" in caplog.text

    monkeypatch.setattr(ModelRunner, "capture_ahead", capture_ahead)
    monkeypatch.setattr("nanovllm.streaming.engine_thread.IDLE_SECONDS", 0.0)
    async with open_llm(prepares_when_idle=True) as llm:
        assert await comes_true(it_was_tried)
        assert await answer(llm.generate([5, 6, 7], GREEDY)) == answers([[5, 6, 7]])[0]
        await assert_idle_and_whole(llm)
    assert caplog.text.count("not prepared ahead any more") == 1


@bounded
async def test_a_device_that_fails_while_a_step_is_prepared_ends_the_engine(monkeypatch):
    def capture_ahead(runner: ModelRunner) -> bool:
        raise DeviceError("CUDA error: an illegal memory access was encountered")

    async def is_dead() -> bool:
        return llm.is_dead

    monkeypatch.setattr(ModelRunner, "capture_ahead", capture_ahead)
    monkeypatch.setattr("nanovllm.streaming.engine_thread.IDLE_SECONDS", 0.0)
    async with open_llm(prepares_when_idle=True) as llm:
        assert await comes_true(is_dead)
        with pytest.raises(EngineDeadError, match="illegal memory access"):
            await anext(llm.generate([5, 6, 7], GREEDY))


@bounded
async def test_an_engine_that_prepares_steps_can_be_closed(monkeypatch):
    prepared = []

    async def two_are_begun() -> bool:
        return len(prepared) >= 2

    def capture_ahead(runner: ModelRunner) -> bool:
        prepared.append(time.sleep(0.01))
        return True  # there is no end of them

    monkeypatch.setattr(ModelRunner, "capture_ahead", capture_ahead)
    monkeypatch.setattr("nanovllm.streaming.engine_thread.IDLE_SECONDS", 0.0)
    llm = open_llm(prepares_when_idle=True)
    assert await comes_true(two_are_begun)
    await llm.close()


@bounded
async def test_nothing_is_prepared_unless_it_was_asked_for(monkeypatch):
    prepared = []
    monkeypatch.setattr(ModelRunner, "capture_ahead", lambda runner: prepared.append(1))
    monkeypatch.setattr("nanovllm.streaming.engine_thread.IDLE_SECONDS", 0.0)
    async with open_llm() as llm:
        assert await answer(llm.generate([5, 6, 7], GREEDY)) == answers([[5, 6, 7]])[0]
        await asyncio.sleep(0.05)
    assert not prepared


# ------------------------------------------------------------------------------------------------------------- failures


@bounded
async def test_a_step_that_fails_now_and_then_is_tried_again_and_nobody_can_tell(monkeypatch):
    prompts = random_prompts(5)
    async with open_llm() as llm:
        numbers = iter(range(1, 10_000))

        def fail_sometimes(batch: Any) -> None:
            if next(numbers) in (1, 4, 5, 9):
                raise RuntimeError("out of memory, for a moment")

        in_engine_steps(llm, monkeypatch, fail_sometimes)
        streams = [answer(llm.generate(prompt, GREEDY, output_kind="delta"), "delta") for prompt in prompts]
        assert await asyncio.gather(*streams) == answers(prompts)
        assert (await llm.stats()).num_failed_steps == 4
        await assert_idle_and_whole(llm)


@bounded
async def test_steps_that_fail_here_and_there_end_no_long_prompt(monkeypatch):
    prompt = random_prompts(1, low=300, high=300)[0]
    async with open_llm(max_num_batched_tokens=32, max_num_seqs=4) as llm:
        numbers = iter(range(1, 10_000))

        def fail_sometimes(batch: Any) -> None:
            if next(numbers) in (2, 3, 6, 7, 10, 11):
                raise RuntimeError("out of memory, for a moment")

        in_engine_steps(llm, monkeypatch, fail_sometimes)
        assert await answer(llm.generate(prompt, GREEDY)) == answers([prompt])[0]
        assert (await llm.stats()).num_failed_steps == 6


@pytest.mark.parametrize("overlap", [False, True])
@bounded
async def test_a_request_that_makes_every_step_fail_ends_with_an_error_and_its_neighbours_go_on(monkeypatch, overlap):
    long = SamplingParams(temperature=0.0, max_tokens=60)
    async with open_llm(overlap=overlap) as llm:

        def choke(batch: Any) -> None:
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


@bounded
async def test_steps_that_always_fail_end_their_requests_and_not_in_an_endless_loop(monkeypatch):
    async with open_llm() as llm:
        num_tried = 0

        def fail(batch: Any) -> None:
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
@bounded
async def test_an_error_that_ends_the_engine_reaches_every_client_with_its_cause(monkeypatch, error):
    llm = open_llm(max_num_seqs=2)
    engine = llm._engine_thread._engine
    streams = [llm.generate([number] * 20, ENDLESS) for number in range(2)]
    for stream in streams:
        await anext(stream)
    waiting = asyncio.create_task(anext(llm.generate([7], ENDLESS)))

    async def waits() -> bool:
        return (await llm.stats()).num_waiting == 1

    assert await comes_true(waits)

    def fail(*_: Any) -> Any:
        raise error

    is_device_error = isinstance(error, DeviceError)
    monkeypatch.setattr(
        engine.model_runner if is_device_error else engine.scheduler, "execute" if is_device_error else "schedule", fail
    )
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


@bounded
async def test_a_tokenizer_that_cannot_decode_one_answer_hurts_no_neighbour(monkeypatch):
    prompts = random_prompts(3)
    expected = answers(prompts)
    broken = expected[1][0][3]
    assert all(broken not in expected[number][0] for number in (0, 2))
    async with open_llm() as llm:
        decode = llm.tokenizer.decode

        def failing(ids: list[int], **options: Any) -> str:
            if broken in ids:
                raise IndexError("piece id is out of range")
            return decode(ids, **options)

        monkeypatch.setattr(llm.tokenizer, "decode", failing)
        for kind in KINDS:
            streams = [collect(llm.generate(prompt, GREEDY, output_kind=kind)) for prompt in prompts]
            first, second, third = [outputs[-1] for outputs in await asyncio.gather(*streams)]
            assert second.outputs[0].finish_reason == "error"
            assert "piece id is out of range" in second.error
            if kind == "cumulative":  # what was shown is not taken back
                assert second.outputs[0].text and expected[1][1].startswith(second.outputs[0].text)
            assert [o.outputs[0].finish_reason for o in (first, third)] == ["length", "length"]
        await assert_idle_and_whole(llm)


@bounded
async def test_a_tokenizer_that_cannot_encode_a_prompt_hurts_its_caller_alone(monkeypatch):
    async with open_llm() as llm:
        stream = llm.generate([5, 6, 7], GREEDY)
        await anext(stream)

        def failing(text: str) -> Any:
            raise OverflowError("too much text")

        monkeypatch.setattr(llm._input_processor, "_tokenizer", failing)
        with pytest.raises(OverflowError, match="too much text"):
            await anext(llm.generate("text", GREEDY))
        assert await answer(stream) == answers([[5, 6, 7]])[0]


@bounded
async def test_a_request_whose_logits_are_not_finite_ends_alone():
    model = tiny_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[99] = float("nan")
    async with AsyncLLM(model, tokenizer=tiny_tokenizer(), **OPTIONS) as llm:
        good, bad = await asyncio.gather(
            answer(llm.generate([5, 6, 7], GREEDY)), collect(llm.generate([4, 99, 3] * 20, GREEDY))
        )
        assert good == answers([[5, 6, 7]])[0]
        assert "finite" in bad[-1].error
        await assert_idle_and_whole(llm)


@bounded
async def test_a_hook_that_raises_in_the_engines_thread_ends_nothing():
    def hook(record: Any) -> None:
        raise ValueError("no such gauge")

    async with open_llm(on_step=hook) as llm:
        assert await answer(llm.generate([5, 6, 7], GREEDY)) == answers([[5, 6, 7]])[0]
        assert (await llm.stats()).hook_error == "ValueError: no such gauge"
        assert not llm.is_dead


# -------------------------------------------------------------------------------------------------------------- closing


@pytest.mark.parametrize("overlap", [False, True])
@bounded
async def test_closing_ends_open_streams_with_what_they_have(overlap):
    llm = open_llm(max_num_seqs=2, overlap=overlap)
    streams = [llm.generate([number] * 20, ENDLESS) for number in range(3)]
    for stream in streams[:2]:
        await anext(stream)
    tasks = [asyncio.create_task(collect(stream)) for stream in streams]
    await asyncio.sleep(0.05)
    await asyncio.gather(llm.close(), llm.close())
    ends = [outputs[-1].outputs[0] for outputs in await asyncio.gather(*tasks)]
    assert [end.finish_reason for end in ends] == ["abort"] * 3
    assert [len(end.token_ids) > 0 for end in ends] == [True, True, False]
    assert not llm._engine_thread._thread.is_alive()
    for use in (lambda: anext(llm.generate([5])), llm.stats, lambda: llm.abort("a")):
        with pytest.raises(RuntimeError, match="closed; build a new one"):
            await use()
    await llm.close()


@bounded
async def test_a_stream_closed_after_its_engine_does_nothing():
    llm = open_llm()
    stream = llm.generate([5] * 20, ENDLESS)
    await anext(stream)
    await llm.close()
    await stream.aclose()


def test_an_engine_that_is_forgotten_ends_its_thread():
    llm = open_llm()
    thread, gone = llm._engine_thread._thread, weakref.ref(llm)
    del llm
    gc.collect()
    thread.join(20)
    assert gone() is None
    assert not thread.is_alive()


def test_a_program_that_forgets_to_close_ends():
    script = """
        import asyncio
        from nanovllm import AsyncLLM, SamplingParams
        from tests.tiny_models import tiny_model

        llm = AsyncLLM(tiny_model(), enforce_eager=True, block_size=16, num_kv_blocks=65, max_model_len=1024)

        async def main():
            stream = llm.generate([5, 6, 7], SamplingParams(max_tokens=900, ignore_eos=True))
            await anext(stream)
            asyncio.get_running_loop().kept = stream

        asyncio.run(main())
        stream = None
        loop = asyncio.new_event_loop()
        loop.run_until_complete(anext(llm.generate([8, 9], SamplingParams(max_tokens=900, ignore_eos=True))))
        print("done")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert "Traceback" not in done.stderr


@bounded
async def test_a_live_module_is_its_owners_again_after_closing():
    model = tiny_model()
    before = sorted(vars(model.model.layers[0].self_attn))
    async with AsyncLLM(model, tokenizer=tiny_tokenizer(), **OPTIONS) as llm:
        async with aclosing(llm.generate([5, 6, 7], ENDLESS)) as stream:
            await anext(stream)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.flip(0))
        await llm.weights_changed()
        changed = await answer(llm.generate([5, 6, 7], GREEDY))
    assert changed != answers([[5, 6, 7]])[0]
    assert sorted(vars(model.model.layers[0].self_attn)) == before


@bounded
async def test_submitted_prompts_are_queued_together_under_their_ids_or_not_at_all():
    async with open_llm(max_num_seqs=2, max_queue=2) as llm:
        with pytest.raises(QueueFullError):
            await llm.submit([[5], [6], [7], [8], [9]], GREEDY)
        outputs = await llm.submit([[5, 6], [7]], GREEDY, request_ids=["a", "b"], output_kind="final")
        with pytest.raises(ValueError, match="'b' is running already"):
            await llm.submit([[5], [6]], GREEDY, request_ids=["c", "b"])
        got = {output.request_id: output.outputs[0].token_ids async for output in outputs}
        assert [got["a"], got["b"]] == [token_ids for token_ids, _ in answers([[5, 6], [7]])]
        await assert_idle_and_whole(llm)


@bounded
async def test_closing_submitted_prompts_aborts_those_that_are_unfinished():
    async with open_llm() as llm:
        outputs = await llm.submit([[5, 6, 7], [6], [7]], ENDLESS, output_kind="delta")
        first = await anext(outputs)
        await outputs.aclose()
        assert not first.finished
        assert [output async for output in outputs] == []
        await assert_idle_and_whole(llm)


@pytest.mark.parametrize(
    ("prompts", "ids", "error"),
    [
        ("text", None, TypeError),
        ([], None, ValueError),
        ([[5], [6]], ["a"], ValueError),
        ([[5], [6]], ["a", "a"], ValueError),
    ],
)
@bounded
async def test_prompts_that_cannot_be_submitted_are_refused(prompts, ids, error):
    async with open_llm() as llm:
        with pytest.raises(error):
            await llm.submit(prompts, request_ids=ids)
        await assert_idle_and_whole(llm)
