"""Shows a growing answer: as it stands in a pipe, without control characters at a terminal, drawn where colours are."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from typing import Protocol, TextIO

_FIRST_COLUMN = re.compile(r"\S+(?: \S+)* {2,}")  # first column of a table, such as /help's
# Control characters of C0 and C1, and marks that reorder text: a model must not move the cursor, set the title or
# hide a part of its answer.
_REORDERING = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
_SHOWN: dict[int, str | None] = dict.fromkeys((*range(0x20), *range(0x7F, 0xA0), *_REORDERING), "\ufffd")
del _SHOWN[ord("\n")], _SHOWN[ord("\t")]
_SHOWN[ord("\r")] = None


class Display(Protocol):
    """Shows one answer."""

    def update(self, text: str, status: str) -> None:
        """Show the whole text so far, and a line of status below it where there is room for one."""

    def close(self, status: str | None) -> None:
        """Show the rest of the last text, then the status."""


def printable(text: str) -> str:
    """The text for a terminal: control characters but tab and newline become U+FFFD."""
    return text.translate(_SHOWN)


def print_answer(text: str, *, end: str = "\n") -> None:
    """Print a model's text: as it stands in a pipe or file, `printable` at a terminal."""
    print(printable(text) if sys.stdout.isatty() else text, end=end, flush=True)


def print_notice(text: str, file: TextIO | None = None) -> None:
    """Print the program's own text, at a terminal with lines broken at words; standard output by default."""
    file = file or sys.stdout
    if file.isatty():
        text = wrapped(printable(text), shutil.get_terminal_size().columns)
    print(text, file=file, flush=True)


def wrapped(text: str, width: int) -> str:
    """Break lines at words; the second column of a table keeps its place if it has half of the width."""
    lines: list[str] = []
    for line in text.splitlines():
        column = _FIRST_COLUMN.match(line)
        indent = column.end() if column is not None and column.end() <= width // 2 else 0
        words = textwrap.TextWrapper(
            width, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False
        )  # a path that the terminal breaks can be copied
        lines += words.wrap(line) or [""]
    return "\n".join(lines)


def draws() -> bool:
    """Whether standard output is a terminal with colours and a cursor that moves, and the user wants them."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


class PlainDisplay:
    """Prints new text as it comes.

    Args:
        shown: the beginning of the text, which was shown before.
    """

    def __init__(self, shown: str = "") -> None:
        self._shown = shown

    def update(self, text: str, status: str) -> None:
        print_answer(text[len(self._shown) :], end="")
        self._shown = text

    def close(self, status: str | None) -> None:
        print(flush=True)
        if status is not None and sys.stdout.isatty():
            print(printable(status), flush=True)
