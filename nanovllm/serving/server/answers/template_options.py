"""Variables of a chat template, and the ones that set a reasoning effort."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from typing import Any

import jinja2
from jinja2 import meta

from nanovllm.serving.server.strict import lets_pass, tell_hint

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SWITCHES = ("enable_thinking", "thinking")  # booleans that switch thinking; the first one that a template reads is set
_OF_THOUGHT = ("reasoning_effort", *_SWITCHES)
_GENERATION = re.compile(
    r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}"
)  # transformers' own tag, which changes no variable


def template_variables(template: str) -> frozenset[str] | None:
    """Variables that a chat template reads; None without a template, or if it cannot be parsed."""
    if not template:
        return None
    try:
        parsed = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", template))
    except jinja2.TemplateError:
        return None
    return frozenset(meta.find_undeclared_variables(parsed))


def known_options(
    options: dict[str, Any], variables: Collection[str] | None, hidden: Collection[str], *, can_think: bool
) -> dict[str, Any]:
    """Options that the template reads; raises ValueError for another, unless it has no effect on this model.

    Args:
        hidden: variables that requests may not set.
        can_think: True if the model has a reasoning format; without one, none of its switches has an effect.
    """
    if variables is None:
        return options
    for name in options.keys() - variables:
        if name in _OF_THOUGHT and not (can_think and options[name] in (False, "none")):
            tell_hint(f"chat_template_kwargs.{name}", "whether the model thinks is not up to its chat template")
        elif not lets_pass(f"chat_template_kwargs.{name}"):
            near = difflib.get_close_matches(name, sorted(set(variables) - set(hidden)), n=1, cutoff=0.6)
            hint = f"; did you mean {near[0]}?" if near else ", and ignores it. Leave it out."
            raise ValueError(f"chat_template_kwargs.{name}: the model's chat template has no such variable{hint}")
    return {name: value for name, value in options.items() if name in variables}


def effort_options(effort: str, variables: Collection[str] | None, *, can_think: bool) -> dict[str, Any]:
    """Template variables for a reasoning effort; raises ValueError if thought cannot be turned off.

    Args:
        can_think: True if the model has a reasoning format.
    """
    known = variables or ()
    switch = next((name for name in _SWITCHES if name in known), None)
    options: dict[str, Any] = {} if switch is None else {switch: effort != "none"}
    if "reasoning_effort" in known and (effort != "none" or switch is None):
        options["reasoning_effort"] = effort
    if options:
        return options
    if effort == "none" and can_think:
        raise ValueError(
            "reasoning_effort asks for no thought, but the model's chat template has no switch for it "
            f"({' or '.join(_SWITCHES)}). Leave it out, or limit thought by a budget."
        )
    tell_hint("reasoning_effort", "the model's chat template has no variable for it")
    return {}
