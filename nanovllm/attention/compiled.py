"""Compiled functions that engines do not share."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import FunctionType
from typing import Any

_numbers = itertools.count()


def own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function around a code object of its own.

    Compiled versions are kept by code object and their number is limited, so that engines which shared one would use
    up each other's share and fall back to uncompiled attention.
    """
    assert isinstance(function, FunctionType)
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
