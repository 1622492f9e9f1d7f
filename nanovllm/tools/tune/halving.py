"""Successive halving: a small share of the workload for every setting, more of it for the better half.

After Jamieson and Talwalkar, "Non-stochastic best arm identification and hyperparameter optimization" (AISTATS 2016),
with a share of the workload for what they call an arm's budget. The last few are measured on the whole, in turn and
more than once, and the one that is best then once more at the end, so that a machine that slows down shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nanovllm.tools.tune.goals import Goal
from nanovllm.tools.tune.ranking import Run, Standing, ranked, standing_of
from nanovllm.tools.tune.settings import Setting

MOST_FINALISTS = 3  # besides the first setting


class MeasurementError(Exception):
    """A setting that could not be measured, and why."""


# Setting, share, repeat: a run for each rate of arrival. Raises MeasurementError.
Measure = Callable[[Setting, float, int], list[Run]]


class Round(NamedTuple):
    """A share of the workload for so many settings, and the first one besides."""

    share: float
    num_rivals: int


def rounds_for(num_settings: int, smallest: float) -> list[Round]:
    """Shares double up to the whole while rivals are halved.

    Args:
        smallest: share that tells anything. Rounds of equal shares need no measurements but those of the first.
    """
    rivals = [num_settings - 1]
    while rivals[-1] > MOST_FINALISTS:
        rivals.append(-(-rivals[-1] // 2))
    return [
        Round(max(smallest, 0.5**rest), count) for rest, count in zip(range(len(rivals))[::-1], rivals, strict=True)
    ]


def num_measurements(rounds: Sequence[Round], repeats: int) -> int:
    """Of a sweep in which nothing fails."""
    most_of = dict(reversed(rounds))  # of equal shares the first counts
    return sum(1 + num_rivals for num_rivals in most_of.values()) + (repeats - 1) * (1 + rounds[-1].num_rivals) + 1


@dataclass(slots=True)
class Sweep:
    """Measures settings until few are left.

    settings: all of them; the first is measured in every round, for comparison.
    repeats: how often the last ones are measured.
    results: by setting and share: of each repeat a run for each rate.
    failures: settings that could not be measured, and why.
    """

    settings: Sequence[Setting]
    goals: Sequence[Goal]
    rounds: Sequence[Round]
    repeats: int
    results: dict[Setting, dict[float, list[list[Run]]]] = field(default_factory=dict)
    failures: dict[Setting, str] = field(default_factory=dict)

    def run(self, measure: Measure) -> None:
        """Interrupted or not, results and failures are what was measured until then."""
        first, rivals = self.settings[0], list(self.settings[1:])
        for share, num_rivals in self.rounds:
            rivals = rivals[:num_rivals]
            self._measure(measure, [first, *rivals], share, 0)
            rivals = [s.setting for s in self.standings(share, rivals)]
        for repeat in range(1, self.repeats):
            self._measure(measure, [first, *rivals], 1.0, repeat)
        if finalists := self.finalists():
            self._measure(measure, [finalists[0].setting], 1.0, self.repeats)

    def finalists(self) -> list[Standing]:
        """Those measured on the whole workload as often as any, but for the run at the very end; best first.

        Where no share of the workload would do, settings that were given up have a run on the whole of it, too: one
        that was lucky must not win over medians.
        """
        counts = {
            setting: len(self.results.get(setting, {}).get(1.0, ()))
            for setting in self.settings
            if setting not in self.failures
        }
        most = min(self.repeats, max(counts.values(), default=0))
        return self.standings(1.0, [setting for setting, count in counts.items() if count >= most])

    def standings(self, share: float, among: Iterable[Setting]) -> list[Standing]:
        """Of the settings that were measured on a share, best first."""
        repeats = {
            setting: self.results.get(setting, {}).get(share) for setting in among if setting not in self.failures
        }
        return ranked(standing_of(setting, runs, self.goals) for setting, runs in repeats.items() if runs)

    def _measure(self, measure: Measure, settings: Iterable[Setting], share: float, repeat: int) -> None:
        for setting in settings:
            done = self.results.setdefault(setting, {}).setdefault(share, [])
            if setting in self.failures or len(done) > repeat:
                continue
            try:
                done.append(measure(setting, share, repeat))
            except MeasurementError as error:
                self.failures[setting] = str(error)
