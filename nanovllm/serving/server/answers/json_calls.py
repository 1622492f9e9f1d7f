"""Reader of one tool call with its arguments as a JSON object, and of the names in calls.

A call is an object with name and arguments, or arguments after a name. Models write the keys in several ways; a call
with uncertain arguments is none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from nanovllm.serving.server.answers.lenient_json import JsonScan

Tools = Mapping[str, Any]  # JSON Schema of the parameters by the tool's name; None or {} for any

_NO_CALL = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # errors of text that is not a call
_NAMES = ("name", "tool_name", "function")
_ARGUMENTS = ("arguments", "parameters", "args", "input")
_ABOUT = frozenset({"id", "type", "index", "tool_call_id", "call_id"})  # keys that say nothing about the arguments
_OPENING = re.compile(
    rf'\{{(?:"(?:{"|".join(_ABOUT)})": (?:"[^"\\]*"|\d+|null), )*(?P<outer>"function": \{{)?'
    rf'"(?:name|tool_name)": "(?P<name>[^"\\]+)", "(?:{"|".join(_ARGUMENTS)})": (?=\{{)'
)
_FIRST = re.compile(r'\{(?P<outer>"function": \{)?"(?P<key>[^"\\]*)": (?:(?P<value>"[^"\\]*")|.)')
_LONGEST_START = 1000  # characters within which the name is looked for
_PREFIX = re.compile(r"(?:functions\.|call:)")
_NUMBER = re.compile(r":\d+$")


def tool_name(name: str, tools: Tools) -> str | None:
    """The tool that a call names, in a namespace or with a number as some formats have; None for no tool."""
    name = name.strip()
    plain = _NUMBER.sub("", _PREFIX.sub("", name, count=1))
    return next((own for own in (name, plain, re.split("[.:]", plain)[-1]) if own in tools), None)


def properties_of(schema: Any) -> dict[str, Any]:
    """The properties that a schema of parameters names."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties if isinstance(properties, dict) else {}


class JsonCall:
    """Reads the call that begins at an index of a growing text.

    name: the tool, once the text is certain to call it; None before.
    arguments: strict JSON of the arguments so far; its last brace comes with the end of the call.
    end: index after the call; None before it has ended.
    failed: index of the text that makes it no call; None if there is none.

    Args:
        name: the tool, if the object holds its arguments alone.
        ends: strings that end a call, even if brackets are missing.
    """

    def __init__(self, start: int, tools: Tools, ends: tuple[str, ...], name: str | None = None) -> None:
        self._tools, self._ends, self._scan = tools, ends, JsonScan(start)
        self.name = name
        self.end: int | None = None
        self.failed: int | None = None
        self._base = None if name is None else 0  # depth that holds the arguments
        self._begin = 0  # index of the arguments in the scan's text
        self._whole: str | None = None

    @property
    def arguments(self) -> str:
        if self._whole is not None:
            return self._whole
        if self._base is None or self._scan.text.startswith('"'):
            return ""
        end = self._scan.closed.get(self._base)
        return self._scan.text[self._begin : None if end is None else end - 1]

    def read(self, text: str, *, is_last: bool) -> None:
        """Read on, as far as the text decides."""
        scan = self._scan
        scan.read(text)
        if self._base is None:
            self._look_for_arguments()
            if self._is_other_object():
                self.failed = scan.at
                return
        if scan.is_whole or (scan.is_broken and self._is_closed(text)):
            self._finish()
        elif scan.is_broken and not is_last and any(end.startswith(text[scan.at :]) for end in self._ends):
            return
        elif is_last and scan.is_between and self._has_arguments:
            self._finish()
        elif is_last or scan.is_broken:
            self.failed = scan.at if scan.is_broken else len(text)

    # ------------------------------------------------------------------------------------------------------- parts

    @property
    def _has_arguments(self) -> bool:
        """Whether the object of the arguments has ended."""
        return self._base is not None and self._base in self._scan.closed

    def _is_closed(self, text: str) -> bool:
        """Whether a call that lacks brackets has ended."""
        if not self._scan.is_between:
            return False
        if text.startswith(self._ends, self._scan.at):
            return "]" not in self._scan.completed[len(self._scan.text) :]
        return self._has_arguments and text.startswith(("]", ";"), self._scan.at)

    def _look_for_arguments(self) -> None:
        found = _OPENING.match(self._scan.text)
        if found is None:
            return
        name = tool_name(found["name"], self._tools)
        if name is not None:
            self.name = name
            self._begin = found.end()
            self._base = 1 if found["outer"] is None else 2

    def _is_other_object(self) -> bool:
        """Whether the first key, or the name if that is first, shows that the object is no call."""
        found = (
            None if self._base is not None or len(self._scan.text) > _LONGEST_START else _FIRST.match(self._scan.text)
        )
        if found is None:
            return False
        if found["key"] in _NAMES and found["value"] is not None:
            return tool_name(found["value"][1:-1], self._tools) is None
        return found["key"] not in _ABOUT.union(_NAMES, _ARGUMENTS)

    def _finish(self) -> None:
        scan = self._scan
        written = scan.completed
        try:
            if self._base == 0:
                self._whole = written if written.startswith("{") else json.dumps(_object(json.loads(written)))
            else:
                name, arguments = self._call_of(json.loads(written))
                whole = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
                if self._base is not None:  # arguments as they were streamed
                    whole = written[self._begin : scan.closed.get(self._base, len(written) - self._base)]
                    if name != self.name or json.loads(whole) != arguments:
                        raise ValueError("a key that is there twice")
                self.name = name
                self._whole = whole
            self.end = scan.at
        except _NO_CALL:
            self._whole = None
            self.failed = scan.at

    def _call_of(self, given: Any) -> tuple[str, dict[str, Any]]:
        """Name and arguments of a call; raises one of _NO_CALL if they are not certain."""
        if isinstance(given.get("function"), dict):
            if given.keys() - _ABOUT - {"function"}:
                raise ValueError("keys next to the function")
            given = given["function"]
        key = next(key for key in (*_NAMES, "") if isinstance(given.get(key), str) or not key)
        name = tool_name(given[key], self._tools)
        if name is None:
            raise ValueError("an unknown tool")
        named = [key for key in _ARGUMENTS if key in given]
        others = given.keys() - _ABOUT - {key} - set(named)
        properties = properties_of(self._tools[name])
        if not named:  # none, or written next to the name
            if others - properties.keys():
                raise ValueError("unknown keys")
            return name, {other: given[other] for other in given if other in others}
        if len(named) > 1 or others & properties.keys():
            raise ValueError("arguments in two places")
        return name, _object(given[named[0]])


def _object(given: Any) -> dict[str, Any]:
    """Arguments as an object; raises TypeError or ValueError unless they are one, or its text."""
    if isinstance(given, str):
        if not given.strip():
            return {}
        scan = JsonScan(0)
        scan.read(given)
        if not scan.is_whole or given[scan.at :].strip():
            raise ValueError("arguments that are a text of something else")
        given = json.loads(scan.text)
    if not isinstance(given, dict):
        raise TypeError("arguments that are no object")
    return given
