"""Tool call parser: finds tool calls in an answer's text, in the formats of model families.

    hermes    <tool_call>{"name": ..., "arguments": {...}}</tool_call>, once for each call    Hermes, Qwen2.5, Qwen3
    llama     {"name": ..., "parameters": {...}} as the whole answer; ";" between several     Llama 3.1 and later
    mistral   [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name{...}  Mistral
    qwen_xml  <tool_call><function=...><parameter=...>...</parameter></function></tool_call>  Qwen3-Coder, Qwen3.5
    seed      the same within <seed:tool_call>...</seed:tool_call>                            Seed-OSS
    glm       <tool_call>name<arg_key>...</arg_key><arg_value>...</arg_value></tool_call>     GLM-4.5 and later
    harmony   messages to functions.name; `harmony` reads them                                gpt-oss

Text that does not parse as a call of an offered tool stays content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from nanovllm.server.answers.delta import Part, new_call
from nanovllm.server.answers.reasoning import partial_marker
from nanovllm.server.answers.tagged_calls import NO_CALL, Call, GlmReader, QwenReader, SeedReader, Tools

_decode = json.JSONDecoder().raw_decode


class CallReader(Protocol):
    """Parser of the calls after one marker."""

    def read(self, text: str, *, is_last: bool) -> tuple[list[Call], int] | None:
        """Parse calls; returns them and their number of characters, or no calls and the content's number of characters.

        Returns None if more text could change the result, never with `is_last`.

        Args:
            text: all text from the marker on; grows from call to call.
        """


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Format of one model family.

    markers: strings that start a call.
    reader: factory of the parser, from the request's tools.
    at_start: a marker counts only at the start of the answer, after white space.
    inner: strings within a call that some tokenizers have as special tokens, like the markers.
    """

    name: str
    markers: tuple[str, ...]
    reader: Callable[[Tools], CallReader]
    at_start: bool = False
    inner: tuple[str, ...] = ()


class ObjectScan:
    """Finds the end of a JSON object in growing text; scans each character once."""

    def __init__(self, start: int) -> None:
        self._at, self._depth = start, 0
        self._in_string = self._is_escaped = False

    def end(self, text: str) -> int | None:
        """Return the index after the closing brace, or None if it is not in the text yet."""
        for at in range(self._at, len(text)):
            character = text[at]
            if self._in_string:
                self._in_string = self._is_escaped or character != '"'
                self._is_escaped = not self._is_escaped and character == "\\"
            elif character == '"':
                self._in_string = True
            elif character == "{":
                self._depth += 1
            elif character == "}":
                self._depth -= 1
                if not self._depth:
                    return at + 1
        self._at = len(text)
        return None


class HermesReader:
    """Parses one call, up to the end of its JSON object; the closing tag is optional."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self, _: Tools) -> None:
        self._scan: ObjectScan | None = None
        self._end: int | None = None

    def read(self, text: str, *, is_last: bool) -> tuple[list[Call], int] | None:
        inner = text[len(self.OPEN) :].lstrip() if self._scan is None else ""
        if self._scan is None and inner:
            if inner[0] != "{":
                return [], len(self.OPEN)
            self._scan = ObjectScan(len(text) - len(inner))
        if self._scan is not None and self._end is None:
            self._end = self._scan.end(text)
        if self._end is None:
            return ([], len(text)) if is_last else None
        rest = text[self._end :].lstrip()
        is_closed, end = rest.startswith(self.CLOSE), self._end
        if is_closed:
            end = len(text) - len(rest) + len(self.CLOSE)
        elif self.CLOSE.startswith(rest):  # the tag is to come, or was cut off
            if not is_last:
                return None
            end = len(text)
        try:
            call = json.loads(text[len(self.OPEN) : self._end])
            return [(call["name"], call.get("arguments", {}))], end
        except NO_CALL:
            return [], end


class RestReader:
    """Parses the rest of an answer as calls, all or nothing.

    Args:
        parse: parser; raises one of NO_CALL for text that is not a call.
    """

    def __init__(self, parse: Callable[[str], Iterator[Call]], _: Tools) -> None:
        self._parse = parse

    def read(self, text: str, *, is_last: bool) -> tuple[list[Call], int] | None:
        if not is_last:
            return None
        try:
            return list(self._parse(text)), len(text)
        except NO_CALL:
            return [], len(text)


def _llama(text: str) -> Iterator[Call]:
    text = text.strip().removeprefix("<|python_tag|>").strip()
    while text:
        call, end = _decode(text)
        yield call["name"], call["parameters"] if "parameters" in call else call["arguments"]
        text = text[end:].lstrip("; \n")


def _mistral(text: str) -> Iterator[Call]:
    parts = [part.strip() for part in text.split("[TOOL_CALLS]") if part.strip()]
    for part in parts:
        if part.startswith("["):
            for call in json.loads(part):
                yield call["name"], call["arguments"]
        else:
            name, _, _ = part.partition("{")
            yield re.split(r"\[(?:ARGS|CALL_ID)\]", name)[0].strip(), json.loads(part[len(name) :])


_TAGS = ("</tool_call>",)
HARMONY_TOOLS = ToolFormat("harmony", (), partial(RestReader, _llama))  # read by `harmony` instead
FORMATS: dict[str, ToolFormat | None] = {
    "hermes": ToolFormat("hermes", (HermesReader.OPEN,), HermesReader, inner=_TAGS),
    "llama": ToolFormat("llama", ("<|python_tag|>", "{"), partial(RestReader, _llama), at_start=True),
    "mistral": ToolFormat("mistral", ("[TOOL_CALLS]",), partial(RestReader, _mistral), inner=("[ARGS]", "[CALL_ID]")),
    "qwen_xml": ToolFormat("qwen_xml", QwenReader.MARKERS, QwenReader, inner=_TAGS),
    "seed": ToolFormat("seed", SeedReader.MARKERS, SeedReader, inner=(SeedReader.CLOSE,)),
    "glm": ToolFormat(
        "glm", (GlmReader.OPEN,), GlmReader, inner=(*_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    ),
    "harmony": HARMONY_TOOLS,
    "none": None,
}
# Texts that all occur in a format's templates; the first match counts. Some models share a tag with a format but write
# calls differently: MiniMax's <invoke>, Apriel's <tool_calls>, Functionary's JSON in <function=name>, Llama's Python.
_SIGNS = (
    (("<|channel|>",), "harmony"),
    (("<seed:tool_call>", "<parameter="), "seed"),
    (("<function=", "<parameter="), "qwen_xml"),
    (("<function=",), "none"),
    (("<arg_key>", "<tool_call>"), "glm"),
    (("<invoke name=",), "none"),
    (("<tool_calls>",), "none"),
    (("<tool_call>", "arguments"), "hermes"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|python_tag|>", "parameters"), "llama"),
    (("Environment: ipython", "parameters"), "llama"),
)


def detect_format(template: str) -> str:
    """Name the tool call format of a chat template; "none" if it has no tools or an unsupported format."""
    return next((name for signs, name in _SIGNS if all(sign in template for sign in signs)), "none")


class ToolStream:
    """Separates content and tool calls of one answer while it streams, independent of how the text is split.

    Text that may become a marker or a call is held back, and so is white space, which counts as content only between
    other content.

    Args:
        tools: schemas of the parameters of the request's tools, by name.
    """

    def __init__(self, form: ToolFormat, tools: Tools) -> None:
        self._form, self._tools = form, tools
        self._text = ""  # not yet returned
        self._space = ""  # content only if more content follows
        self._has_content = False
        self._reader: CallReader | None = None  # at a marker
        self.num_calls = 0

    def add(self, text: str, *, is_last: bool) -> list[Part]:
        """Add text; returns new content and new calls, in their order."""
        self._text += text
        parts: list[Part] = []
        while self._text:
            if self._reader is None:
                start, is_marker = self._next_marker()
                parts.append(self._take_content(len(self._text) if is_last and not is_marker else start))
                if not is_marker:
                    break
                self._reader = self._form.reader(self._tools)
            found = self._reader.read(self._text, is_last=is_last)
            if found is None:
                break
            self._reader = None
            calls = self._as_calls(found[0])
            if calls:
                self._text = self._text[found[1] :]
                parts += calls
                self.num_calls += len(calls)
            else:
                parts.append(self._take_content(found[1]))
        if is_last and not self.num_calls:
            parts.append(self._space)
            self._space = ""
        return [part for part in parts if part]

    def _take_content(self, end: int) -> str:
        taken, self._text = self._space + self._text[:end], self._text[end:]
        shown = taken.rstrip()
        self._space = taken[len(shown) :]
        if not shown:
            return ""
        if self.num_calls and not self._has_content:
            shown = shown.lstrip()
        self._has_content = True
        return shown

    def _next_marker(self) -> tuple[int, bool]:
        """Return the start of a marker, complete or partial, and whether it is complete; the text's end without one."""
        text, markers = self._text, self._form.markers
        if self._form.at_start:
            begin = text.lstrip()
            if self._has_content or not any(begin.startswith(m) or m.startswith(begin) for m in markers):
                return len(text), False
            return len(text) - len(begin), begin.startswith(markers)
        found = [at for marker in markers if (at := text.find(marker)) >= 0]
        if found:
            return min(found), True
        return len(text) - max(partial_marker(text, marker) for marker in markers), False

    def _as_calls(self, calls: list[Call]) -> list[dict[str, Any]]:
        """Convert calls to OpenAI's form; returns none if one is not of an offered tool."""
        try:
            texts = [(name, _as_json(arguments)) for name, arguments in calls if name in self._tools]
        except NO_CALL:
            return []
        if len(texts) < len(calls):
            return []
        return [new_call(name, arguments) for name, arguments in texts]


def _as_json(arguments: Any) -> str:
    """Encode arguments; raises TypeError or ValueError unless they are an object or its JSON."""
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise TypeError(f"arguments must be an object, not {type(arguments).__name__}")
    return json.dumps(arguments, ensure_ascii=False, allow_nan=False)
