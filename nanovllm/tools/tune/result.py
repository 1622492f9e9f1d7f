"""Result of a sweep as JSON, and its recommendation as a file for `nanovllm serve --config`."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from nanovllm.features.engine_config import EngineConfig, fields_by_flag
from nanovllm.tools.tune.ranking import SettingSummary
from nanovllm.tools.tune.report import Outcome, rates_of_repeats, reason
from nanovllm.tools.tune.settings import Setting


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Return question, environment, all measurements and the recommendation as JSON values."""
    sweep = outcome.sweep
    finalists = outcome.sweep.finalists()
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
            {"options": setting.options, "runs": summary.points} for setting, summary in outcome.predicted.items()
        ],
        "fit_error": outcome.fit_error,
        "found_rate": outcome.found.as_json() if outcome.found else None,
        "by_goal": answer.as_json() if (answer := outcome.by_goal) else None,
        "refused": [{"options": options, "reason": reason} for options, reason in outcome.refused],
    }


def _recommended(outcome: Outcome, finalists: list[SettingSummary]) -> dict[str, Any]:
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


def serve_file(outcome: Outcome) -> str:
    """Format the model, the options that all settings shared, and those of the best one as TOML."""
    finalists = outcome.sweep.finalists()
    question = outcome.question
    best = finalists[0]
    verdict = "Recommended" if best.keeps_goals else "No setting keeps the goals; the nearest"
    comments = [f"{verdict} by nanovllm tune on {question['workload']['name']}:", reason(outcome, finalists)]
    if outcome.found is not None:
        comments.append(outcome.found.sentence)
    if (answer := outcome.by_goal) is not None:
        comments.append(answer.sentence)
    options = {"model": question["model"]}
    if question["tokenizer"]:
        options["tokenizer"] = question["tokenizer"]
    given = question["engine_options"] | outcome.resolver.explicit(best.setting)
    options |= {flag: given[field.name] for flag, field in fields_by_flag(EngineConfig).items() if field.name in given}
    lines = [f"# {line}" for comment in comments for line in comment.splitlines()]
    return "\n".join([*lines, *(f"{name} = {_value(value)}" for name, value in options.items())]) + "\n"


def _value(value: Any) -> str:
    """Format a number, text, boolean or list as TOML, which reads JSON strings."""
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)  # TOML has no surrogates
