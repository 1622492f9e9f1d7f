"""Predictions of steps for budgets of tests: by a formula, or without sense."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from nanovllm.batch import ScheduledSequence
from nanovllm.features.goals.step_budget import StepBudget

BLOCK, MOST = 4, 256


class Costs:
    """A millisecond a step, a decode and a token of a chunk, and a microsecond a pair; nothing was read before 0."""

    last_time, error, num_misses = 0.0, None, 0

    def __init__(self, sizes: Sequence[int] = ()) -> None:
        self._sizes = sizes

    def sizes(self, num_decodes: int, limit: int) -> Sequence[int]:
        return [size for size in self._sizes or range(1, MOST + 1) if size <= limit]

    def forecast(self, decodes: Sequence[ScheduledSequence], start: int) -> Callable[[int], float]:
        return lambda size: 1e-3 * (1 + len(decodes) + size) + 1e-6 * start * size


class RandomCosts(Costs):
    """Predictions without sense, which no request may starve of."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    def forecast(self, decodes: Sequence[ScheduledSequence], start: int) -> Callable[[int], float]:
        scale = self._rng.choice((0.0, 1e-3, 1.0, 1e6))
        return lambda size: scale * size


def make_budget(
    goal: float, costs: Any = None, *, now: float = 0.0, clock: Callable[[], float] | None = None, **options: Any
) -> StepBudget:
    defaults = {"itl_goal": goal, "ttft_goal": None, "max_num_batched_tokens": MOST, "block_size": BLOCK}
    defaults |= {"long_prefill_token_threshold": MOST, "overlap": False}
    config: Any = SimpleNamespace(**(defaults | options))
    return StepBudget(config, costs or Costs(), clock or (lambda: now))
