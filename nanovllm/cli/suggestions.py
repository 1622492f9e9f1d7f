"""The command's parser, which names the nearest flag or command in its errors."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")


class SuggestingParser(argparse.ArgumentParser):
    """An `ArgumentParser`; so are the parsers of its subcommands."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
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

    def _parser_of(self, command: str | None) -> argparse.ArgumentParser:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and command in action.choices:
                found: argparse.ArgumentParser = action.choices[command]
                return found
        return self


def hint(typed: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" for what is near, else nothing."""
    near = difflib.get_close_matches(typed, list(known), n=2, cutoff=0.6) if typed else []
    return f"; did you mean {' or '.join(near)}?" if near else ""
