"""An `AsyncLLM` over the tiny model, readers of its streams, and the offline engine's answers to compare with."""

import asyncio
import contextlib
import time

import pytest

from nanovllm import AsyncLLM, SamplingParams
from nanovllm.features.groups.block_checks import check_scheduler
from tests.support.llms import GREEDY, OPTIONS, generate
from tests.support.llms import shared_llm as offline
from tests.support.tiny_models import tiny_model, tiny_tokenizer

ENDLESS = SamplingParams(temperature=0.0, max_tokens=450)
KINDS = ["cumulative", "delta", "final"]


def open_llm(**options):
    return AsyncLLM(tiny_model(num_layers=1), tokenizer=tiny_tokenizer(), **(OPTIONS | options))


def answers(prompts, params=GREEDY):
    outputs = generate(offline(), prompts, params)
    return [(output.outputs[0].token_ids, output.outputs[0].text) for output in outputs]


async def collect(stream):
    return [output async for output in stream]


async def answer(stream, kind="cumulative"):
    """Read a stream to its end; returns tokens and text."""
    completions = [output.outputs[0] for output in await collect(stream)]
    if kind != "delta":
        return completions[-1].token_ids, completions[-1].text
    return [token_id for c in completions for token_id in c.token_ids], "".join(c.text for c in completions)


async def assert_idle_and_whole(llm):
    stats = await llm.stats()
    assert stats.num_running == 0 and stats.num_waiting == 0 and stats.num_used_blocks == 0
    await llm._run(lambda engine: check_scheduler(engine.scheduler))
    assert not llm._router._streams


async def comes_true(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if await condition():
            return True
        await asyncio.sleep(0.005)
    return False


async def becomes_true(condition):
    """Whether a condition that awaits nothing comes true."""

    async def holds():
        return condition()

    return await comes_true(holds)


async def stats_become(llm, **values):
    """Whether statistics come to have these values."""

    async def are():
        stats = await llm.stats()
        return all(getattr(stats, name) == value for name, value in values.items())

    return await comes_true(are)


def in_engine_steps(llm, monkeypatch, before):
    """Call `before(batch)` in the engine's thread before each execution."""
    runner = llm._engine_thread._engine.model_runner
    execute = runner.execute

    def watched(batch):
        before(batch)
        return execute(batch)

    monkeypatch.setattr(runner, "execute", watched)


@contextlib.contextmanager
def slow_steps(llm, seconds=0.02):
    """Within the block no answer ends before its client acts: each step takes `seconds` more."""
    with pytest.MonkeyPatch.context() as patch:
        in_engine_steps(llm, patch, lambda _: time.sleep(seconds))
        yield
