"""Successive halving: every setting runs a small share of the workload, the better half a larger one.

After Jamieson and Talwalkar, "Non-stochastic best arm identification and hyperparameter optimization" (AISTATS 2016),
with a share of the workload as an arm's budget. Finalists run the whole workload, in turn and repeatedly, and the best
one once more at the end, which exposes a machine that slows down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nanovllm.tools.tune.goals import Goal
from nanovllm.tools.tune.ranking import Run, SettingSummary, best_rivals, ranked, summarise
from nanovllm.tools.tune.settings import Setting

MOST_FINALISTS = 3  # most rivals of the first setting in the last round


class MeasurementError(Exception):
    """A setting could not be measured; the message has the reason."""


# (setting, share, repeat) -> a run per arrival rate; raises MeasurementError.
Measure = Callable[[Setting, float, int], list[Run]]


class Round(NamedTuple):
    """A round: a share of the workload for `num_rivals` settings and the first one."""

    share: float
    num_rivals: int


def rounds_for(num_settings: int, smallest: float) -> list[Round]:
    """Return the rounds: shares double up to the whole while rivals are halved.

    Args:
        smallest: smallest meaningful share; of rounds with equal shares only the first is measured.
    """
    rivals = [num_settings - 1]
    while rivals[-1] > MOST_FINALISTS:
        rivals.append(-(-rivals[-1] // 2))
    return [
        Round(max(smallest, 0.5**rest), count) for rest, count in zip(range(len(rivals))[::-1], rivals, strict=True)
    ]


def num_measurements(rounds: Sequence[Round], repeats: int) -> int:
    """Return the number of measurements of a sweep without failures."""
    most_of = dict(reversed(rounds))  # the first of rounds with equal shares counts
    return sum(1 + num_rivals for num_rivals in most_of.values()) + (repeats - 1) * (1 + rounds[-1].num_rivals) + 1


@dataclass(slots=True)
class Sweep:
    """Measures settings in rounds until finalists remain.

    settings: all settings; the first is measured in every round, for comparison.
    repeats: measurements of each finalist.
    results: one run per arrival rate for each repeat, by setting and share.
    failures: settings that could not be measured, with the reason.
    """

    settings: Sequence[Setting]
    goals: Sequence[Goal]
    rounds: Sequence[Round]
    repeats: int
    results: dict[Setting, dict[float, list[list[Run]]]] = field(default_factory=dict)
    failures: dict[Setting, str] = field(default_factory=dict)

    def run(self, measure: Measure) -> None:
        """Run all rounds; after an interrupt, results and failures hold the measurements so far."""
        first = self.settings[0]
        rivals = list(self.settings[1:])
        for share, num_rivals in self.rounds:
            rivals = best_rivals(rivals, num_rivals)
            self._measure(measure, [first, *rivals], share, 0)
            rivals = [s.setting for s in self.summaries(share, rivals)]
        for repeat in range(1, self.repeats):
            self._measure(measure, [first, *rivals], 1.0, repeat)
        if finalists := self.finalists():
            self._measure(measure, [finalists[0].setting], 1.0, self.repeats)

    def finalists(self) -> list[SettingSummary]:
        """Return the settings with most repeats on the whole workload, best first; the final run does not count.

        Eliminated settings may have one run on the whole workload, where no smaller share is meaningful; a lucky single
        run must not win over medians.
        """
        counts = {
            setting: len(self.results.get(setting, {}).get(1.0, ()))
            for setting in self.settings
            if setting not in self.failures
        }
        most = min(self.repeats, max(counts.values(), default=0))
        return self.summaries(1.0, [setting for setting, count in counts.items() if count >= most])

    def summaries(self, share: float, among: Iterable[Setting]) -> list[SettingSummary]:
        """Return the summaries of settings measured on a share, best first."""
        repeats = {
            setting: self.results.get(setting, {}).get(share) for setting in among if setting not in self.failures
        }
        return ranked(summarise(setting, runs, self.goals) for setting, runs in repeats.items() if runs)

    def _measure(self, measure: Measure, settings: Iterable[Setting], share: float, repeat: int) -> None:
        for setting in settings:
            done = self.results.setdefault(setting, {}).setdefault(share, [])
            if setting in self.failures or len(done) > repeat:
                continue
            try:
                done.append(measure(setting, share, repeat))
            except MeasurementError as error:
                self.failures[setting] = str(error)
