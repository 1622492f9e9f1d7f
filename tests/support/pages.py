"""The documentation's pages: texts, tables, code, and fenced blocks with the notes in front of them."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "tests" / "README.md"])
}
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in PAGES.items()}
# A note is a comment, which readers do not see: before a block its own, with "of this page" that of all its blocks.
_FENCE = re.compile(
    r"^(?:<!-- snippet: (?P<note>[^\n]*?) -->\n+)?^```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_OF_PAGE = re.compile(r"^<!-- snippets of this page: (.*?) -->$", re.MULTILINE)
_ENDS_OF_COMMANDS = {"&&", "||", "|", ";", "&", "(", ")"}


@dataclass(frozen=True)
class Snippet:
    """A fenced block.

    note: how it runs: "" as it is; "not run: REASON"; "in the background", until the page ends; "slow"; "with FLAGS",
        which each command `nanovllm` gets in addition; "slow; with FLAGS".
    """

    page: str
    line: int
    language: str
    text: str
    note: str

    @property
    def is_slow(self):
        return self.note.startswith("slow")

    @property
    def flags(self):
        return self.note.partition("with ")[2] if not self.note.startswith("not run") else ""

    def __str__(self):
        return f"{self.page}:{self.line}"


def snippets(page):
    """The fenced blocks of a page, in order."""
    text = TEXTS[page]
    of_page = _OF_PAGE.search(text)
    return [
        Snippet(
            page, text[: found.start("text")].count("\n") + 1, found["language"], found["text"],
            found["note"] or (of_page[1] if of_page else ""),
        )
        for found in _FENCE.finditer(text)
    ]  # fmt: skip


def commands(text):
    """The words of each command of a shell script, without assignments of variables and redirections."""
    text = re.sub(r"<<'?(\w+)'?\n.*?\n\1$", "", text, flags=re.MULTILINE | re.DOTALL)  # documents that it holds
    for line in text.replace("\\\n", " ").splitlines():
        reader = shlex.shlex(line, posix=True, punctuation_chars=True)
        reader.wordchars += "{}[]$:=,*@!%^+"
        command = []
        for word in [*reader, ";"]:
            if word in _ENDS_OF_COMMANDS:
                if command:
                    yield _without_redirections(command)
                command = []
            elif command or not re.fullmatch(r"\w+=.*", word):
                command.append(word)


def _without_redirections(words):
    return [
        word
        for number, word in enumerate(words)
        if not re.fullmatch(r"[<>]+&?", word) and not (number and re.fullmatch(r"[<>]+&?", words[number - 1]))
    ]


def inline_code(text):
    """Code between single backticks, outside of fences."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    for code in re.findall(r"`([^`]+)`", text):
        yield re.sub(r"\s+", " ", code)


def tables(text):
    """Each table's rows of cells, the head first, without the line below it."""
    for found in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        rows = [re.split(r"(?<!\\)\|", line.strip()[1:-1]) for line in found.splitlines()]
        yield [[cell.strip() for cell in row] for number, row in enumerate(rows) if number != 1]
