"""Parser of harmony, gpt-oss' format: messages in channels, each after a header of special tokens.

::

    <|channel|>analysis<|message|>thought<|end|><|start|>assistant<|channel|>final<|message|>content<|return|>
    <|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>

The prompt ends with <|start|>assistant. A message of the commentary channel without a recipient is content.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from nanovllm.server.answers.delta import AnswerDelta, as_call
from nanovllm.server.answers.reasoning import partial_marker

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>", START)
MARKERS = (CHANNEL, MESSAGE, "<|constrain|>", *ENDS)
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
_CUT_HEADER = re.compile(r"<\|start\|>|(assistant\s*)?(to=\S+\s*)?<\|channel\|>|to=functions\.")
_NAMED_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyStream:
    """Separates thought, content and tool calls of one answer while it streams.

    A call of an unknown tool, or with truncated arguments, is content.

    Args:
        names: names of the request's tools.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._text = ""  # not yet returned
        self._in_body = False
        self._header = ""
        self._has_content = False
        self.num_calls = 0

    @property
    def is_open(self) -> bool:
        """Whether the answer is within thought."""
        return self._in_body and self._channel == "analysis"

    @property
    def _channel(self) -> str:
        found = _NAMED_CHANNEL.search(self._header)
        return found[1] if found else "final"

    @property
    def _recipient(self) -> str | None:
        found = _RECIPIENT.search(self._header)
        return found[1] if found else None

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
            self._header, self._text, self._in_body = header, rest, True
            return True
        ends = [at for marker in ENDS if (at := self._text.find(marker)) >= 0]
        if ends:
            body = self._text[: min(ends)]
            self._text = self._text[min(ends) :]
            for marker in ENDS[:-1]:
                self._text = self._text.removeprefix(marker)
            self._show(delta, body, is_whole=True)
            self._in_body = False
            return bool(self._text)
        if self._recipient is not None and not is_last:
            return False  # a call arrives whole
        kept = 0 if is_last else max(partial_marker(self._text, marker) for marker in ENDS)
        body, self._text = self._text[: len(self._text) - kept], self._text[len(self._text) - kept :]
        self._show(delta, body, is_whole=is_last)
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
        self._header, self._in_body = "", True
        return True

    def _show(self, delta: AnswerDelta, body: str, *, is_whole: bool) -> None:
        name = self._recipient
        if name is not None:
            call = as_call(name, body) if name in self._names and is_whole else None
            if call is None:
                delta.add_text(body)
            else:
                delta.parts.append(call)
                self.num_calls += 1
        elif self._channel == "analysis":
            delta.reasoning += body
        else:
            delta.add_text(body)
