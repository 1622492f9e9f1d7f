"""Answer format of a model: its reasoning format, its tool call format, and their stream parser."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from nanovllm.serving.server.answers import harmony
from nanovllm.serving.server.answers.call_formats import FORMATS, HARMONY_TOOLS, ToolFormat, detect_format
from nanovllm.serving.server.answers.delta import AnswerDelta
from nanovllm.serving.server.answers.json_calls import Tools
from nanovllm.serving.server.answers.reasoning import (
    HARMONY,
    REASONING_FORMATS,
    ReasoningFormat,
    ReasoningStream,
    detect_reasoning,
)
from nanovllm.serving.server.answers.tool_calls import ToolStream


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Formats of a model, None where it has none, and the texts of its special tokens."""

    reasoning: ReasoningFormat | None
    tools: ToolFormat | None
    special_tokens: frozenset[str] = frozenset()

    @property
    def is_harmony(self) -> bool:
        return self.reasoning is HARMONY or self.tools is HARMONY_TOOLS

    def needs_special_tokens(self, *, with_tools: bool) -> bool:
        """Whether the parser needs special tokens in the text, because markers are special tokens."""
        own = () if self.reasoning is None else self.reasoning.markers
        if with_tools and self.tools is not None:
            own += self.tools.strings
        return self.is_harmony or not self.special_tokens.isdisjoint(own)

    def stream(
        self, tools: Tools | None, *, is_open: bool, streams_calls: bool = False
    ) -> AnswerStream | harmony.HarmonyStream | None:
        """Create the parser of one answer; None if the format has nothing to parse.

        Args:
            tools: schemas of the tools' parameters by name; None without tools.
            is_open: True if the prompt opens the thought, so that the answer begins within it.
            streams_calls: True if calls are returned in parts; see `CallParts`.
        """
        if self.is_harmony:
            return harmony.HarmonyStream(tools or {}, streams_calls=streams_calls)
        tool_format = self.tools if tools else None
        if self.reasoning is None and tool_format is None:
            return None
        kept = () if self.reasoning is None else self.reasoning.markers
        if tool_format is not None:
            kept += tool_format.strings
        dropped = self.special_tokens - set(kept) if self.needs_special_tokens(with_tools=bool(tools)) else ()
        return AnswerStream(
            None if self.reasoning is None else ReasoningStream(self.reasoning, is_open=is_open),
            None if tool_format is None else ToolStream(tool_format, tools or {}, streams=streams_calls),
            dropped,
        )


class AnswerStream:
    """Separates thought, content and tool calls of one answer while it streams; calls within thought are thought.

    Args:
        dropped: special tokens that are kept for the parser alone. A stop string, which holds text back, may cut one.
    """

    def __init__(
        self, reasoning: ReasoningStream | None, tools: ToolStream | None, dropped: Collection[str] = ()
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._dropped = any_of(frozenset(dropped)) if dropped else None
        self._beginnings = beginnings_of(frozenset(dropped))
        self._longest = max(map(len, self._beginnings), default=0)
        self._held = ""  # may begin a dropped token

    @property
    def is_open(self) -> bool:
        """Whether the answer is within thought."""
        return self._reasoning is not None and self._reasoning.is_open

    @property
    def num_calls(self) -> int:
        return 0 if self._tools is None else self._tools.num_calls

    def add(self, text: str, *, is_last: bool) -> AnswerDelta:
        """Add text; returns the new parts of the answer."""
        if self._dropped is not None:
            text = self._dropped.sub("", self._held + text)
            kept = 0 if is_last else self._num_held(text)
            text, self._held = text[: len(text) - kept], text[len(text) - kept :]
        thought = ""
        if self._reasoning is not None:
            thought, text = self._reasoning.add(text, is_last=is_last)
        delta = AnswerDelta(thought)
        if self._tools is not None:
            delta.parts = self._tools.add(text, is_last=is_last)
        else:
            delta.add_text(text)
        return delta

    def _num_held(self, text: str) -> int:
        longest = min(len(text), self._longest)
        return next((size for size in range(longest, 0, -1) if text[-size:] in self._beginnings), 0)


@functools.cache
def beginnings_of(texts: frozenset[str]) -> frozenset[str]:
    """Proper prefixes of the texts."""
    return frozenset(text[:size] for text in texts for size in range(1, len(text)))


@functools.cache
def any_of(texts: frozenset[str]) -> re.Pattern[str]:
    """Pattern that matches any of the texts; a tokenizer may have a thousand special tokens."""
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)))


def template_text(tokenizer: Any) -> str:
    """The source of a tokenizer's chat templates; empty without any."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):  # several, by name
        return "\n".join(map(str, template.values()))
    return str(template or "")


def answer_format(tokenizer: Any, tool_format: str = "auto", reasoning_format: str = "auto") -> AnswerFormat:
    """Resolve the formats of a model; "auto" detects them in its chat template."""
    template = template_text(tokenizer)
    if tool_format == "auto":
        tool_format = detect_format(template)
    if reasoning_format == "auto":
        reasoning_format = detect_reasoning(template)
    special: set[str] = set(getattr(tokenizer, "all_special_tokens", None) or ())
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    special |= {token.content for token in added.values() if token.special}
    return AnswerFormat(REASONING_FORMATS[reasoning_format], FORMATS[tool_format], frozenset(special))
