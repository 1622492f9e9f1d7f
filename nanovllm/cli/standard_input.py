"""Standard input as UTF-8, in any locale: in some, Python's own reader decodes invalid bytes to lone surrogates."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from nanovllm.features.option_checks import utf8

NAME = "standard input"


def read_standard_input() -> str:
    """Read all of standard input; raises ValueError for bytes that are not UTF-8."""
    buffer = getattr(sys.stdin, "buffer", None)  # a program may have replaced it by a text stream
    return sys.stdin.read() if buffer is None else utf8(NAME, buffer.read())


def standard_input_lines() -> Iterator[str]:
    """Yield the lines with their ends, as they arrive; raises ValueError like `read_standard_input`."""
    if sys.stdin is None:  # the caller closed it
        return
    for number, line in enumerate(getattr(sys.stdin, "buffer", sys.stdin), 1):
        yield utf8(f"line {number} of {NAME}", line) if isinstance(line, bytes) else line
