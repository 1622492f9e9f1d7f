"""Which of several settings is best, by the goals and by output tokens a second."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nanovllm.tools.tune.goals import STATISTICS, TIMES, Goal
from nanovllm.tools.tune.settings import Setting

Run = dict[str, Any]  # figures of one play, as `bench.play.figures` gives them, and its "rate"

# Rates that differ by less count as equal. Where arrivals bound the rate, all settings are that close.
EQUAL = 0.02


@dataclass(frozen=True, slots=True)
class Standing:
    """What counts of a setting: its best rate of arrival, by medians over repeats.

    points: the medians at each rate, in the order of the rates.
    best: of the points that keep all goals, the one with the highest rate; if none does, the one nearest.
    excess: of the best point, by which share of a goal's limit the worst one is exceeded; 0 or less keeps all.
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
        return self.best["output_tokens_per_second"]


def standing_of(setting: Setting, repeats: Iterable[Sequence[Run]], goals: Sequence[Goal]) -> Standing:
    """From a setting's runs.

    Args:
        repeats: of each repeat one run for each rate, in the same order.
    """
    points = [_median(runs) for runs in zip(*repeats, strict=True)]
    keeping = [point for point in points if excess_of(point, goals) <= 0.0]
    if keeping:
        best = max(keeping, key=lambda point: point["rate"] or 0.0)
    else:
        best = min(points, key=lambda point: excess_of(point, goals))
    return Standing(setting, points, best, excess_of(best, goals))


def excess_of(run: Run, goals: Sequence[Goal]) -> float:
    """The worst goal's excess; without goals nothing can be exceeded."""
    return max((goal.excess(run) for goal in goals), default=0.0)


def ranked(standings: Iterable[Standing]) -> list[Standing]:
    """Best first: those that keep the goals by output tokens a second, then the others by how near they come.

    Of settings with as many tokens a second the one that is furthest from a limit comes first; without goals, the one
    with the lowest p99 between tokens, and to the first.
    """
    standings = list(standings)
    keeping = sorted((s for s in standings if s.keeps_goals), key=lambda s: -s.tokens_per_second)
    ordered: list[Standing] = []
    while keeping:
        least = (1.0 - EQUAL) * keeping[0].tokens_per_second
        equal = [standing for standing in keeping if standing.tokens_per_second >= least]
        ordered += sorted(equal, key=_calm)
        keeping = keeping[len(equal) :]
    return ordered + sorted((s for s in standings if not s.keeps_goals), key=lambda s: s.excess)


def _calm(standing: Standing) -> tuple[float, ...]:
    tails = tuple(spread["p99"] if (spread := standing.best[time]) else 0.0 for time in reversed(TIMES))
    return (standing.excess, *tails)


def _median(runs: Sequence[Run]) -> Run:
    median: Run = {
        "rate": runs[0]["rate"],
        "output_tokens_per_second": statistics.median(run["output_tokens_per_second"] for run in runs),
    }
    for time in TIMES:
        spreads = [run[time] for run in runs if run[time]]
        median[time] = {name: statistics.median(of[name] for of in spreads) for name in STATISTICS} if spreads else None
    return median
