"""Options: fields of a dataclass, each declared once, with default, help, check, flag and refusals.

Checks, flags, the names in a server's file, `help()` and the reference follow. Docstrings cannot serve flags: `python
-OO` drops them, and from 3.13 on the compiler strips their indentation.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Options = TypeVar("Options")
Check = Callable[[str, Any], Any]  # (name, value) -> the normalised value


def option(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    check: Check | None = None,
    flag: str | None = None,
    refused: Mapping[str, str] | None = None,
    needs: str = "",
    **more: Any,
) -> Any:
    """Declare a field of an option dataclass with its help; `more` as for `dataclasses.field`.

    Args:
        help: text of flags, `help()` and the reference.
        check: of `core.validation`, called by its `check_fields`; None: the check of the annotation.
        flag: name of the flag, and in a server's file; None: the field's.
        refused: mode of `core.features` that the option does not work with -> reason and remedy.
        needs: module without which the option is refused, such as "speculation.build".
        more: as for `dataclasses.field`.
    """
    metadata = {"help": help, "check": check, "flag": flag, "refused": refused or {}, "needs": needs}
    return dataclasses.field(default=default, metadata=metadata, **more)


def documented(cls: type[Options]) -> type[Options]:
    """Append the help of each field to the docstring of a dataclass."""
    lines = [f"{field.name}: {field.metadata['help']}" for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__ or ""), "", *lines])
    return cls


def fields_by_flag(cls: type) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of an option dataclass by the names of their flags, with _ for -."""
    return {field.metadata["flag"] or field.name: field for field in dataclasses.fields(cls)}
