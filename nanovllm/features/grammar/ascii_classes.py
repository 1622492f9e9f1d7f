r"""Gives `\d`, `\w` and `\s` one meaning in all regular expressions of structured outputs: `re.ASCII` of Python.

llguidance reads `\d` and `\w` as ASCII in a schema's `pattern`, and as Unicode everywhere else.
"""

from __future__ import annotations

import json
import re
from typing import Any

# llguidance's Lark: strings, comments and JSON are skipped, since they may contain text like an expression.
_LARK = re.compile(r'(?P<skip>"(?:\\.|[^"\\])*"|(?:#|//)[^\n]*)|/(?P<regex>(?:\\.|[^/\\])+)/|%json\s*(?=\{)', re.DOTALL)
_DATA = ("const", "enum", "default", "examples")  # keywords with plain values, not schemas
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # mappings of name to schema


def ascii_regex(regex: str) -> str:
    """The expression with these classes written out; for Lark, without the slashes."""
    from llguidance import regex_to_lark

    return str(regex_to_lark(regex, "dws"))


def ascii_schema(schema: Any) -> Any:
    """A copy of a JSON schema with the expressions of its keywords written out."""
    if isinstance(schema, list):
        return [ascii_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _ascii_keyword(key, value) for key, value in schema.items()}


def ascii_lark(grammar: str) -> str:
    """A Lark grammar with the classes written out in its expressions and embedded schemas."""
    parts = []
    position = 0
    while found := _LARK.search(grammar, position):
        parts.append(grammar[position : found.start()])
        position = found.end()
        if (regex := found["regex"]) is not None:
            parts.append(f"/{ascii_regex(regex)}/")
            continue
        parts.append(found[0])
        if found["skip"] is None:
            try:
                schema, position = json.JSONDecoder().raw_decode(grammar, position)
            except ValueError:  # the compiler reports the error
                break
            parts.append(json.dumps(ascii_schema(schema), ensure_ascii=False))
    return "".join([*parts, grammar[position:]])


def _ascii_keyword(key: str, value: Any) -> Any:
    if key in ("pattern", "whitespace_pattern") and isinstance(value, str):
        return ascii_regex(value)
    if key in _NAMED and isinstance(value, dict):
        is_pattern = key == "patternProperties"
        return {ascii_regex(name) if is_pattern else name: ascii_schema(inner) for name, inner in value.items()}
    return value if key in _DATA else ascii_schema(value)
