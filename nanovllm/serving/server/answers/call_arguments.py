"""Schemas of tools' arguments as grammars take them, and the rules of arguments that are written one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nanovllm.serving.server.answers.rules import Rules
from nanovllm.serving.server.answers.tagged_calls import is_text
from nanovllm.serving.server.answers.text_values import text_value

Tool = dict[str, Any]  # definition of a tool in OpenAI's format


def parameters_of(tool: Tool) -> dict[str, Any]:
    """Schema of a tool's arguments; keywords unknown to the compiler are errors for strict tools only."""
    function = tool["function"]
    given = function.get("parameters") or {}
    schema = dict(given if _is_composed(given) else _closed(given))
    schema.setdefault("type", "object")
    # One line, as templates write calls: small models fall into endless white space.
    schema["x-guidance"] = {"whitespace_pattern": " ?", "lenient": not function.get("strict")}
    return schema


_COMPOSING = frozenset({"allOf", "if", "dependentSchemas"})
_OPEN = frozenset({
    "additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties", "anyOf", "oneOf", "$ref",
})  # fmt: skip


def _closed(schema: Any) -> Any:
    """Close the objects that name their properties, so that the model cannot invent arguments.

    No caller wants them, small models do not stop adding them, and formats that name arguments in tags lack them.
    """
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    properties = schema.get("properties")
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(own := schema.get(key), dict):
            found[key] = {name: _closed(inner) for name, inner in own.items()}
    for key in ("items", "additionalProperties"):
        if key in schema:
            found[key] = _closed(schema[key])
    for key in ("prefixItems",) if properties else ("prefixItems", "anyOf", "oneOf"):
        if isinstance(own := schema.get(key), list):
            found[key] = [_closed(inner) for inner in own]
    if isinstance(properties, dict) and not _OPEN & schema.keys():
        required = schema.get("required", [])
        if isinstance(required, list) and all(name in list(properties) for name in required):
            found["additionalProperties"] = False
    return found


def _is_composed(value: Any) -> bool:
    """Whether several subschemas describe one object: closing each would refuse the properties of its siblings."""
    if isinstance(value, dict):
        if _COMPOSING & value.keys() or {"$ref", "properties"} <= value.keys():
            return True
        return any(map(_is_composed, value.values()))
    return isinstance(value, list) and any(map(_is_composed, value))


@dataclass(frozen=True, slots=True)
class Value:
    """Rule for an argument's value, with the closing tag."""

    key: str
    rule: str
    is_text: bool
    is_required: bool


def values_of(rules: Rules, tool: Tool, closing: str, *, is_for_text: bool = False) -> list[Value]:
    """Values of a tool's arguments, in the order of the schema; raises ValueError for one without properties to name.

    Args:
        is_for_text: True if `closing` follows strings only.
    """
    function = tool["function"]
    schema = parameters_of(tool)
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    problem = f"tools: the parameters of {function['name']!r} have "
    if not isinstance(properties, dict):
        raise ValueError(f"{problem}{properties!r} as properties; they must be an object.")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise ValueError(f"{problem}{required!r} as required; it must be a list of names.")
    if function.get("strict") and (unknown := sorted({"anyOf", "oneOf", "allOf", "$ref", "not"} & schema.keys())):
        raise ValueError(
            f"{problem}{unknown[0]!r} at their root, and this model writes "
            "arguments by name. List them in properties, or leave strict out."
        )
    shared: dict[str, Any] = {name: schema[name] for name in ("$defs", "definitions", "x-guidance") if name in schema}
    found = []
    for key, own in properties.items():
        if is_text(own):  # text values are generated raw, all others as JSON
            owner = f"the string {key!r} of {function['name']!r}"
            guided = own | {"x-guidance": schema["x-guidance"]}
            rule = text_value(rules, guided, closing, owner, is_strict=bool(function.get("strict")))
        else:
            rule = rules.json((own if isinstance(own, dict) else {}) | shared)
            rule += "" if is_for_text else f" {rules.marker(closing)}"
        found.append(Value(key, rule, is_text(own), key in required))
    return found
