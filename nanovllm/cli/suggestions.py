"""The command's parser, which names the nearest flag or command in its errors."""

from __future__ import annotations

import argparse
import difflib
import itertools
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from nanovllm.cli.coming_from import answer

_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")


class SuggestingParser(argparse.ArgumentParser):
    """`ArgumentParser` with suggestions, for the command and its subcommands."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        self._refuse_other_names(sys.argv[1:] if args is None else args)
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            parser = self._parser_of(getattr(found, "command", None))
            flags = [flag for action in parser._actions for flag in action.option_strings]
            typed = next((text.partition("=")[0] for text in unknown if text.startswith("--")), "")
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint(typed, flags)}")
        return found

    def error(self, message: str) -> NoReturn:
        if (match := _CHOICE.search(message)) is not None:
            message += hint(match[1], re.findall(r"'([^']*)'", match[2]))
        super().error(message)

    def _refuse_other_names(self, given: Sequence[str]) -> None:
        """Refuse names of other engines, and long flags with one dash: argparse would read -md as -m with a value."""
        if given and not given[0].startswith("-") and self._parser_of(given[0]) is self:
            self._refuse(given[0])
        parser = self._parser_of(given[0] if given else None)
        flags = [flag for action in parser._actions for flag in action.option_strings]
        for word in itertools.takewhile(lambda word: word != "--", given):
            name = word.partition("=")[0]
            if name == "-hf" and name not in flags:
                parser.error("-hf names a model, which this command does not take; give it to chat, generate or serve.")
            if name.startswith("-") and name not in flags:
                parser._refuse(name)
            if len(name) > 2 and f"-{name}" in flags:
                parser.error(f"unrecognized arguments: {name}; did you mean -{name}?")

    def _refuse(self, name: str) -> None:
        """End with an error if the name is one of another engine."""
        if (said := answer(name)) is not None:
            self.error(said)

    def _parser_of(self, command: str | None) -> SuggestingParser:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and command in action.choices:
                found: SuggestingParser = action.choices[command]
                return found
        return self


def hint(typed: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the nearest names, or "" if none is near."""
    near = difflib.get_close_matches(typed, list(known), n=2, cutoff=0.6) if typed else []
    return f"; did you mean {' or '.join(near)}?" if near else ""
