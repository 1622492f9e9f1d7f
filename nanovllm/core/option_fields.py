"""Fields of option dataclasses: each is declared with its help, which flags, `help()` and the reference show.

Docstrings cannot serve flags: `python -OO` drops them, and from 3.13 on the compiler strips their indentation.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, TypeVar

Options = TypeVar("Options")


def option(default: Any = dataclasses.MISSING, help: str = "", **more: Any) -> Any:
    """Declare a field of an option dataclass with its help; `more` as for `dataclasses.field`."""
    return dataclasses.field(default=default, metadata={"help": help}, **more)


def documented(cls: type[Options]) -> type[Options]:
    """Append the help of each field to the docstring of a dataclass."""
    lines = [f"{field.name}: {field.metadata['help']}" for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__ or ""), "", *lines])
    return cls
