"""Delta of an answer: new thought, content and tool calls."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import Any

Part = str | dict[str, Any]  # a piece of the content, or a tool call in OpenAI's form


@dataclass(slots=True)
class AnswerDelta:
    """New parts of an answer, thought first.

    parts: pieces of the content and whole tool calls, in their order.
    """

    reasoning: str = ""
    parts: list[Part] = field(default_factory=list)

    @property
    def content(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[dict[str, Any]]:
        return [part for part in self.parts if not isinstance(part, str)]

    def add_text(self, text: str) -> None:
        if text:
            self.parts.append(text)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.parts)


def new_call(name: str, arguments: str) -> dict[str, Any]:
    """A tool call in OpenAI's form, with a new id."""
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def as_call(name: str, arguments: str) -> dict[str, Any] | None:
    """A tool call, or None unless its arguments are a JSON object."""
    try:
        if isinstance(json.loads(arguments), dict):
            return new_call(name, arguments)
    except (ValueError, RecursionError):
        pass
    return None
