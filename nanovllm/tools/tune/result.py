"""Result of a sweep as JSON."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from nanovllm.tools.tune.ranking import Standing
from nanovllm.tools.tune.report import Outcome, rates_of_repeats, reason
from nanovllm.tools.tune.settings import Setting


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Return question, environment, all measurements and the recommendation as JSON values."""
    sweep, finalists = outcome.sweep, outcome.sweep.finalists()
    return {
        "time": datetime.now().isoformat(timespec="seconds"),
        "question": outcome.question,
        "environment": outcome.environment,
        "goals": [str(goal) for goal in outcome.goals],
        "rounds": [round_._asdict() for round_ in sweep.rounds],
        "repeats": sweep.repeats,
        "default": sweep.settings[0].options,
        "recommended": _recommended(outcome, finalists) if finalists else None,
        "settings": [_setting(outcome, setting) for setting in sweep.settings],
        "predicted": [
            {"options": setting.options, "runs": standing.points} for setting, standing in outcome.predicted.items()
        ],
        "fit_error": outcome.fit_error,
        "found_rate": outcome.found.as_json() if outcome.found else None,
        "refused": [{"options": options, "reason": reason} for options, reason in outcome.refused],
    }


def _recommended(outcome: Outcome, finalists: list[Standing]) -> dict[str, Any]:
    best = finalists[0]
    return {
        "options": best.setting.options,
        "flags": outcome.resolver.flags(best.setting),
        "keeps_goals": best.keeps_goals,
        "reason": reason(outcome, finalists),
        "tokens_per_second_of_repeats": rates_of_repeats(outcome, best),
    }


def _setting(outcome: Outcome, setting: Setting) -> dict[str, Any]:
    results = outcome.sweep.results.get(setting, {})
    measurements = [
        {"share": share, "repeat": repeat, "runs": [_without(run, "environment", "config") for run in runs]}
        for share, repeats in results.items()
        for repeat, runs in enumerate(repeats)
    ]
    config = next((runs[0]["config"] for repeats in results.values() for runs in repeats), None)
    return {
        "options": setting.options,
        "config": config,
        "measurements": measurements,
        "failed": outcome.sweep.failures.get(setting),
    }


def _without(run: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in run.items() if name not in names}
