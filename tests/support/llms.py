"""An `LLM` over the tiny model: open it, make it fail, check that it is idle with every block free."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.features.groups.block_checks import check_scheduler
from tests.support.tiny_models import tiny_model, tiny_tokenizer

OPTIONS: dict[str, Any] = {"enforce_eager": True, "block_size": 16, "num_kv_blocks": 129, "max_model_len": 512}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SAMPLED = SamplingParams(seed=7, max_tokens=12)


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)


def open_llm(model: Any = None, **options: Any) -> LLM:
    return LLM(model or tiny_model(num_layers=1), tokenizer=tiny_tokenizer(), **(OPTIONS | options))


@functools.cache
def shared_llm() -> LLM:
    """An engine shared by tests that leave nothing behind, except in the prefix cache."""
    return open_llm()


def generate(llm: LLM, prompts: Any, params: Any = GREEDY, **options: Any) -> list[Any]:
    return llm.generate(prompts, params, use_tqdm=False, **options)


def submit(engine: Any, name: str, *request: Any, **options: Any) -> None:
    """Queue a request of this name, as a front door does."""
    engine.add(engine.input_processor.process_one(name, *request, **options))


def token_ids(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def script(monkeypatch: pytest.MonkeyPatch, llm: LLM, text: str) -> list[int]:
    """Make the model generate `text` for any prompt; returns the text's tokens."""
    says = llm.tokenizer(text)["input_ids"]

    def sample(logits, sequences, positions, latest, report):
        indices = [position - s.num_prompt_tokens for s, position in zip(sequences, positions, strict=True)]
        return torch.tensor([says[index % len(says)] for index in indices])

    monkeypatch.setattr(llm._engine.model_runner.sampler, "sample", sample)
    return says


def fail_in_step(monkeypatch: pytest.MonkeyPatch, llm: LLM, number: int, error: BaseException) -> None:
    """Raise within the `number`-th step from now, after its KV is written and before its tokens are sampled."""
    sampler, steps = llm._engine.model_runner.sampler, iter(range(1, 10_000))
    sample = sampler.sample

    def failing(*arguments):
        if next(steps) == number:
            raise error
        return sample(*arguments)

    monkeypatch.setattr(sampler, "sample", failing)


def check_engine(llm: LLM) -> None:
    """Verify the block manager's invariants against every sequence of an engine."""
    check_scheduler(llm._engine.scheduler)


def assert_idle_and_whole(llm: LLM) -> None:
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    assert stats.num_free_blocks == stats.num_blocks
    check_engine(llm)


def ends_within(seconds: float, function: Callable[[], Any]) -> bool:
    """Whether a function ends in time; runs it in a thread, which goes on in the background if not."""

    def run() -> None:
        try:
            function()
        except Exception:  # it ended
            return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()
