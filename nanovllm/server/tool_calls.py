"""Tool calls in an answer's text, for the model families that have a form for them.

    hermes    <tool_call>{"name": ..., "arguments": {...}}</tool_call>, once for each call    Hermes, Qwen2.5, Qwen3
    llama     {"name": ..., "parameters": {...}} as the whole answer; ";" between several     Llama 3.1 and later
    mistral   [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name{...}  Mistral

What cannot be read as calls of tools that the request offers stays text.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

_decode = json.JSONDecoder().raw_decode


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One family's form.

    markers: calls begin with one of them; text before is the answer's content.
    at_start: only where nothing but space stands before.
    has_special_tokens: the marker is a special token, so those must be kept in the text that is parsed.
    parse: the calls behind the begin of the first marker; raises ValueError, KeyError or TypeError for anything else.
    """

    markers: tuple[str, ...]
    at_start: bool
    has_special_tokens: bool
    parse: Callable[[str], Iterator[tuple[str, Any]]]


def _hermes(text: str) -> Iterator[tuple[str, Any]]:
    for part in re.findall(r"<tool_call>(.*?)(?:</tool_call>|$)", text, re.DOTALL):
        call = json.loads(part)
        yield call["name"], call.get("arguments", {})


def _llama(text: str) -> Iterator[tuple[str, Any]]:
    text = text.strip().removeprefix("<|python_tag|>").strip()
    while text:
        call, end = _decode(text)
        yield call["name"], call["parameters"] if "parameters" in call else call["arguments"]
        text = text[end:].lstrip("; \n")


def _mistral(text: str) -> Iterator[tuple[str, Any]]:
    parts = [part.strip() for part in text.split("[TOOL_CALLS]") if part.strip()]
    for part in parts:
        if part.startswith("["):
            for call in json.loads(part):
                yield call["name"], call["arguments"]
        else:
            name, _, _ = part.partition("{")
            yield re.split(r"\[(?:ARGS|CALL_ID)\]", name)[0].strip(), json.loads(part[len(name) :])


FORMATS: dict[str, ToolFormat | None] = {
    "hermes": ToolFormat(("<tool_call>",), False, False, _hermes),
    "llama": ToolFormat(("<|python_tag|>", "{"), True, True, _llama),
    "mistral": ToolFormat(("[TOOL_CALLS]",), False, True, _mistral),
    "none": None,
}


def format_of(tokenizer: Any) -> str:
    """The name of a model's form, by what its chat template writes."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    for sign, name in (("<tool_call>", "hermes"), ("[TOOL_CALLS]", "mistral"), ("<|python_tag|>", "llama")):
        if sign in template:
            return name
    return "llama" if "Environment: ipython" in template else "none"


class ToolStream:
    """Tells the content of one answer from its tool calls, as the text comes.

    Text that may become a marker is held back; behind one, all of it is, until the answer ends.

    Args:
        names: of the tools that the request offers.
        special_tokens: texts that are none of the content.
    """

    def __init__(self, form: ToolFormat, names: Collection[str], special_tokens: Collection[str] = ()) -> None:
        self._form, self._names = form, names
        self._dropped = [token for token in special_tokens if token not in form.markers] if special_tokens else []
        self._text = ""
        self._num_shown = 0

    def add(self, text: str, *, is_last: bool) -> tuple[str, list[dict[str, Any]]]:
        """What of the content can be shown now, and the calls, once the answer has ended."""
        for token in self._dropped if self._form.has_special_tokens else ():
            text = text.replace(token, "")
        self._text += text
        start = self._marker()
        calls: list[dict[str, Any]] = []
        end = len(self._text) if start is None else start
        if is_last and start is not None:
            calls = self._calls(self._text[start:])
            end = start if calls else len(self._text)
        elif start is None and not is_last:
            end -= self._num_held_back()
        content = self._text[self._num_shown : end]
        self._num_shown = max(self._num_shown, end)
        return (content.rstrip() if calls else content), calls

    def _marker(self) -> int | None:
        found = [at for marker in self._form.markers if (at := self._text.find(marker)) >= 0]
        if not found or (self._form.at_start and self._text[: min(found)].strip()):
            return None
        return min(found)

    def _num_held_back(self) -> int:
        """How much of the text's end may be the begin of a marker."""
        if self._form.at_start and self._text.strip() and not self._could_begin(self._text.strip()):
            return 0
        longest = max(map(len, self._form.markers)) - 1
        for length in range(min(longest, len(self._text)), 0, -1):
            if self._could_begin(self._text[-length:]):
                return length
        return len(self._text) if self._form.at_start and not self._text.strip() else 0

    def _could_begin(self, text: str) -> bool:
        return any(marker.startswith(text) for marker in self._form.markers)

    def _calls(self, text: str) -> list[dict[str, Any]]:
        try:
            calls = [(name, _as_json(arguments)) for name, arguments in self._form.parse(text)]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return []
        if not all(isinstance(name, str) and name in self._names for name, _ in calls):
            return []
        return [
            {
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for name, arguments in calls
        ]


def _as_json(arguments: Any) -> str:
    """Raises TypeError and ValueError for what is neither an object nor its text."""
    if isinstance(arguments, str):
        return arguments
    if not isinstance(arguments, dict):
        raise TypeError(f"arguments are an object, not {type(arguments).__name__}")
    return json.dumps(arguments, ensure_ascii=False, allow_nan=False)
