"""Variables of a chat template, and the ones that set a reasoning effort."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from typing import Any

import jinja2
from jinja2 import meta

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SWITCHES = ("enable_thinking", "thinking")  # on or off, in the order in which templates use them
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


def takes_late_system(tokenizer: Any) -> bool:
    """Whether the chat template shows a system message that is not the first; others refuse it or leave it out."""
    text = "late instructions"
    messages = [{"role": "user", "content": "a question"}, {"role": "system", "content": text}]
    try:
        return text in tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception:  # templates raise errors of any kind
        return False


def check_variables(options: dict[str, Any], variables: Collection[str] | None, hidden: Collection[str]) -> None:
    """Raise ValueError for an option that the template does not read.

    Args:
        hidden: variables that requests may not set.
    """
    if variables is None:
        return
    shown = sorted(set(variables) - set(hidden))
    for name in options:
        if name not in variables:
            near = difflib.get_close_matches(name, shown, n=1, cutoff=0.6)
            hint = f"; did you mean {near[0]}?" if near else ", and ignores it. Leave it out."
            raise ValueError(f"chat_template_kwargs.{name}: the model's chat template has no such variable{hint}")


def has_effort(variables: Collection[str] | None) -> bool:
    """Whether a template has a variable for the reasoning effort."""
    return any(name in (variables or ()) for name in ("reasoning_effort", *_SWITCHES))


def effort_options(effort: str, variables: Collection[str] | None, *, can_think: bool) -> dict[str, Any]:
    """Template variables for a reasoning effort; raises ValueError if the template has none for it.

    Args:
        can_think: whether the model has a reasoning format; without one, "none" needs no variable.
    """
    known = variables or ()
    switch = next((name for name in _SWITCHES if name in known), None)
    options: dict[str, Any] = {} if switch is None else {switch: effort != "none"}
    if "reasoning_effort" in known and (effort != "none" or switch is None):
        options["reasoning_effort"] = effort
    if options:
        return options
    if effort == "none" and not can_think:
        return {}
    if effort == "none":
        raise ValueError(
            "reasoning_effort asks for no thought, but the model's chat template has no switch for it "
            f"({' or '.join(_SWITCHES)}). Leave it out, or limit thought by a budget."
        )
    raise ValueError(
        f"reasoning_effort is {effort!r}, but the model's chat template has no variable for it (reasoning_effort, "
        f"{' or '.join(_SWITCHES)}). Leave it out."
    )
