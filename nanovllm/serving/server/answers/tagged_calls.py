"""Reader of tool calls that write each argument between tags, as Qwen3-Coder's, GLM's, MiniMax's and DeepSeek's do.

::

    <tool_call>                              <tool_call>weather
    <function=weather>                       <arg_key>city</arg_key>
    <parameter=city>                         <arg_value>Paris</arg_value>
    Paris                                    </tool_call>
    </parameter>
    </function>
    </tool_call>

A value is a verbatim string or JSON, by the tool's schema. If the schema allows both, text that parses as JSON of an
allowed type is read as JSON. A value ends at its closing tag if a tag of the call follows. Models leave tags out: a
value also ends at the next argument's tag, and at the tags that end a call.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from nanovllm.serving.server.answers.json_calls import JsonCall, Tools, properties_of, tool_name

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "boolean": (bool,), "null": (type(None),), "array": (list,), "object": (dict,),
    "number": (int, float), "integer": (int,),
}  # fmt: skip
_PYTHON = {"True": True, "False": False, "None": None}
_SPACE = re.compile(r"\s*")
_MAX_TAG = 300  # characters that a tag with a name may have


@dataclass(frozen=True, slots=True)
class Tags:
    """Tags of one format.

    starts: prefixes of a call's opening tag; empty if the name itself follows the tag around calls.
    call: pattern of the opening tag, its group the name.
    call_so_far: pattern of texts that may become an opening tag.
    argument: pattern of the tag before a value, with the group `key`, and the group `kind` for "true" before a string.
    argument_starts: prefixes of the tag before a value.
    closings: tags after a value.
    ends: tags that end a call.
    has_lines: True if each argument's tag begins a line, so that one within a line is text.
    trims: True if the tags around a value stand on lines of their own.
    takes_json: True if an object may stand in place of the arguments' tags.
    """

    starts: tuple[str, ...]
    call: re.Pattern[str]
    call_so_far: re.Pattern[str]
    argument: re.Pattern[str]
    argument_starts: tuple[str, ...]
    closings: tuple[str, ...]
    ends: tuple[str, ...] = ()
    has_lines: bool = True
    trims: bool = False
    takes_json: bool = False


class TaggedCall:
    """Reads the call that begins at an index of a growing text; its attributes are those of `JsonCall`.

    Args:
        closers, openers: tags after calls and before them.
    """

    def __init__(
        self, start: int, tools: Tools, tags: Tags, closers: tuple[str, ...], openers: tuple[str, ...]
    ) -> None:
        self._start = start
        self._tools = tools
        self._tags = tags
        self._closers = closers
        self._next = openers + tags.starts
        self._all = tags.argument_starts + tags.ends + closers + self._next
        bounds = tags.closings + tags.argument_starts + tags.ends + closers
        self._bounds = re.compile("|".join(map(re.escape, bounds)))
        self._longest = max(map(len, bounds))
        self.name: str | None = None
        self.end: int | None = None
        self.failed: int | None = None
        self._tool: str | None = None
        self._at = start
        self._keys: set[str] = set()
        self._written = "{"
        self._key = ""
        self._kind: str | None = None
        self._value_at: int | None = None  # index of the value that is open
        self._searched = 0  # index before which the open value does not end
        self._json: JsonCall | None = None  # object in place of arguments

    @property
    def arguments(self) -> str:
        if self._json is not None:
            written = self._json.arguments
            return written if self.end is not None or self._json.end is None else written[:-1]
        return self._written

    def read(self, text: str, *, is_last: bool) -> None:
        """Read on, as far as the text decides."""
        while self.end is None and self.failed is None:
            if self._json is not None and self._json.end is None:
                goes_on = self._read_json(self._json, text, is_last=is_last)
            elif self._tool is None:
                goes_on = self._read_opening(text)
            elif self._value_at is None:
                goes_on = self._read_tag(text)
            else:
                goes_on = self._read_value(text, is_last=is_last)
            if not goes_on:
                if is_last:
                    self.failed = len(text)
                return

    # ------------------------------------------------------------------------------------------------------- parts

    def _read_opening(self, text: str) -> bool:
        found = self._tags.call.match(text, self._start)
        if found is None:
            if len(text) - self._start < _MAX_TAG and self._tags.call_so_far.fullmatch(text, self._start):
                return False
            self.failed = self._start + 1
            return True
        self._tool = tool_name(found[1], self._tools)
        self._at = found.end()
        if self._tool is None:
            self.failed = self._start + 1  # same index as for a tag that is cut within the name
        return True

    def _read_tag(self, text: str) -> bool:
        """Read the tag that follows the opening tag or a value."""
        at = _end_of_space(text, self._at)
        if self._json is None and (found := self._tags.argument.match(text, at)):
            self._key, self._kind = found["key"].strip(), found.groupdict().get("kind")
            self._value_at = self._searched = found.end()
        elif text.startswith(self._tags.ends, at):
            self._finish(at + len(next(end for end in self._tags.ends if text.startswith(end, at))))
        elif text.startswith(self._closers + self._next, at):
            self._finish(at)
        elif text.startswith("{", at) and self._tags.takes_json and not self._keys and self._json is None:
            self._json = JsonCall(at, self._tools, self._tags.ends + self._closers, self._tool)
            self.name = self._tool
        elif _may_become(text, at, self._all) or (
            text.startswith(self._tags.argument_starts, at) and len(text) - at < _MAX_TAG
        ):
            return False
        else:
            self.failed = max(at, self._start + 1)
        return True

    def _finish(self, end: int) -> None:
        self.name = self._tool
        self.end = end
        self._written += "}"

    def _read_json(self, inner: JsonCall, text: str, *, is_last: bool) -> bool:
        inner.read(text, is_last=is_last)
        if inner.end is not None:
            self._at = inner.end
        self.failed = inner.failed
        return inner.end is not None or inner.failed is not None

    def _read_value(self, text: str, *, is_last: bool) -> bool:
        begin = self._value_at
        assert begin is not None
        found = self._end_of_value(text, begin, is_last=is_last)
        if found is None:
            return False
        end, self._at = found
        value = text[begin:end]
        if self._tags.trims:
            value = value.removeprefix("\n")
        if self._tags.trims or self._at == end:  # the line break of a tag that is missing
            value = value.removesuffix("\n")
        schema = self._tools.get(self._tool or "")
        own = properties_of(schema).get(self._key)
        if self._kind == "true" and AllowedValues(schema).has(value, own):
            typed: Any = value
        else:
            typed = _value(value, own, schema)
        self._written += ", " if self._keys else ""
        self._written += f"{json.dumps(self._key, ensure_ascii=False)}: {json.dumps(typed, ensure_ascii=False)}"
        self._keys.add(self._key)
        self.name = self._tool
        self._value_at = None
        return True

    def _end_of_value(self, text: str, begin: int, *, is_last: bool) -> tuple[int, int] | None:
        """Index of a value's end, and of the text after its tag; None if more text decides."""
        for found in self._bounds.finditer(text, self._searched):
            at = found.start()
            if found[0] in self._tags.closings:
                ends, behind = self._is_end(text, begin, found)
            elif found[0] in self._tags.argument_starts:
                ends = self._is_argument(text, at, begin)
                behind = at
            else:
                following = self._next if found[0] in self._closers else self._closers + self._next
                ends = self._follows(text, found.end(), following)
                behind = at
                if ends is None and is_last:
                    ends = True
            if ends:
                return at, behind
            self._searched = at if ends is None else found.end()
            if ends is None and not is_last:
                return None
        self._searched = max(self._searched, len(text) - self._longest + 1)
        return None

    def _is_end(self, text: str, begin: int, closing: re.Match[str]) -> tuple[bool | None, int]:
        """Whether a closing tag ends the value, and the index after it and its repetitions."""
        behind = closing.end()
        tags = self._all
        if not any(start in text[begin : closing.start()] for start in self._tags.argument_starts):
            while found := _repeated(text, behind, self._tags.closings):
                behind = found
            tags += self._tags.closings
        return self._follows(text, behind, tags), behind

    def _is_argument(self, text: str, at: int, begin: int) -> bool | None:
        """Whether the tag at an index begins the next argument, after a value without a closing tag."""
        found = self._tags.argument.match(text, at)
        if found is None:
            return None if len(text) - at < _MAX_TAG else False
        key = found["key"].strip()
        schema = self._tools.get(self._tool or "")
        if key not in properties_of(schema) or key in self._keys or key == self._key:
            return False
        if self._tags.has_lines and at > begin and text[at - 1] != "\n":
            return False
        for bound in self._bounds.finditer(text, found.end()):
            if bound[0] in self._tags.closings:  # end of this argument, or of an example within the value
                return self._follows(text, bound.end(), self._all)
            if bound[0] not in self._tags.argument_starts:
                return True
        return None

    @staticmethod
    def _follows(text: str, at: int, tags: tuple[str, ...]) -> bool | None:
        """Whether one of the tags follows after white space; None if more text decides."""
        at = _end_of_space(text, at)
        if text.startswith(tags, at):
            return True
        return None if _may_become(text, at, tags) else False


def _repeated(text: str, at: int, tags: tuple[str, ...]) -> int | None:
    """Index after one of the tags and the space before it; None if none follows."""
    at = _end_of_space(text, at)
    return next((at + len(tag) for tag in tags if text.startswith(tag, at)), None)


def _end_of_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def _may_become(text: str, at: int, tags: tuple[str, ...]) -> bool:
    """Whether the rest of a text may become one of the tags."""
    rest = text[at : at + _MAX_TAG]
    return any(tag.startswith(rest) for tag in tags)


def is_text(schema: Any) -> bool:
    """Whether the schema allows strings only, which these formats write verbatim."""
    if not isinstance(schema, dict):
        return False
    if "type" not in schema and "enum" in schema:
        listed = schema["enum"]
        return isinstance(listed, list) and all(isinstance(value, str) for value in listed)
    return bool(schema.get("type") == "string")


def _value(text: str, schema: Any, root: Any) -> Any:
    if is_text(schema):
        return text
    stripped = text.strip()
    try:
        value = _PYTHON[stripped] if stripped in _PYTHON else json.loads(text, parse_constant=_no_constant)
        json.dumps(value, allow_nan=False)  # a number may be too large for JSON
        allowed = AllowedValues(root)
        return text if allowed.has(text, schema) and not allowed.has(value, schema) else value
    except (ValueError, RecursionError):
        return text  # raw text: these formats write strings without quotes


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


class AllowedValues:
    """Checks values against a schema's types, `enum` and `const`; other keywords and invalid schemas allow any value.

    Args:
        root: schema of all arguments, which resolves each `$ref`.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._followed: dict[tuple[str, int], bool] = {}  # memo by (reference, value id); breaks reference cycles

    def has(self, value: Any, schema: Any) -> bool:
        if not isinstance(schema, dict):
            return schema is not False
        types = schema.get("type")
        if isinstance(types, str):
            types = [types]
        if isinstance(types, list) and not any(_is_of(value, name) for name in types):
            return False
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and not any(type(own) is type(value) and own == value for own in values):
            return False
        for key, decide in (("allOf", all), ("anyOf", any), ("oneOf", any)):
            inner = schema.get(key)
            if isinstance(inner, list) and not decide([self.has(value, own) for own in inner]):
                return False
        return self._is_referred(value, schema.get("$ref"))

    def _is_referred(self, value: Any, reference: Any) -> bool:
        if not isinstance(reference, str) or not reference.startswith("#"):
            return True
        key = (reference, id(value))
        if key not in self._followed:
            self._followed[key] = True  # result within a reference cycle
            self._followed[key] = self.has(value, self._found(reference))
        return self._followed[key]

    def _found(self, reference: str) -> Any:
        """Resolve a JSON pointer; None if it leads nowhere."""
        found = self._root
        for part in filter(None, unquote(reference[1:]).split("/")):
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and len(name) < 7 and int(name) < len(found):
                found = found[int(name)]
            else:
                found = found.get(name) if isinstance(found, dict) else None
        return found


def _is_of(value: Any, name: Any) -> bool:
    """Whether a value has a type of JSON Schema."""
    types = _TYPES.get(name) if isinstance(name, str) else None
    if types is None:
        return True
    if isinstance(value, bool):
        return bool in types
    if name == "integer" and isinstance(value, float):
        return bool(value.is_integer())
    return isinstance(value, types)
