"""Profile of a step: time per part, measured on the host around the engine's own calls.

A profiled run is slower than a plain one: compare shares only. On a GPU each part synchronises with the device; on a
CPU layers run one by one through the model's own Python, which counts as "dense".
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from nanovllm import model_runner
from nanovllm.attention import SdpaPlan
from nanovllm.engine import Engine
from nanovllm.fast.attention.cpp import CppPlan
from nanovllm.fast.gpu.cuda_graphs import GraphExecutor
from nanovllm.fast.layers.fused_layers import FusedStack
from nanovllm.flex import FlexPlan
from nanovllm.model import ModelBinding
from nanovllm.model_runner import ModelRunner
from nanovllm.sampler import Sampler
from nanovllm.scheduler import Scheduler

# Timed methods and the part that each counts for; nested calls of one part count once.
TIMED: tuple[tuple[Any, str, str], ...] = (
    (Engine, "step", "step"),
    (Scheduler, "schedule", "schedule"),
    (ModelRunner, "execute", "execute"),
    (model_runner, "build_layout", "inputs"),
    (ModelBinding, "forward_step", "forward"),
    (SdpaPlan, "attend", "attention"),
    (FlexPlan, "attend", "attention"),
    (CppPlan, "attend", "attention"),
    (CppPlan, "attend_into", "attention"),
    (GraphExecutor, "launch", "graph"),
    (GraphExecutor, "_upload", "inputs"),
    (Sampler, "sample", "sampling"),
    (Scheduler, "update", "update"),
    (Engine, "_deliver", "deliver"),
)


@dataclass(slots=True)
class StepProfile:
    """Seconds per part, summed over the steps within `recording`."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: Counter[str] = field(default_factory=Counter)
    _open: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Time all engines of the process."""
        with ExitStack() as stack:
            stack.callback(setattr, FusedStack, "is_used", FusedStack.is_used)
            FusedStack.is_used = False
            for owner, name, part in TIMED:
                original = getattr(owner, name)
                stack.callback(setattr, owner, name, original)
                setattr(owner, name, self._timed(original, part))
            yield

    def _timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._open[part]:
                return function(*args, **kwargs)
            self._open[part] += 1
            _wait_for_device()
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                _wait_for_device()
                self.seconds[part] += time.perf_counter() - begin
                self.calls[part] += 1
                self._open[part] -= 1

        return timed

    def parts(self) -> dict[str, float]:
        """Return the seconds of disjoint parts that add up to those of the steps."""
        seconds = self.seconds
        if self.calls["graph"]:  # one launch: the host cannot time its parts
            execute = {"build inputs": seconds["inputs"], "captured step": seconds["execute"] - seconds["inputs"]}
        else:
            execute = {
                "build inputs": seconds["execute"] - seconds["forward"] - seconds["sampling"],
                "dense": seconds["forward"] - seconds["attention"],
                "attention": seconds["attention"],
                "sampling": seconds["sampling"],
            }
        parts = {"schedule": seconds["schedule"], **execute, "update": seconds["update"] + seconds["deliver"]}
        return parts | {"other": seconds["step"] - sum(parts.values())}


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
