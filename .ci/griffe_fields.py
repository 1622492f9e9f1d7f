"""Lets the reference show the fields of a class as a table: its docstring has them as lines of `name: text`."""

from __future__ import annotations

import re
from typing import Any

from griffe import Class, Extension

_FIELD = re.compile(r"^(\w+(?:, \w+)*): ")


class Fields(Extension):
    """Puts each run of such lines, with what is indented below them, into a section that the parser knows."""

    def on_class(self, *, cls: Class, **_: Any) -> None:
        if cls.docstring is None:
            return
        lines: list[str] = []
        is_within = False
        for line in cls.docstring.value.splitlines():
            if field := _FIELD.match(line):
                if not is_within and all(name in cls.members for name in field[1].split(", ")):
                    is_within = True
                    lines.append("Attributes:")
            elif not line.startswith(" "):
                is_within = False
            lines.append(f"    {line}" if is_within else line)
        cls.docstring.value = "\n".join(lines)
