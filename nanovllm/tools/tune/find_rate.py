"""Highest arrival rate that keeps the goals, by bisection."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nanovllm.tools.tune.goals import Goal
from nanovllm.tools.tune.ranking import Run, worst_excess

SHARES_OF_CAPACITY = (0.4, 0.6, 0.8, 1.0)  # rates of the first comparison of settings
TOLERANCE = 0.05  # relative error of the found rate
MOST_HALVINGS = 5  # number of times that a rate is halved after the lowest of these has failed


@dataclass(frozen=True, slots=True)
class FoundRate:
    """Result of `find_rate`, in requests a second.

    rate: highest measured rate that keeps all goals; None without one.
    fails_at: lowest measured rate that misses a goal; None if even the capacity keeps them.
    capacity: requests a second if all arrive at the start; no higher rate can be sustained.
    """

    rate: float | None
    fails_at: float | None
    capacity: float

    @property
    def sentence(self) -> str:
        if self.rate is None:
            return f"no rate keeps the goals, not even {self.fails_at:.3g} requests/s; capacity {self.capacity:.3g}"
        if self.fails_at is None:
            return f"highest rate that keeps the goals: {self.rate:.3g} requests/s, which is the capacity"
        return (
            f"highest rate that keeps the goals: {self.rate:.3g} requests/s; {self.fails_at:.3g} do not, and the "
            f"capacity is {self.capacity:.3g}"
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def rates_around(capacity: float) -> list[float]:
    """The rates at which settings are compared, with three digits."""
    return [_rounded(share * capacity) for share in SHARES_OF_CAPACITY]


def find_rate(play: Callable[[float], Run], goals: Sequence[Goal], points: Sequence[Run], capacity: float) -> FoundRate:
    """Find the highest rate of one setting.

    Args:
        play: measures the setting at a rate.
        points: earlier measurements, in order of the rates.
        capacity: requests a second of this setting with all requests at once.
    """

    def keeps(rate: float) -> bool:
        return worst_excess(play(rate), goals) <= 0.0

    capacity = _rounded(capacity)
    kept = [point["rate"] for point in points if worst_excess(point, goals) <= 0.0]
    low: float | None = max(kept, default=None)
    high = min((point["rate"] for point in points if low is None or point["rate"] > low), default=None)
    if low is None:
        low, high = _first_kept(keeps, high or capacity)
        if low is None:
            return FoundRate(None, high, capacity)
    if high is None:
        if low >= capacity or keeps(capacity):
            return FoundRate(max(low, capacity), None, capacity)
        high = capacity
    while high is not None and high > low * (1.0 + TOLERANCE):
        middle = _rounded(math.sqrt(low * high))
        if not low < middle < high:  # no third digit between them
            break
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return FoundRate(low, high, capacity)


def _first_kept(keeps: Callable[[float], bool], high: float) -> tuple[float | None, float]:
    """Halve a rate that fails until one keeps the goals; returns that one and the last that failed."""
    for _ in range(MOST_HALVINGS):
        half = _rounded(high / 2)
        if keeps(half):
            return half, high
        high = half
    return None, high


def _rounded(rate: float) -> float:
    return float(f"{rate:.3g}")
