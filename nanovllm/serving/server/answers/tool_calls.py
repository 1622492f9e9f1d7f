"""Tool call parser: finds tool calls in an answer's text, in the formats of `call_formats`.

Models write calls with deviations: tags that are missing or repeated, other keys, code fences, lists. A call is read
if its tool and its arguments are certain; any other text stays content.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from nanovllm.serving.server.answers.call_formats import FORMATS, HARMONY_TOOLS, ToolFormat, detect_format
from nanovllm.serving.server.answers.delta import CallParts, Part
from nanovllm.serving.server.answers.json_calls import JsonCall, Tools, tool_name
from nanovllm.serving.server.answers.reasoning import partial_marker
from nanovllm.serving.server.answers.tagged_calls import TaggedCall

__all__ = ["FORMATS", "HARMONY_TOOLS", "ToolFormat", "ToolStream", "Tools", "detect_format"]

_FENCE = "```"
_FENCE_LINE = re.compile(r"```\w*")
_BETWEEN = re.compile(r"[\s,;]*")
_HEADER_TEXT = re.compile(r"[\w.:/\s-]*")
_MAX_HEADER = 300  # characters


@dataclass(frozen=True, slots=True)
class EmptyCall:
    """Call without arguments, which has ended; its attributes are those of `JsonCall`."""

    name: str
    end: int
    arguments: str = "{}"
    failed: int | None = None

    def read(self, text: str, *, is_last: bool) -> None:
        """Nothing is left to read."""


AnyCall = JsonCall | TaggedCall | EmptyCall


class CallRun:
    """Reads consecutive calls, from the marker of the first one on.

    calls: the ended ones.
    current: the call that is open.
    mark: index after the last call and its closers.
    failed: index after text that is no call; None if there is none.
    is_done: True if no call follows.
    """

    def __init__(self, form: ToolFormat, tools: Tools) -> None:
        self._form = form
        self._tools = tools
        self._starts = () if form.tags is None else form.tags.starts
        self._closers = form.closers + (() if form.tags is None else form.tags.ends)
        self._ends = self._closers + form.openers + (_FENCE,)
        self.calls: list[AnyCall] = []
        self.current: AnyCall | None = None
        self.mark = 0
        self.failed: int | None = None
        self.is_done = False
        self._at = 0
        self._opened: int | None = None  # index after the first opener since the last call
        self._is_fenced = False

    def read(self, text: str, *, is_last: bool) -> None:
        """Read on, as far as the text decides; with `is_last` the run is done."""
        while not self.is_done:
            if self.current is None and not self._find_call(text, is_last=is_last):
                return
            if self.current is not None and not self._read_call(self.current, text, is_last=is_last):
                return

    # ------------------------------------------------------------------------------------------------------- parts

    def _read_call(self, call: AnyCall, text: str, *, is_last: bool) -> bool:
        call.read(text, is_last=is_last)
        if call.failed is not None:
            self._fail(call.failed)
        elif call.end is not None:
            self.calls.append(call)
            self.current = self._opened = None
            self._at = self.mark = call.end
        return call.failed is not None or call.end is not None

    def _fail(self, at: int) -> bool:
        self.failed = max(at, 1)
        self.is_done = True
        return True

    def _end(self) -> bool:
        """End the run where no call begins: after its calls, or in text from an opener on."""
        if self._opened is not None or not self.calls:
            return self._fail(self._opened or 1)
        self.is_done = True
        return True

    def _find_call(self, text: str, *, is_last: bool) -> bool:
        """Skip the text between calls, and begin the next one; returns False if more text decides."""
        while self._skip(text):
            pass
        if self._is_cut(text):
            if not is_last:
                return False
            if self.calls and self._opened is None:
                self.mark = len(text)
            return self._end()
        tags = self._form.tags
        if text.startswith("{", self._at):
            self.current = JsonCall(self._at, self._tools, self._ends)
        elif tags is not None and (text.startswith(tags.starts, self._at) or (self._opened and not tags.starts)):
            self.current = TaggedCall(self._at, self._tools, tags, self._form.closers, self._form.openers)
        elif self._opened is None:
            return self._end()
        else:
            return self._read_header(text, is_last=is_last)
        return True

    def _skip(self, text: str) -> bool:
        """Skip an opener, a closer or punctuation between calls; returns whether more may follow."""
        found = _BETWEEN.match(text, self._at)
        self._at = at = self._at if found is None else found.end()
        for opener in self._form.openers:
            if text.startswith(opener, at):
                self._at = at + len(opener)
                self._opened = self._opened or self._at
                return True
        if self._is_cut(text):
            return False
        if text.startswith("[", at):
            self._at = at + 1
            return True
        fence = _FENCE_LINE.match(text, at)
        if fence is not None and not self._is_fenced and not self.calls:
            self._is_fenced = True
            self._at = fence.end()
            return True
        closers = (*self._closers, "}", "]", *((_FENCE,) if self._is_fenced else ()))
        if not self.calls:  # a closer that is left of an earlier call
            closers = self._form.closers if self._opened is None else ()
        closer = next((token for token in closers if text.startswith(token, at)), "")
        if not closer or self._opened is not None:
            return False
        self._is_fenced = self._is_fenced and closer != _FENCE
        self._at = at + len(closer)
        if self.calls:
            self.mark = self._at
        return True

    def _is_cut(self, text: str) -> bool:
        """Whether the next token is not there yet, or not all of it."""
        rest = text[self._at : self._at + _MAX_HEADER]
        if _FENCE_LINE.fullmatch(rest):
            return not (self._is_fenced and self.calls)
        tokens = self._form.openers + self._closers + self._starts + (_FENCE,)
        return any(token.startswith(rest) and token != rest for token in tokens)

    # ---------------------------------------------------------------------------------------- arguments after a name

    def _read_header(self, text: str, *, is_last: bool) -> bool:
        """Read a name in front of its arguments; returns False if more text decides."""
        begin = self._at
        form = self._form
        rest = text[begin : begin + _MAX_HEADER]
        bounds = [at for token in ("{", '"', *self._closers, *form.openers) if (at := rest.find(token)) >= 0]
        header = rest[: min(bounds, default=len(rest))]
        is_whole = bool(bounds) or is_last
        words = header
        if not is_whole:
            tokens = (*form.header, *self._closers, *form.openers)
            words = header[: len(header) - max((partial_marker(header, token) for token in tokens), default=0)]
        for token in (*form.header, _FENCE):
            words = words.replace(token, "\n")
        if len(header) == _MAX_HEADER or not _HEADER_TEXT.fullmatch(words.rstrip("`")):
            return self._end()
        if not is_whole:
            return False
        named = words.split()
        if named[:1] == ["function"] and len(named) > 1:  # the tool's type, which DeepSeek V3 writes
            named = named[1:]
        name = tool_name(named[0], self._tools) if named else None
        if name is None:
            return self._end()
        at = begin + len(header)
        if text.startswith(("{", '"'), at):
            self._is_fenced = _FENCE in header
            self.current = JsonCall(at, self._tools, self._ends, name)
            return True
        schema = self._tools[name]
        needs_arguments = isinstance(schema, dict) and bool(schema.get("required"))
        is_separated = any(token in header for token in form.header)
        if not (bounds and is_separated) and (needs_arguments or not (bounds or is_separated)):
            return self._end()
        self.current = EmptyCall(name, at)
        return True


class ToolStream:
    """Separates content and tool calls of one answer while it streams, independent of how the text is split.

    Text that may become a marker or a call is held back, and so is white space, which counts as content only between
    other content.

    Args:
        tools: schemas of the parameters of the request's tools, by name.
        streams: True if calls are returned in parts, while the model writes them; see `CallParts`.
    """

    def __init__(self, form: ToolFormat, tools: Tools, *, streams: bool = False) -> None:
        self._form = form
        self._tools = tools
        self._parts = CallParts(streams=streams)
        self._text = ""  # not yet returned
        self._space = ""  # content only if more content follows
        self._has_content = self._has_tags = False  # content was returned; a failed call left its tags as text
        self._run: CallRun | None = None  # run that a marker began
        self._num_read = 0  # calls of the run that are returned

    @property
    def num_calls(self) -> int:
        return self._parts.num_calls

    def add(self, text: str, *, is_last: bool) -> list[Part]:
        """Add text; returns new content and new calls, in their order."""
        parts = self._read(text, is_last=False)  # the last text is read as any other, so that cuts change no call
        return [*parts, *self._read("", is_last=True)] if is_last else parts

    def _read(self, text: str, *, is_last: bool) -> list[Part]:
        self._text += text
        parts: list[Part] = []
        while self._text:
            if self._run is None:
                start, is_marker = self._next_marker()
                parts.append(self._take_content(len(self._text) if is_last and not is_marker else start))
                if not is_marker:
                    break
                self._run = CallRun(self._form, self._tools)
                self._num_read = 0
            run = self._run
            run.read(self._text, is_last=is_last)
            parts += self._new_calls(run)
            if not run.is_done:
                break
            begin = run.mark
            if run.failed is not None:
                self._has_tags = True
                begin = run.failed if self._parts.is_begun else run.mark
                self._parts.drop()
            self._text = self._text[begin:]
            self._run = None
            parts.append(self._take_content((run.failed or begin) - begin))
        if is_last and not self.num_calls:
            parts.append(self._space)
            self._space = ""
        return [part for part in parts if part]

    def _new_calls(self, run: CallRun) -> list[Part]:
        parts: list[Part] = []
        for call in run.calls[self._num_read :]:
            parts += self._parts.add(call, is_ended=True)
        self._num_read = len(run.calls)
        if run.current is not None:
            parts += self._parts.add(run.current, is_ended=False)
        return parts

    def _take_content(self, end: int) -> str:
        taken = self._space + self._text[:end]
        self._text = self._text[end:]
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
        text = self._text
        markers = self._form.markers
        if not self._has_tags:  # a closer that is left over may stand before a call
            markers += self._form.closers
        begin = text.lstrip()
        bare = () if self._has_content or self.num_calls else self._form.bare
        if begin.startswith(bare):
            return len(text) - len(begin), True
        if any(marker.startswith(begin) for marker in bare):
            return len(text) - len(begin), False
        found = [at for marker in markers if (at := text.find(marker)) >= 0]
        if found:
            return min(found), True
        return len(text) - max(partial_marker(text, marker) for marker in markers), False
