"""Rules of a Lark grammar, numbered as they are added."""

from __future__ import annotations

import json
import re
from typing import Any

from nanovllm.features.grammar.vocabulary import is_marker
from nanovllm.serving.server.answers.thought_count import marker_id

_META = re.compile(r"[\\^$.|?*+()\[\]{}/]")
ANY_TEXT = r"/(.|\n)*/"
_INNER = re.compile("(｜[^｜<>]+｜)")  # one token within DeepSeek's tags


class Rules:
    """Rules of one grammar, over one tokenizer's tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._rules: dict[str, str] = {}  # name by its definition
        self._terminals: dict[str, str] = {}  # likewise

    def add(self, body: str, options: str = "") -> str:
        """Add a rule unless it is there; returns its name."""
        definition = f"[{options}]: {body}" if options else f": {body}"
        return self._rules.setdefault(definition, f"r{len(self._rules)}")

    def terminal(self, body: str) -> str:
        """Add a terminal unless it is there; returns its name. Only terminals have `&` and `~`."""
        return self._terminals.setdefault(f": {body}", f"T{len(self._terminals)}")

    def text(self, start: str) -> str:
        """The grammar."""
        named = [*self._rules.items(), *self._terminals.items()]
        return "\n".join([f"start: {start}", *(f"{name}{body}" for body, name in named)]) + "\n"

    def json(self, schema: Any) -> str:
        return self.add(f"%json {json.dumps(schema, ensure_ascii=False)}")

    @staticmethod
    def literal(text: str) -> str:
        return json.dumps(text, ensure_ascii=False)

    def free_text(self) -> str:
        return self.add(ANY_TEXT)

    def token_id(self, marker: str) -> int | None:
        """Id of a marker that is a token to llguidance, which free text does not hold; None for one that is text."""
        token_id = marker_id(self._tokenizer, marker)
        added = (getattr(self._tokenizer, "added_tokens_decoder", None) or {}).get(token_id)
        return token_id if added is not None and is_marker(marker, added.special) else None

    def marker(self, marker: str) -> str:
        """Rule for a marker: a token, text, or text around a token."""
        token_id = self.token_id(marker)
        if token_id is not None:
            return f"<[{token_id}]>"
        if not self._has_inner_token(marker):
            return self.literal(marker)
        return " ".join(self.marker(part) for part in _INNER.split(marker) if part)

    def until(self, marker: str, terminal: str | None = None) -> str:
        """Rule for free text, or for a terminal's text, up to and including a marker."""
        if self.token_id(marker) is not None:
            return f"{terminal or self.free_text()} {self.marker(marker)}"
        if self._has_inner_token(marker):  # text before the token ends the terminal
            before, token, behind = _INNER.split(marker, maxsplit=1)
            text = self.terminal(f"{terminal or ANY_TEXT} {self.literal(before)}")
            return f"{text} {self.marker(token)} {self.literal(behind)}"
        if terminal is not None:
            return self.add(f"{terminal} {self.literal(marker)}", "lazy")
        escaped = _META.sub(r"\\\g<0>", marker).replace("\n", r"\n")
        return self.add(rf"/(.|\n)*{escaped}/", "lazy")

    def _has_inner_token(self, marker: str) -> bool:
        found = _INNER.search(marker)
        return found is not None and found[0] != marker and self.token_id(found[0]) is not None
