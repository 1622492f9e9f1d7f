"""Ranking of settings by latency goals and output tokens/s."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nanovllm.tools.tune.goals import STATISTICS, TIMES, Goal
from nanovllm.tools.tune.settings import Setting

Run = dict[str, Any]  # `replay.figures` of one run, and its "rate"

# Throughputs that differ by less count as equal; where arrivals bound the throughput, all settings are that close.
EQUAL = 0.02


@dataclass(frozen=True, slots=True)
class SettingSummary:
    """Result of a setting: medians over repeats at its best arrival rate.

    points: medians at each rate, in order of the rates.
    best: the point of the highest rate that keeps all goals; without one, the point nearest to them.
    excess: largest excess over a goal at the best point, as a share of its limit; at most 0 if all goals are kept.
    """

    setting: Setting
    points: list[Run]
    best: Run
    excess: float

    @property
    def keeps_goals(self) -> bool:
        return self.excess <= 0.0

    @property
    def tokens_per_second(self) -> float:
        return float(self.best["output_tokens_per_second"])


def summarise(setting: Setting, repeats: Iterable[Sequence[Run]], goals: Sequence[Goal]) -> SettingSummary:
    """Summarise the measurements of a setting.

    Args:
        repeats: one run per rate for each repeat, in the same order of rates.
    """
    points = [_median(runs) for runs in zip(*repeats, strict=True)]
    keeping = [point for point in points if worst_excess(point, goals) <= 0.0]
    if keeping:
        best = max(keeping, key=lambda point: point["rate"] or 0.0)
    else:
        best = min(points, key=lambda point: worst_excess(point, goals))
    return SettingSummary(setting, points, best, worst_excess(best, goals))


def worst_excess(run: Run, goals: Sequence[Goal]) -> float:
    """Return the largest excess over a goal; 0.0 without goals."""
    return max((goal.excess(run) for goal in goals), default=0.0)


def ranked(summaries: Iterable[SettingSummary]) -> list[SettingSummary]:
    """Sort results, best first: first the ones that keep the goals, by output tokens/s, then the rest by excess.

    Ties within EQUAL go to the result furthest below its limits; without goals, to the lowest ITL p99, then TTFT p99.
    """
    summaries = list(summaries)
    keeping = sorted((s for s in summaries if s.keeps_goals), key=lambda s: -s.tokens_per_second)
    ordered: list[SettingSummary] = []
    while keeping:
        least = (1.0 - EQUAL) * keeping[0].tokens_per_second
        equal = [summary for summary in keeping if summary.tokens_per_second >= least]
        ordered += sorted(equal, key=_latency_key)
        keeping = keeping[len(equal) :]
    return ordered + sorted((s for s in summaries if not s.keeps_goals), key=lambda s: s.excess)


def best_rivals(ranked_settings: Sequence[Setting], count: int) -> list[Setting]:
    """The first `count`; from two on, the best with an `itl_goal` and the best without one are among them."""
    kept = list(ranked_settings[:count])
    for has_goal in (True, False):
        best = next((each for each in ranked_settings if (each.itl_goal is not None) is has_goal), None)
        if best is not None and best not in kept and count > 1:
            kept[-1] = best
    return kept


def _latency_key(summary: SettingSummary) -> tuple[float, ...]:
    tails = tuple(latency["p99"] if (latency := summary.best[time]) else 0.0 for time in reversed(TIMES))
    return (summary.excess, *tails)


def _median(runs: Sequence[Run]) -> Run:
    median: Run = {
        "rate": runs[0]["rate"],
        "output_tokens_per_second": statistics.median(run["output_tokens_per_second"] for run in runs),
    }
    for time in TIMES:
        latencies = [run[time] for run in runs if run[time]]
        medians = {name: statistics.median(latency[name] for latency in latencies) for name in STATISTICS if latencies}
        median[time] = medians or None
    if "utilisation" in runs[0]:  # forecasts alone have it
        median["utilisation"] = runs[0]["utilisation"]
    return median
