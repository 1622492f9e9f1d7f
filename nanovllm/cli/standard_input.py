"""Standard input as UTF-8, whatever the locale: Python's own reader makes lone surrogates of other bytes in some."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from nanovllm.core.validation import utf8

NAME = "standard input"


def read_standard_input() -> str:
    """All of it; raises ValueError for bytes that are not UTF-8."""
    buffer = getattr(sys.stdin, "buffer", None)  # what a program puts in its place may have text alone
    return sys.stdin.read() if buffer is None else utf8(NAME, buffer.read())


def standard_input_lines() -> Iterator[str]:
    """Its lines as they come, with their ends; raises ValueError as `read_standard_input`."""
    if sys.stdin is None:  # closed by the caller
        return
    for number, line in enumerate(getattr(sys.stdin, "buffer", sys.stdin), 1):
        yield utf8(f"line {number} of {NAME}", line) if isinstance(line, bytes) else line
