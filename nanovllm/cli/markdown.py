"""Draws a growing Markdown text at a terminal: finished blocks once, the last one again with each update."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Heading, Markdown
from rich.segment import Segment
from rich.text import Text

from nanovllm.cli.display import printable

INTERVAL_S = 0.08  # seconds between two updates: drawing a long block of code takes some milliseconds
CODE_THEME = "ansi_dark"  # the terminal's own colours and background
MIN_LINES = 4  # fewest lines shown of the last block, even on a small terminal
# HTML is text, so that no part of an answer is left out, and so are definitions of links.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).disable("reference")


class _LeftHeading(Heading):
    LEVEL_ALIGN: ClassVar = {}


class _Blocks(Markdown):
    """Markdown that keeps line breaks, as in a poem, and shows the addresses of links."""

    elements = Markdown.elements | {"heading_open": _LeftHeading}

    def __init__(self, tokens: list[Any]) -> None:
        super().__init__("", code_theme=CODE_THEME, hyperlinks=False)
        for token in tokens:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"
        self.parsed = tokens


class _Lines:
    """Lines of blocks, without empty ones at either end.

    Args:
        status: line below an unfinished block, cut at its top to fit the terminal; None for a finished one.
    """

    def __init__(self, tokens: list[Any], status: str | None = None) -> None:
        self._tokens = tokens
        self._status = status

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(_Blocks(self._tokens), options.update(height=None), pad=False)
        full = [number for number, line in enumerate(lines) if any(segment.text.strip() for segment in line)]
        lines = lines[full[0] : full[-1] + 1] if full else []
        for line in lines if self._status is None else lines[-max(MIN_LINES, console.height - 3) :]:
            yield from line
            yield Segment.line()
        if self._status is not None:
            yield Text(self._status, style="dim", no_wrap=True, overflow="ellipsis")


class MarkdownDisplay:
    """Draws one answer; see `Display`.

    Finished blocks scroll away as ordinary output, so that the terminal keeps them and a resize cannot tear them.

    Args:
        shown: the beginning of the text, which was drawn before; its last block is drawn again.
    """

    def __init__(self, console: Console, shown: str = "") -> None:
        self._console = console
        self._given, self._text, self._status, self._begin = shown, printable(shown), "", 0
        self._begin, _ = self._last_block()  # offset in characters; the text from there is not printed yet
        self._drawn_at = float("-inf")
        self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)
        self._live.start()

    def update(self, text: str, status: str) -> None:
        self._given = text
        self._status = status
        if time.monotonic() - self._drawn_at >= INTERVAL_S:
            self._draw()
            self._drawn_at = time.monotonic()

    def close(self, status: str | None) -> None:
        try:
            self._text = printable(self._given)
            self._print(len(self._text))
        finally:
            self._live.update(Text(""))
            self._live.stop()
        if status is not None:
            self._console.print(Text(status, style="dim"))

    def _draw(self) -> None:
        self._text = printable(self._given)
        begin, tokens = self._last_block()
        self._print(begin)
        self._live.update(_Lines(tokens, self._status), refresh=True)

    def _print(self, end: int) -> None:
        """Print the blocks up to `end` above the live region."""
        block: list[Any] = []
        for token in _PARSER.parse(self._text[self._begin : end]):
            block.append(token)
            if token.level == 0 and token.nesting <= 0:
                self._console.print(_Lines(block))
                self._console.print()
                block = []
        self._begin = end

    def _last_block(self) -> tuple[int, list[Any]]:
        """Start of the last block in characters, and its tokens: only it can change with more text."""
        begin = self._begin
        text = self._text[self._begin :]
        tokens = _PARSER.parse(text)
        starts = [
            number for number, token in enumerate(tokens) if token.level == 0 and token.map and token.nesting >= 0
        ]
        if not starts:
            return begin, tokens
        number = starts[-1]
        line = (tokens[number].map or [0])[0]
        return begin + sum(map(len, text.splitlines(keepends=True)[:line])), tokens[number:]
