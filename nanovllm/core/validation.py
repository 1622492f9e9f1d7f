"""Validation of user input: each check returns the normalised value, or raises naming parameter, value and limit."""

from __future__ import annotations

import dataclasses
import math
import numbers
import re
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

MAX_INTEGER = 2**63 - 1
MIN_AGEING_S = 1e-3  # keeps priority levels apart in floating point
MAX_PRIORITY = 2**31 - 1  # the smallest priority is -MAX_PRIORITY


def real(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, not {value!r}.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf  # an integer beyond float64, outside every range
    if not low <= number <= high or math.isinf(number):  # NaN fails the comparison too
        allowed = f"between {low:g} and {high:g}" if math.isfinite(high) else f"a finite number of at least {low:g}"
        raise ValueError(f"{name} is {number}; it must be {allowed}.")
    return number


def ageing(name: str, value: Any) -> float:
    ageing = real(name, value, 0.0, math.inf)
    if 0.0 < ageing < MIN_AGEING_S:
        raise ValueError(f"{name} is {value}; it must be at least {MIN_AGEING_S} seconds, or 0 for no ageing.")
    return ageing


def integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """A whole number; without `high` of 63 bits, so that it can be sent to another process."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be a whole number, not {value!r}.")
    number = int(value)
    if not low <= number <= (MAX_INTEGER if high is None else high):
        allowed = f"at least {low}" if high is None and number < low else f"between {low} and {high or MAX_INTEGER}"
        raise ValueError(f"{name} is {number}; it must be {allowed}.")
    return number


def share(name: str, value: Any, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0.0 < float(value) <= high:
        raise ValueError(f"{name} is {value!r}; it must be a number above 0 and at most {high}.")
    return float(value)


def one_of(name: str, value: Any, choices: Collection[Any]) -> Any:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(str, choices))}.")
    return value


def string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, not {value!r}.")
    return value


def matching(name: str, value: Any, pattern: str, expected: str) -> str:
    """A string that a regular expression matches as a whole; `expected` describes it in the error."""
    if not isinstance(value, str) or not re.fullmatch(pattern, value):
        raise ValueError(f"{name} is {value!r}; it must be {expected}.")
    return value


def items(name: str, value: Any, expected: str) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be {expected}, not {value!r}.")
    return tuple(value)


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    return tuple(integer(name, item, 0) for item in items(name, value, "a list of token ids"))


def strings(name: str, value: Any, remedy: str) -> tuple[str, ...]:
    """Non-empty strings, from one string or several; `remedy` ends the error for an item of another type."""
    found = (value,) if isinstance(value, str) else items(name, value, "a string or a list of them")
    for item in found:
        if not isinstance(item, str):
            raise TypeError(f"{name} must hold strings, not {item!r}. {remedy}")
        if not item:
            raise ValueError(f"{name} holds an empty string, which every text contains. Remove it.")
        text(name, item)
    return found


def text(name: str, value: str) -> str:
    """A string without lone surrogates, which no tokenizer can encode."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        code, where = ord(value[error.start]), f"as character {error.start}, which no tokenizer can encode."
        if 0xDC80 <= code <= 0xDCFF:  # so Python hands on bytes of arguments and files that are not UTF-8
            raise ValueError(
                f"{name} holds U+{code:04X} {where} It is the byte 0x{code - 0xDC00:02x} of a text that is not UTF-8, "
                "or half of a surrogate pair. Convert the text (iconv -f latin1 -t utf-8), or decode its source with "
                "errors='replace'."
            ) from None
        raise ValueError(
            f"{name} holds half of a surrogate pair, U+{code:04X}, {where} Remove it, or decode its source with "
            "errors='replace'."
        ) from None
    return value


def truth(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}.")
    return value


CHECKS: dict[str, Callable[[str, Any], Any]] = {"int": partial(integer, low=1), "bool": truth}  # by annotation


def check_fields(options: Any, checks: dict[str, Callable[[str, Any], Any]]) -> None:
    """Check and normalise the fields of a frozen dataclass of `option`s, within its constructor; defaults are right.

    Args:
        checks: of further annotations, for fields that declare none.
    """
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value is not field.default:
            check = field.metadata["check"] or (CHECKS | checks)[str(field.type).removesuffix(" | None")]
            object.__setattr__(options, field.name, check(field.name, value))
