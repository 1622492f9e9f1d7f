"""Microseconds of a step's parts on the host, by clocks around the engine's functions."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from nanovllm import LLM, SamplingParams, engine, model_runner
from nanovllm.engine import LaunchedStep
from nanovllm.execution import mask_buffer
from nanovllm.execution.cuda_graphs import GraphExecutor
from nanovllm.execution.late_draw import LateDraw
from nanovllm.execution.step_inputs import StepPacking
from nanovllm.sampling.structured import BegunMasks
from nanovllm.scheduler import Scheduler

PARTS: list[tuple[str, Any, str]] = [
    ("step", engine.Engine, "step"),
    ("schedule", Scheduler, "schedule"),
    ("launch", LaunchedStep, "launch"),
    ("layout", model_runner, "build_layout"),
    ("executor's launch", GraphExecutor, "launch"),
    ("pack", StepPacking, "pack"),
    ("late draw", LateDraw, "launch"),
    ("draw with masks", LaunchedStep, "draw"),
    ("masks and their copy", mask_buffer.MaskBuffer, "upload"),
    ("masks begun", mask_buffer, "begin_masks"),
    ("masks finished", BegunMasks, "finish"),
    ("wait", LaunchedStep, "wait"),
    ("update", Scheduler, "update"),
    ("deliver", engine.Engine, "_deliver"),
]


def split_of(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> dict[str, float]:
    """Medians over the steps of a run that have any of the part; parts contain others."""
    found: dict[str, list[float]] = {}
    with ExitStack() as stack:
        for part, owner, name in PARTS:
            stack.enter_context(_timed(owner, name, found.setdefault(part, [])))
        llm.generate(prompts, params, use_tqdm=False)
    return {part: round(statistics.median(seconds) * 1e6, 1) for part, seconds in found.items() if seconds}


@contextmanager
def _timed(owner: Any, name: str, seconds: list[float]) -> Iterator[None]:
    own = vars(owner)[name]
    is_class_method = isinstance(own, classmethod)
    call: Callable[..., Any] = own.__func__ if is_class_method else own

    def timed(*args: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        try:
            return call(*args, **options)
        finally:
            seconds.append(time.perf_counter() - begin)

    with mock.patch.object(owner, name, classmethod(timed) if is_class_method else timed):
        yield
