"""Delta of an answer: new thought, content and tool calls."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any, Protocol

Part = str | dict[str, Any]  # a piece of the content, or a tool call in OpenAI's form; see `CallParts`


@dataclass(slots=True)
class AnswerDelta:
    """New parts of an answer, thought first.

    parts: pieces of the content and tool calls, whole or in parts, in their order.
    """

    reasoning: str = ""
    parts: list[Part] = field(default_factory=list)

    @property
    def content(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[dict[str, Any]]:
        return [part for part in self.parts if not isinstance(part, str)]

    def numbered_calls(self, num_calls: int) -> list[dict[str, Any]]:
        """Calls and parts of calls with their indexes, as OpenAI's stream has them.

        Args:
            num_calls: number of calls in the answer so far, these included.
        """
        index = num_calls - 1 - sum("id" in call for call in self.calls)
        found = []
        for call in self.calls:
            index += "id" in call
            found.append({"index": index} | call)
        return found

    def add_text(self, text: str) -> None:
        if text:
            self.parts.append(text)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.parts)


class Readable(Protocol):
    """A call that is being read; see `JsonCall`."""

    @property
    def name(self) -> str | None: ...

    @property
    def arguments(self) -> str: ...

    @property
    def end(self) -> int | None: ...


class CallParts:
    """Parts of one call after another, as they are read.

    A call that streams begins with its id, its name and the arguments so far, once the text is certain to
    call a tool; later parts have the arguments that follow, and nothing else. All of them join to the whole call. One
    that does not stream is a single part.

    Args:
        streams: True if calls are returned in parts.
    """

    def __init__(self, *, streams: bool) -> None:
        self._streams = streams
        self._num_sent = 0  # characters of the open call's arguments
        self.num_calls = 0

    @property
    def is_begun(self) -> bool:
        """Whether a part of the open call is returned."""
        return self._num_sent > 0

    def add(self, call: Readable, *, is_ended: bool) -> list[Part]:
        """Return the new part of the open call."""
        if not is_ended and not self._streams:
            return []
        written = call.arguments if is_ended or call.end is None else call.arguments[:-1]
        new = written[self._num_sent :]
        if call.name is None or not new:
            return []
        part = {"function": {"arguments": new}} if self.is_begun else new_call(call.name, new)
        self.num_calls += not self.is_begun
        self._num_sent = 0 if is_ended else self._num_sent + len(new)
        return [part]

    def drop(self) -> None:
        """End a call that is none, or was cut off."""
        self._num_sent = 0


def new_call(name: str, arguments: str) -> dict[str, Any]:
    """A tool call in OpenAI's form, with a new id."""
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
