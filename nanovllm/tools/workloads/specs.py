"""Workload specs: parses texts such as "chat:turns=6,scale=0.5" into workloads and options."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

from nanovllm.tools.workloads.workloads import WORKLOADS, Workload


def build(text: str, *, seed: int | None = None) -> Workload:
    """Build the workload of a spec such as "P", "chat:turns=6" or "random:prompt=100-1024,scale=0.5".

    Args:
        seed: default for workloads with a parameter `seed`.

    Raises ValueError with the known names for an unknown name or parameter.
    """
    name, given = parse_spec(text)
    if name not in WORKLOADS:
        raise ValueError(f"no workload {name!r}; there are {', '.join(WORKLOADS)}.")
    maker = WORKLOADS[name]
    defaults = {key: parameter.default for key, parameter in inspect.signature(maker).parameters.items()}
    if "seed" in defaults and seed is not None:
        given.setdefault("seed", seed)
    for key, value in given.items():
        if key not in defaults:
            takes = f"it takes {', '.join(defaults)}" if defaults else "it takes none"
            raise ValueError(f"workload {name} has no parameter {key!r}; {takes}.")
        given[key] = _checked(f"{name}:{key}", value, key, defaults[key])
    made = maker(**given)
    changed = ",".join(f"{key}={format_value(value)}" for key, value in given.items() if value != defaults[key])
    label = f"{name}:{changed}" if changed else name
    return replace(made, name=label, parameters={"workload": name, **defaults, **given})


def parse_spec(text: str) -> tuple[str, dict[str, Any]]:
    """Parse "NAME" or "NAME:KEY=VALUE,..." into name and values: numbers, LOW-HIGH, True, False, None or text."""
    name, colon, rest = text.partition(":")
    return name, parse_values(rest, of=text) if colon else {}


def parse_values(text: str, *, of: str | None = None) -> dict[str, Any]:
    """Parse "KEY=VALUE,...", which may be empty unless it is a part of the text `of`; see `parse_spec`."""
    values: dict[str, Any] = {}
    for item in text.split(",") if text or of is not None else ():
        key, equals, value = item.partition("=")
        if not key or not equals:
            raise ValueError(f"{item!r} in {of or text!r} is not of the form NAME=VALUE.")
        if key in values:
            raise ValueError(f"{key} is given twice in {of or text!r}. Leave one out.")
        values[key] = _read(value)
    return values


def _read(text: str) -> Any:
    if text in (words := {"True": True, "False": False, "None": None}):
        return words[text]
    low, dash, high = text.partition("-")
    if dash and low.isdecimal() and high.isdecimal():
        return int(low), int(high)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def format_value(value: Any) -> str:
    """Format a value for `parse_spec`."""
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)


CAN_BE_ZERO = {"shared", "system", "think", "delay", "seed", "whales"}
SPANS = {"prompt", "output", "own", "user", "answer", "whale_prompt", "whale_output"}


def _checked(label: str, value: Any, key: str, default: Any) -> Any:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(default, float) and is_number:
        value = float(value)
    is_span = key in SPANS and isinstance(value, tuple) and value[0] <= value[1]
    kind = float if isinstance(default, float) else int
    if not is_span and (not isinstance(value, kind) or isinstance(value, bool)):
        wanted = "a number" if kind is float else "a whole number"
        raise ValueError(
            f"{label} is {format_value(value)}; it must be {wanted}{' or LOW-HIGH' if key in SPANS else ''}."
        )
    least = value[0] if is_span else value
    is_enough = least >= 0 if key in CAN_BE_ZERO else (least > 0 if kind is float else least >= 1)
    if not is_enough or (kind is float and value == float("inf")):
        raise ValueError(f"{label} is {format_value(value)}, which is too {'small' if not is_enough else 'large'}.")
    return value
