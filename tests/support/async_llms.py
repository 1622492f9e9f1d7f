"""An `AsyncLLM` over the tiny model, readers of its streams, and the offline engine's answers to compare with."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any

import pytest

from nanovllm import LLM, AsyncLLM, RequestOutput, SamplingParams
from nanovllm.features.groups.block_checks import check_scheduler
from tests.support.tiny_models import tiny_model, tiny_tokenizer

OPTIONS: dict[str, Any] = {"enforce_eager": True, "block_size": 16, "num_kv_blocks": 129, "max_model_len": 512}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=450)
KINDS = ["cumulative", "delta", "final"]


def open_llm(**options: Any) -> AsyncLLM:
    return AsyncLLM(tiny_model(num_layers=1), tokenizer=tiny_tokenizer(), **(OPTIONS | options))


def bounded(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Wrap an async test for pytest, with a timeout of two minutes."""

    @functools.wraps(test)
    def run(*arguments: Any, **options: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **options), 120.0))

    return run


@functools.cache
def offline() -> LLM:
    """The offline engine over the same model."""
    return LLM(tiny_model(num_layers=1), tokenizer=tiny_tokenizer(), **OPTIONS)


def answers(prompts: list[Any], params: Any = GREEDY) -> list[tuple[list[int], str]]:
    outputs = offline().generate(prompts, params, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].text) for output in outputs]


async def collect(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


async def answer(stream: AsyncIterator[RequestOutput], kind: str = "cumulative") -> tuple[list[int], str]:
    """Read a stream to its end; returns tokens and text."""
    completions = [output.outputs[0] for output in await collect(stream)]
    if kind != "delta":
        return completions[-1].token_ids, completions[-1].text
    return [token_id for c in completions for token_id in c.token_ids], "".join(c.text for c in completions)


async def assert_idle_and_whole(llm: AsyncLLM) -> None:
    stats = await llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    await llm._run(lambda engine: check_scheduler(engine.scheduler))
    assert not llm._router._streams


async def comes_true(condition: Callable[[], Awaitable[bool]], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if await condition():
            return True
        await asyncio.sleep(0.005)
    return False


def in_engine_steps(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, before: Callable[[Any], None]) -> None:
    """Call `before(batch)` in the engine's thread before each execution."""
    runner = llm._engine_thread._engine.model_runner
    execute = runner.execute

    def watched(batch: Any) -> Any:
        before(batch)
        return execute(batch)

    monkeypatch.setattr(runner, "execute", watched)


@contextlib.contextmanager
def slow_steps(llm: AsyncLLM, seconds: float = 0.02) -> Iterator[None]:
    """Within the block no answer ends before its client acts: each step takes `seconds` more."""
    with pytest.MonkeyPatch.context() as patch:
        in_engine_steps(llm, patch, lambda _: time.sleep(seconds))
        yield
