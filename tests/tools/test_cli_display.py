"""Answers at a terminal: Markdown drawn while it grows, and no control character of a model."""

import io
import re
import sys

import pytest
from rich.console import Console

from nanovllm.cli import markdown
from nanovllm.cli.display import PlainDisplay, draws, print_notice, printable, wrapped
from nanovllm.cli.markdown import MarkdownDisplay

TEXT = """\
# The sea

The sea is **wide**, and this line is longer than the terminal, so it is broken at words.
A second line <b>stays</b> one, [linked](http://example.org/x).

1. one

   still one
2. two

```python
def f(x: int) -> str:
    return "a" * x
```

| a | b |
|---|---|
| 1 | 2 |

[note]: http://example.org/y

The end.
"""
SCREEN = """\
The sea

The sea is wide, and this line is longer
than the terminal, so it is broken at
words.
A second line <b>stays</b> one, linked
(http://example.org/x).

 1 one
   still one
 2 two

 def f(x: int) -> str:
     return "a" * x

 a  b
 ────
 1  2

[note]: http://example.org/y

The end.

tiny"""


def screen(data):
    """What a terminal of any height shows after these characters."""
    rows = {}
    row = column = 0
    for control, argument, kind, character in re.findall(r"(\x1b\[([?\d;]*)([A-Za-z]))|([\s\S])", data):
        if control:
            assert kind in "AKmhl", control
            row -= int(argument or 1) if kind == "A" else 0
            if kind == "K":
                rows[row] = {}
        elif character == "\n":
            row, column = row + 1, 0
        elif character == "\r":
            column = 0
        else:
            rows.setdefault(row, {})[column] = character
            column += 1
    found = {n: "".join(cells.get(c, " ") for c in range(max(cells, default=-1) + 1)) for n, cells in rows.items()}
    return "\n".join(found.get(n, "").rstrip() for n in range(max(found) + 1)).rstrip()


@pytest.fixture
def console(monkeypatch):
    monkeypatch.setattr(markdown, "INTERVAL_S", 0.0)  # each update is drawn
    environ = {"TERM": "xterm-256color"}
    return Console(file=io.StringIO(), force_terminal=True, width=40, height=12, highlight=False, _environ=environ)


def draw(console, text, *, size, shown=""):
    display = MarkdownDisplay(console, shown)
    for end in range(len(shown), len(text), size):
        display.update(text[:end], "streaming")
    display.update(text, "streaming")
    display.close("tiny")
    return console.file.getvalue()


@pytest.mark.costly
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_markdown_that_streams_ends_as_it_is_drawn_at_once(console, size):
    assert screen(draw(console, TEXT, size=size)) == SCREEN


def test_code_has_colours(console):
    assert re.search(r"\x1b\[[\d;]+mdef\x1b\[0m", draw(console, TEXT, size=50))


def test_a_block_higher_than_the_terminal_is_whole_at_the_end(console):
    lines = [f"line {number}" for number in range(60)]
    shown = screen(draw(console, "```\n" + "\n".join(lines) + "\n```\n", size=40))
    assert [line.strip() for line in shown.splitlines()[:60]] == lines
    assert "streaming" not in shown


def test_an_answer_that_goes_on_draws_its_last_block_again(console):
    shown = "One.\n\n```python\nx = 1\n"
    assert screen(draw(console, shown + "y = 2\n```\n\nEnd.", size=3, shown=shown)) == " x = 1\n y = 2\n\nEnd.\n\ntiny"


def test_an_answer_that_is_interrupted_leaves_the_terminal_as_it_was(console):
    display = MarkdownDisplay(console)
    display.update("half a", "streaming")
    display.close(None)
    assert screen(console.file.getvalue()) == "half a"
    assert console.file.getvalue().count("\x1b[?25h") == console.file.getvalue().count("\x1b[?25l")  # the cursor


BAD = ["\x1b]0;title\x07", "\x1b[2J", "a\x08b", "\x9b31m", "\u202eabc", "\x7f", "\x00"]


@pytest.mark.parametrize("text", BAD, ids=ascii)
def test_a_model_cannot_control_the_terminal(console, text):
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", printable(text))
    for whole in (f"before {text} after", f"```\n{text}\n```", f"[{text}](http://example.org/{text})", f"# {text}"):
        out = draw(console, whole, size=3)
        assert text not in out and not re.search(r"\x1b(?!\[[\d;?]*[a-zA-Z])|[\x00-\x08\x7f-\x9f]", out)


def test_words_lines_and_tabs_stay():
    assert printable("größe\t😀\r\n你好") == "größe\t😀\n你好"


class Output(io.StringIO):
    def __init__(self, *, is_terminal):
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self):
        return self.is_terminal


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_plain_answer_is_as_it_stands_in_a_pipe_alone(monkeypatch, is_terminal):
    monkeypatch.setattr(sys, "stdout", Output(is_terminal=is_terminal))
    display = PlainDisplay("a")
    for text in ("a**b**", "a**b** \x1b[2J"):
        display.update(text, "streaming")
    display.close("tiny")
    assert sys.stdout.getvalue() == ("**b** \ufffd[2J\ntiny\n" if is_terminal else "**b** \x1b[2J\n")


def test_nothing_is_drawn_in_a_pipe_or_without_colours(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for is_terminal, variables in ((False, {}), (True, {"NO_COLOR": "1"}), (True, {"TERM": "dumb"}), (True, {})):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", Output(is_terminal=is_terminal))
            for name, value in variables.items():
                patch.setenv(name, value)
            assert draws() == (is_terminal and not variables)


def test_notices_break_at_words_and_a_table_keeps_its_second_column():
    assert wrapped("81 bytes are in the clipboard\n\n/usr/a/path-that-is-long", 16) == (
        "81 bytes are in\nthe clipboard\n\n/usr/a/path-that-is-long"
    )
    assert wrapped("/set A B  an option, such as this", 24) == ("/set A B  an option,\n          such as this")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_notices_are_wrapped_and_printable_at_a_terminal_alone(monkeypatch, is_terminal):
    monkeypatch.setenv("COLUMNS", "12")
    output = Output(is_terminal=is_terminal)
    print_notice("some words \x1b[2J", output)
    assert output.getvalue() == ("some words\n\ufffd[2J\n" if is_terminal else "some words \x1b[2J\n")
