"""What is new of an answer: thought, content and tool calls."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class AnswerDelta:
    """New parts of an answer; `calls` are tool calls in OpenAI's form, each whole."""

    reasoning: str = ""
    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


def new_call(name: str, arguments: str) -> dict[str, Any]:
    """A tool call in OpenAI's form, with an id of its own."""
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
