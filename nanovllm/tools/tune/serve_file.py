"""A sweep's recommendation as a file for `nanovllm serve --config`."""

from __future__ import annotations

import json
from typing import Any

from nanovllm.core.config import EngineConfig
from nanovllm.core.option_fields import fields_by_flag
from nanovllm.tools.tune.report import Outcome, reason


def serve_file(outcome: Outcome) -> str:
    """Format the model, the options that all settings shared, and those of the best one as TOML."""
    finalists, question = outcome.sweep.finalists(), outcome.question
    best = finalists[0]
    verdict = "Recommended" if best.keeps_goals else "No setting keeps the goals; the nearest"
    comments = [f"{verdict} by nanovllm tune on {question['workload']['name']}:", reason(outcome, finalists)]
    if outcome.found is not None:
        comments.append(outcome.found.sentence)
    options = {"model": question["model"]}
    if question["tokenizer"]:
        options["tokenizer"] = question["tokenizer"]
    given = question["engine_options"] | outcome.resolver.explicit(best.setting)
    options |= {flag: given[field.name] for flag, field in fields_by_flag(EngineConfig).items() if field.name in given}
    lines = [f"# {line}" for comment in comments for line in comment.splitlines()]
    return "\n".join([*lines, *(f"{name} = {_value(value)}" for name, value in options.items())]) + "\n"


def _value(value: Any) -> str:
    """Format a number, text, truth value or list as TOML, whose texts are JSON's."""
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)  # TOML has no surrogates
