"""Items of a response: thought, message and function calls, whole and as stream events."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

from nanovllm.serving.server.answers.delta import AnswerDelta
from nanovllm.serving.server.openai.responses_input import sealed

Event = dict[str, Any]  # the sequence number is added later


def is_json(text: str) -> bool:
    """Whether a text is a whole JSON value."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


class Items:
    """Output items of one response, in the order of generation.

    Args:
        seals: True if thought also comes as `encrypted_content`.
    """

    def __init__(self, *, seals: bool) -> None:
        self._seals = seals
        self.output: list[dict[str, Any]] = []  # items that are complete
        self._open: dict[str, Any] | None = None
        self._text = ""  # text of the open item

    def add(self, new: AnswerDelta, *, end: str | None) -> Iterator[Event]:
        """Add the new parts of an answer; yields their events.

        Args:
            end: status of the item that is open when the answer ends: "completed" or "incomplete"; None before.
        """
        if new.reasoning:
            yield from self._write("reasoning", new.reasoning)
        for part in new.parts:
            if isinstance(part, str):
                yield from self._write("message", part)
            else:
                yield from self._call(part)
        if end is not None:
            yield from self._end(end)

    def _write(self, kind: str, text: str) -> Iterator[Event]:
        if self._open is not None and self._open["type"] != kind:
            yield from self._end("completed")
        if self._open is None:
            yield from self._begin(kind)
        self._text += text
        yield self._part_event("delta") | {"delta": text} | self._logprobs()

    def _begin(self, kind: str) -> Iterator[Event]:
        if kind == "reasoning":
            self._open = {"id": _new_id("rs"), "type": kind, "summary": [], "content": [], "status": "in_progress"}
        else:
            self._open = {
                "id": _new_id("msg"), "type": kind, "role": "assistant", "content": [], "status": "in_progress",
            }  # fmt: skip
        self._text = ""
        yield self._item_event("added", self._open)
        yield {"type": "response.content_part.added"} | self._place() | {"part": self._part()}

    def _end(self, status: str) -> Iterator[Event]:
        if self._open is None:
            return
        if self._open["type"] == "function_call":
            yield from self._end_call(status)
            return
        yield self._part_event("done") | {"text": self._text} | self._logprobs()
        yield {"type": "response.content_part.done"} | self._place() | {"part": self._part()}
        item = self._open | {"status": status, "content": [self._part()]}
        if item["type"] == "reasoning" and self._seals:
            item["encrypted_content"] = sealed(self._text)
        yield self._item_event("done", item)
        self.output.append(item)
        self._open = None

    def _call(self, part: dict[str, Any]) -> Iterator[Event]:
        """Write a call, or a part of one."""
        function = part["function"]
        if "id" in part:  # a part without one goes on with the open call
            yield from self._end("completed")
            self._open = {
                "id": _new_id("fc"), "type": "function_call", "call_id": part["id"], "name": function["name"],
                "arguments": "", "status": "in_progress",
            }  # fmt: skip
            self._text = ""
            yield self._item_event("added", self._open)
        self._text += function["arguments"]
        yield self._arguments_event("delta") | {"delta": function["arguments"]}

    def _end_call(self, status: str) -> Iterator[Event]:
        assert self._open is not None
        if status != "completed" and is_json(self._text):  # the call ended, the answer did not
            status = "completed"
        yield self._arguments_event("done") | {"arguments": self._text, "name": self._open["name"]}
        item = self._open | {"arguments": self._text, "status": status}
        yield self._item_event("done", item)
        self.output.append(item)
        self._open = None

    def _arguments_event(self, what: str) -> Event:
        assert self._open is not None
        place = {"item_id": self._open["id"], "output_index": len(self.output)}
        return {"type": f"response.function_call_arguments.{what}"} | place

    def _item_event(self, what: str, item: dict[str, Any]) -> Event:
        return {"type": f"response.output_item.{what}", "output_index": len(self.output), "item": item}

    def _part_event(self, what: str) -> Event:
        assert self._open is not None
        name = "reasoning_text" if self._open["type"] == "reasoning" else "output_text"
        return {"type": f"response.{name}.{what}"} | self._place()

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self.output), "content_index": 0}

    def _logprobs(self) -> dict[str, Any]:
        return {"logprobs": []} if self._open is not None and self._open["type"] == "message" else {}

    def _part(self) -> dict[str, Any]:
        assert self._open is not None
        if self._open["type"] == "reasoning":
            return {"type": "reasoning_text", "text": self._text}
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}
