"""Latency goals, such as an ITL p99 of 40 ms, and how far a run exceeds them."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nanovllm.features.option_checks import MIN_GOAL_S
from nanovllm.outputs import RequestMetrics

TIMES = ("ttft", "itl")
STATISTICS = ("mean", "p50", "p90", "p99")
TAILS = ("p90", "p99")
HEADROOM = 1.1  # latency limit / the engine's goal: margin for steps that exceed their predicted time


@dataclass(frozen=True, slots=True)
class Goal:
    """Upper bound on a latency statistic of a run.

    time: "ttft" or "itl".
    statistic: one of `STATISTICS`.
    limit: upper bound in seconds.
    """

    time: str
    statistic: str
    limit: float

    def __str__(self) -> str:
        return f"{self.name} <= {1e3 * self.limit:g} ms"

    @property
    def name(self) -> str:
        return f"{self.time.upper()} {self.statistic}"

    def value(self, run: dict[str, Any]) -> float:
        """Return the statistic of a run in seconds; 0.0 for the ITL of single tokens."""
        latency = run[self.time]
        return latency[self.statistic] if latency else 0.0

    def excess(self, run: dict[str, Any]) -> float:
        """Return the share of the limit by which a run exceeds it; negative below the limit."""
        return self.value(run) / self.limit - 1.0


@dataclass(frozen=True, slots=True)
class RequestGoals:
    """Limits for each request: seconds to its first token, and between any two of its tokens; None: no limit."""

    ttft: float | None = None
    itl: float | None = None

    def __str__(self) -> str:
        limits = (("TTFT", self.ttft), ("each ITL", self.itl))
        return " and ".join(f"{name} <= {1e3 * limit:g} ms" for name, limit in limits if limit is not None)

    def kept_by(self, request: RequestMetrics) -> bool:
        """Whether a request kept the limits; one without a token did not."""
        if request.ttft is None:
            return False
        return request.ttft <= (self.ttft or math.inf) and (request.max_itl or 0.0) <= (self.itl or math.inf)

    def figures(self, requests: Sequence[RequestMetrics], seconds: float) -> dict[str, Any]:
        """Return the limits, the "share" of requests that kept them, and these "requests_per_second"."""
        count = sum(map(self.kept_by, requests))
        return asdict(self) | {"share": count / len(requests), "requests_per_second": count / seconds}


def add_request_goal_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "goals of a request", "the share of requests that keep them is reported; a number with its unit, such as 500ms"
    )
    group.add_argument("--goal-ttft", type=_limit, metavar="TIME", help="time to the first token")
    group.add_argument("--goal-itl", type=_limit, metavar="TIME", help="time between any two tokens")


def request_goals_from_flags(options: argparse.Namespace) -> RequestGoals | None:
    """The goals of the flags; None without any."""
    goals = RequestGoals(options.goal_ttft, options.goal_itl)
    return None if goals == RequestGoals() else goals


def add_goal_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "goals", "latency limits that a setting must keep; a number with its unit, such as 500ms"
    )
    for time, about in (("ttft", "time to the first token"), ("itl", "inter-token latency")):
        for statistic in STATISTICS:
            text = f"{statistic} of the {about}"
            group.add_argument(f"--{time}-{statistic}", type=_limit, metavar="TIME", help=text)


def goals_from_flags(options: argparse.Namespace) -> list[Goal]:
    asked_for = [
        (time, statistic, getattr(options, f"{time}_{statistic}")) for time in TIMES for statistic in STATISTICS
    ]
    return [Goal(time, statistic, limit) for time, statistic, limit in asked_for if limit is not None]


def itl_goals_to_try(goals: Sequence[Goal]) -> list[float]:
    """The engine's `itl_goal` for the strictest limit on a tail of the ITL, with two digits; none without one."""
    limits = [goal.limit for goal in goals if goal.time == "itl" and goal.statistic in TAILS]
    goal = float(f"{min(limits) / HEADROOM:.2g}") if limits else 0.0
    return [goal] if goal >= MIN_GOAL_S else []


def duration(text: str) -> float:
    """The seconds that a flag's text such as "500ms" or "0.5s" spells; raises argparse.ArgumentTypeError."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)(ms|s)", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; give a number with its unit, such as 500ms or 0.5s")
    return float(match[1]) * (1e-3 if match[2] == "ms" else 1.0)


def _limit(text: str) -> float:
    seconds = duration(text)
    if seconds == 0.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0; give a time such as 500ms")
    return seconds
