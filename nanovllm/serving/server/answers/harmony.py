"""Parser of harmony, gpt-oss' format: messages in channels, each after a header of special tokens.

::

    <|channel|>analysis<|message|>thought<|end|><|start|>assistant<|channel|>final<|message|>content<|return|>
    <|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>

The prompt ends with <|start|>assistant. A message of the commentary channel without a recipient is content.
"""

from __future__ import annotations

import re

from nanovllm.serving.server.answers.delta import AnswerDelta, CallParts
from nanovllm.serving.server.answers.json_calls import JsonCall, Tools, tool_name
from nanovllm.serving.server.answers.reasoning import partial_marker

START = "<|start|>"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>", START)
MARKERS = (CHANNEL, MESSAGE, "<|constrain|>", *ENDS)
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CUT_HEADER = re.compile(r"<\|start\|>|(assistant\s*)?(to=\S+\s*)?<\|channel\|>|to=functions\.")
_NAMED_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyStream:
    """Separates thought, content and tool calls of one answer while it streams.

    A call of an unknown tool, or with truncated arguments, is content; so is text after whole arguments.

    Args:
        tools: schemas of the parameters of the request's tools, by name.
        streams_calls: True if calls are returned in parts; see `CallParts`.
    """

    def __init__(self, tools: Tools, *, streams_calls: bool = False) -> None:
        self._tools = tools
        self._parts = CallParts(streams=streams_calls)
        self._call: JsonCall | None = None  # call of the open message
        self._text = ""  # not yet returned
        self._in_body = False
        self._header = ""
        self._has_content = False

    @property
    def num_calls(self) -> int:
        return self._parts.num_calls

    @property
    def is_open(self) -> bool:
        """Whether the answer is within thought."""
        return self._in_body and self._channel == "analysis"

    @property
    def _channel(self) -> str:
        found = _NAMED_CHANNEL.search(self._header)
        return found[1] if found else "final"

    @property
    def _tool(self) -> str | None:
        """The tool that the message calls."""
        found = _RECIPIENT.search(self._header)
        return tool_name(found[1], self._tools) if found else None

    def add(self, text: str, *, is_last: bool) -> AnswerDelta:
        """Add text, special tokens included; returns the new parts of the answer."""
        self._text += text
        delta = AnswerDelta()
        while self._step(delta, is_last=is_last):
            pass
        self._has_content = self._has_content or bool(delta.content)
        return delta

    def _step(self, delta: AnswerDelta, *, is_last: bool) -> bool:
        """Read one header or body; returns whether another may follow."""
        if not self._in_body:
            header, found, rest = self._text.partition(MESSAGE)
            if not found:
                return self._read_bare_text(delta, is_last=is_last)
            self._header = header
            self._text = rest
            self._in_body = True
            return True
        ends = [at for marker in ENDS if (at := self._text.find(marker)) >= 0]
        if ends:
            body = self._text[: min(ends)]
            self._text = self._text[min(ends) :]
            for marker in ENDS[:-1]:
                self._text = self._text.removeprefix(marker)
            self._show(delta, body)
            self._in_body = False
            return bool(self._text)
        kept = 0 if is_last else max(partial_marker(self._text, marker) for marker in ENDS)
        body = self._text[: len(self._text) - kept]
        rest = self._text[len(self._text) - kept :]
        if self._tool is not None and not is_last:
            self._read_call(delta, self._tool, body, is_last=False)
            return False
        self._text = rest
        self._show(delta, body)
        return False

    def _read_bare_text(self, delta: AnswerDelta, *, is_last: bool) -> bool:
        """Read text outside of any message: an incomplete header, or content of a model that ignores the format."""
        begin = self._text.lstrip()
        if is_last:  # a truncated header is dropped
            is_header = not begin or _CUT_HEADER.match(begin) is not None
        else:
            starts = (CHANNEL, START, "to=", "assistant")
            is_header = begin.startswith(starts) or any(start.startswith(begin) for start in starts)
        if is_header:
            return False
        self._header = ""
        self._in_body = True
        return True

    def _show(self, delta: AnswerDelta, body: str) -> None:
        """Return the body of a message, or its new part; of a call, the whole body."""
        if self._tool is not None:
            self._read_call(delta, self._tool, body, is_last=True)
        elif self._channel == "analysis" and "to=functions." not in self._header:
            delta.reasoning += body
        else:
            delta.add_text(body)

    def _read_call(self, delta: AnswerDelta, name: str, body: str, *, is_last: bool) -> None:
        """Read the arguments of a call.

        Args:
            body: text of the message so far; all of it with `is_last`.
        """
        if is_last and not body.strip():
            body = "{}"
        if self._call is None:
            self._call = JsonCall(0, self._tools, (), name)
        call = self._call
        call.read(body, is_last=is_last)
        is_whole = is_last and call.end is not None
        delta.parts += self._parts.add(call, is_ended=is_whole)
        if is_last:
            if is_whole:
                delta.add_text(body[call.end :] if body[call.end :].strip() else "")
            else:
                delta.add_text(body[call.failed or 0 :] if self._parts.is_begun else body)
            self._call = None
            self._parts.drop()
