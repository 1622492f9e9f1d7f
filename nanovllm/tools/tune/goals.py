"""Latency goals, such as an ITL p99 of 40 ms, and how far a run exceeds them."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import Any

TIMES = ("ttft", "itl")
STATISTICS = ("mean", "p50", "p90", "p99")


@dataclass(frozen=True, slots=True)
class Goal:
    """Upper bound on a latency statistic of a run.

    time: "ttft" or "itl".
    statistic: one of `STATISTICS`.
    limit: bound in seconds.
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
