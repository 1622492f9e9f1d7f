"""Lets the reference show the fields of a class as a table: declared with `option`, or lines of `name: text`."""

from __future__ import annotations

import dataclasses
import re
from importlib import import_module
from typing import Any

from griffe import Attribute, Class, ExprCall, Extension

_FIELD = re.compile(r"^(\w+(?:, \w+)*): ")


class Fields(Extension):
    """Puts each run of such lines, with what is indented below them, into a section that the parser knows."""

    def on_class(self, *, cls: Class, **_: Any) -> None:
        if cls.docstring is None:
            return
        lines: list[str] = []
        is_within = False
        options = [f"{name}: {text}" for name, member in cls.members.items() if (text := _option_help(member))]
        for line in [*cls.docstring.value.splitlines(), *(["", *options] if options else [])]:
            if field := _FIELD.match(line):
                if not is_within and all(name in cls.members for name in field[1].split(", ")):
                    is_within = True
                    lines.append("Attributes:")
            elif not line.startswith(" "):
                is_within = False
            lines.append(f"    {line}" if is_within else line)
        cls.docstring.value = "\n".join(lines)


def _option_help(member: Any) -> str | None:
    """The help of a field that is declared with `option`: of the class itself, since it may be put together."""
    call = member.value if isinstance(member, Attribute) else None
    if not isinstance(call, ExprCall) or str(call.function) != "option":
        return None
    module, _, name = member.parent.canonical_path.rpartition(".")
    fields = {field.name: field for field in dataclasses.fields(getattr(import_module(module), name))}
    return str(fields[member.name].metadata["help"])
