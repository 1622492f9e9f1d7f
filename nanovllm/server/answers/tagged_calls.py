"""Readers of tool calls that write each argument between tags: Qwen3-Coder's and GLM's.

::

    <tool_call>                              <tool_call>weather
    <function=weather>                       <arg_key>city</arg_key>
    <parameter=city>                         <arg_value>Paris</arg_value>
    Paris                                    </tool_call>
    </parameter>
    </function>
    </tool_call>

A value is a verbatim string or JSON, by the tool's schema. If the schema allows both, text that parses as JSON of an
allowed type is read as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

Call = tuple[str, Any]  # function name, arguments
Tools = Mapping[str, Any]  # JSON Schema of the parameters by the tool's name; None or {} for any
NO_CALL = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # raised for text that is not a call

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "boolean": (bool,), "null": (type(None),), "array": (list,), "object": (dict,),
    "number": (int, float), "integer": (int,),
}  # fmt: skip
_PYTHON = {"True": True, "False": False, "None": None}


class QwenReader:
    """Parses one call; the tags around <function=...> are optional."""

    OPEN = "<tool_call>"
    MARKERS: tuple[str, ...] = (OPEN, "<function=")
    TRIMS = True  # whether values stand on lines of their own
    _END = re.compile(r"</function>\s*</tool_call>")
    _NAME = re.compile(r"\s*<function=([^>\n]+)>")
    _ARGUMENT = re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>(?=\s*(?:<parameter=|</function>|$))", re.DOTALL)

    def __init__(self, tools: Tools) -> None:
        self._tools = tools

    def read(self, text: str, *, is_last: bool) -> tuple[list[Call], int] | None:
        is_tagged = text.startswith(self.OPEN)
        body = text[len(self.OPEN) :] if is_tagged else text
        if not is_last and is_tagged and _cannot_begin(body.lstrip(), "<function="):
            return [], len(self.OPEN)
        end = self._end_of(text, is_tagged=is_tagged, is_last=is_last)
        if end is None:
            return ([], len(text)) if is_last else None
        named = self._NAME.match(body)
        if named is None:
            return [], end
        name = named[1].strip()
        inner = body[named.end() : end - (len(text) - len(body))]
        found = self._ARGUMENT.findall(inner)
        if not found and inner.partition("</function>")[0].strip():  # arguments of another form
            return [], end
        return [(name, _typed(found, self._tools.get(name), trims=self.TRIMS))], end

    def _end_of(self, text: str, *, is_tagged: bool, is_last: bool) -> int | None:
        if is_tagged and (found := self._END.search(text)):
            return found.end()
        at = text.find("</function>")
        return at + len("</function>") if at >= 0 and (is_last or not is_tagged) else None


class SeedReader(QwenReader):
    """Seed-OSS: Qwen's format in <seed:...> tags."""

    OPEN, CLOSE = "<seed:tool_call>", "</seed:tool_call>"
    MARKERS = (OPEN,)
    TRIMS = False
    _END = re.compile(r"</function>\s*</seed:tool_call>")


class GlmReader:
    """Parses one call, up to its closing tag."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"
    _ARGUMENT = re.compile(
        r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*(?:<arg_key>|</tool_call>|$))", re.DOTALL
    )
    _END = re.compile(r"(?:<tool_call>[^<]*|</arg_value>\s*)</tool_call>")

    def __init__(self, tools: Tools) -> None:
        self._tools = tools

    def read(self, text: str, *, is_last: bool) -> tuple[list[Call], int] | None:
        found = self._END.search(text)
        if found is None:
            return ([], len(text)) if is_last else None
        body = text[len(self.OPEN) : found.end() - len(self.CLOSE)]
        name = body.partition("<arg_key>")[0].strip()
        return [(name, _typed(self._ARGUMENT.findall(body), self._tools.get(name), trims=False))], found.end()


def _cannot_begin(text: str, tag: str) -> bool:
    return bool(text) and not tag.startswith(text[: len(tag)])


def _typed(found: list[tuple[str, str]], schema: Any, *, trims: bool = True) -> dict[str, Any]:
    """Arguments with the types of a schema; one line break at each end of a value belongs to its tags.

    Args:
        trims: whether the tags stand on separate lines.
    """
    properties = schema.get("properties") if isinstance(schema, dict) else None
    arguments = {}
    for key, value in found:
        if trims:
            value = value.removeprefix("\n").removesuffix("\n")
        own = properties.get(key.strip()) if isinstance(properties, dict) else None
        arguments[key.strip()] = _value(value, own, schema)
    return arguments


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
        value = _PYTHON[stripped] if stripped in _PYTHON else json.loads(text)
        allowed = AllowedValues(root)
        return text if allowed.has(text, schema) and not allowed.has(value, schema) else value
    except (ValueError, RecursionError):
        return text  # unquoted, as these formats write strings


class AllowedValues:
    """Checks values against a schema's types, `enum` and `const`; other keywords and invalid schemas allow any value.

    Args:
        root: schema of all arguments, which resolves each `$ref`.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._followed: dict[tuple[str, int], bool] = {}  # by (reference, id of the value): breaks reference cycles

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
