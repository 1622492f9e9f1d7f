"""Grammar of verbatim strings between tags: enum, pattern, format and length from their schema.

JSON Schema's keywords become one terminal, an intersection of regular expressions, followed by the closing tag. They
mean the same as in llguidance's JSON strings: llguidance checks the schema first.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from nanovllm.features.grammar.ascii_classes import ascii_regex
from nanovllm.features.grammar.compiler import check_form, schema_problem
from nanovllm.features.structured_output import StructuredOutput
from nanovllm.serving.server.answers.rules import Rules
from nanovllm.serving.server.answers.string_formats import FORMATS

_ANY = "(?s:.*)"
_MAX_LEAST = 2000  # llguidance looks for the shortest text of an intersection, within a limit of its work
_COMPOSING = ("$ref", "allOf", "anyOf", "oneOf")
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?[A-Za-z-]+\)|.", re.DOTALL)  # one element of the pattern
_IGNORE_CASE = "(?i)"


def text_value(rules: Rules, schema: dict[str, Any], closing: str, owner: str, *, is_strict: bool) -> str:
    """Rule for a string of a schema, with its closing tag.

    Args:
        owner: argument with this schema, for errors.
        is_strict: raise for unsupported keywords; else they make the string free, except for its `enum` or `const`.

    Raises ValueError for an unsupported schema, and for an `enum` or `const` without a string.
    """
    texts = _texts(schema, owner)
    values = [f"({' | '.join(map(rules.literal, texts))})"] if texts is not None else []
    try:
        parts = _terminals(schema, owner)
        if parts:
            if not values:
                parts.append(f"~/{_ANY}{ascii_regex(re.escape(closing.strip()))}{_ANY}/")
            _check(" & ".join(values + parts), owner)
    except ValueError:
        if is_strict:
            raise
        parts = []
    if not values and not parts:
        return rules.until(closing)
    return rules.until(closing, rules.terminal(" & ".join(values + parts)))


def _texts(schema: dict[str, Any], owner: str) -> list[str] | None:
    """Strings in a schema's `enum` or `const`, None without either; raises ValueError if they hold no string."""
    if "const" in schema:
        key = "const"
        listed = [schema["const"]]
    elif "enum" in schema:
        key = "enum"
        listed = schema["enum"]
    else:
        return None
    texts = [value for value in listed if isinstance(value, str)] if isinstance(listed, list) else []
    if not texts:
        raise ValueError(f"tools: {owner} has {schema[key]!r} as {key}, without a string. Give one, or another type.")
    return texts


def _terminals(schema: dict[str, Any], owner: str) -> list[str]:
    """Terminals that a string must match, all of them; raises ValueError for unsupported keywords."""
    if composed := [key for key in _COMPOSING if key in schema]:
        raise ValueError(
            f"tools: {owner} has {composed[0]!r} beside its type, and this model writes strings without quotes. "
            "Say it by enum, pattern, format, minLength and maxLength, or leave strict out."
        )
    if problem := _schema_problem(json.dumps(schema)):
        raise ValueError(f"tools: {owner}{problem}")
    found = []
    if (pattern := schema.get("pattern")) is not None:
        found.append(f"/{ascii_regex(_search(pattern, owner))}/")
    if own := FORMATS.get(schema.get("format", "")):
        found.append(f"/{ascii_regex(own)}/")
    least = schema.get("minLength") or 0
    most = schema.get("maxLength")
    if least > _MAX_LEAST:
        raise ValueError(
            f"tools: {owner} has the minLength {least}; at most {_MAX_LEAST} can be kept where strings have no quotes. "
            "Lower it, or leave strict out."
        )
    if least or most is not None:
        found.append(f"/(?s:.){{{least},{'' if most is None else most}}}/")
    return found


# Some tenths of a millisecond each, in every request of an agent's turns.
@functools.lru_cache(1024)
def _schema_problem(schema: str) -> str | None:
    problem = schema_problem("", json.loads(schema))
    return None if problem is None else str(problem)


@functools.lru_cache(1024)
def _terminal_problem(terminal: str) -> str | None:
    try:
        check_form(StructuredOutput(grammar=f"start: T\nT: {terminal}\n"))
    except ValueError as error:
        return str(error).partition(": ")[2]
    return None


def _check(terminal: str, owner: str) -> None:
    if reason := _terminal_problem(terminal):
        raise ValueError(f"tools: {owner} has a pattern, format or length that cannot be kept: {reason}")


def _search(pattern: str, owner: str) -> str:
    """Regular expression of all texts that contain a match of a pattern.

    llguidance supports no anchors: an alternative without ^ or $ gets free text at that end.
    """
    flag = _IGNORE_CASE if pattern.startswith(_IGNORE_CASE) else ""
    branches: list[list[str]] = [[]]
    depth = 0
    for token in _TOKEN.findall(pattern[len(flag) :]):
        if token.startswith("(?") and token.endswith(")"):
            raise ValueError(f"tools: {owner} has the pattern {pattern!r}; the flags {token} are not supported in it.")
        depth += (token == "(") - (token == ")")
        if token == "|" and not depth:
            branches.append([])
        else:
            branches[-1].append(token)
    return flag + "|".join(map(_whole, branches))


def _whole(branch: list[str]) -> str:
    """One alternative of a pattern, extended to match whole texts."""
    starts = branch[:1] == ["^"]
    ends = branch[-1:] == ["$"]
    body = "".join(branch[int(starts) : len(branch) - int(ends)])
    return f"{'' if starts else _ANY}(?:{body}){'' if ends else _ANY}"
