"""Answer to whether an `itl_goal` does as well as the best fixed budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nanovllm.tools.tune.find_rate import FoundRate
from nanovllm.tools.tune.ranking import SettingSummary
from nanovllm.tools.tune.settings import Setting, format_value

AS_GOOD = 0.01  # relative difference of rates that counts as none


@dataclass(frozen=True, slots=True)
class RivalAtRate:
    """Whether the best setting of the other kind, goal or fixed budget, keeps the goals near the found rate."""

    setting: Setting
    rate: float
    is_kept: bool


@dataclass(frozen=True, slots=True)
class GoalAnswer:
    """The answer to whether an `itl_goal` suffices, as a flag and a sentence.

    suffices: True if the rate with the goal is at least 99 % of the best fixed budget's.
    """

    suffices: bool
    sentence: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def best_of_kind(summaries: Iterable[SettingSummary], *, has_goal: bool) -> SettingSummary | None:
    """The first of ranked summaries with an `itl_goal`, or without one."""
    return next((each for each in summaries if (each.setting.itl_goal is not None) is has_goal), None)


def rival_of(finalists: Sequence[SettingSummary], found: FoundRate) -> tuple[Setting, float] | None:
    """The best setting of the other kind than the first's, and the rate that it has to keep; None without one."""
    is_goal = finalists[0].setting.itl_goal is not None
    rival = best_of_kind(finalists, has_goal=not is_goal)
    if rival is None or found.rate is None:
        return None
    return rival.setting, float(f"{found.rate * (1.0 + AS_GOOD if is_goal else 1.0 - AS_GOOD):.3g}")


def goal_answer(
    finalists: Sequence[SettingSummary], found: FoundRate | None = None, rival: RivalAtRate | None = None
) -> GoalAnswer | None:
    """Compare the best setting with an `itl_goal` and the best with a fixed budget; None unless one keeps the goals.

    Args:
        finalists: best setting first.
        found: the highest rate of the first finalist, with `rival` for the other kind; else their best points count.
    """
    goal = best_of_kind(finalists, has_goal=True)
    fixed = best_of_kind(finalists, has_goal=False)
    if goal is None or fixed is None:
        return None
    its_name = f"itl_goal {_goal_of(goal)}"
    budget = f"budget {fixed.setting.options['max_num_batched_tokens']}"
    if found is not None:
        if found.rate is None or rival is None:
            return None
        leads = finalists[0] is goal
        rivals_rate = f"{rival.rate:g} requests/s"
        suffices = rival.is_kept is not leads
        ends = "keeps" if rival.is_kept else "misses the goals at"
        first = f"{its_name if leads else budget} keeps {found.rate:g} requests/s"
        return _answer(suffices, f"{first}, {budget if leads else its_name} {ends} {rivals_rate}")
    if not (goal.keeps_goals or fixed.keeps_goals):
        return None
    suffices = goal.keeps_goals and (not fixed.keeps_goals or _rate(goal) >= (1.0 - AS_GOOD) * _rate(fixed))
    return _answer(suffices, f"{its_name} {_kept(goal)}, {budget} {_kept(fixed)}")


def _answer(suffices: bool, figures: str) -> GoalAnswer:
    return GoalAnswer(suffices, f"{'no fixed budget needed' if suffices else 'a fixed budget keeps more'}: {figures}")


def _goal_of(summary: SettingSummary) -> str:
    return format_value("itl_goal", summary.setting.options["itl_goal"])


def _rate(summary: SettingSummary) -> float:
    return float(summary.best["rate"] or summary.tokens_per_second)


def _kept(summary: SettingSummary) -> str:
    if not summary.keeps_goals:
        return "misses the goals"
    rate = summary.best["rate"]
    return f"keeps {summary.tokens_per_second:.0f} tokens/s" if rate is None else f"keeps {rate:g} requests/s"
