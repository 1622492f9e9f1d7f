"""Grammars of tool calls, one per format of `tool_calls`: they allow exactly the calls that its parser accepts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nanovllm.server.answers import harmony
from nanovllm.server.answers.rules import Rules
from nanovllm.server.answers.tagged_calls import is_text
from nanovllm.server.answers.text_values import text_value

Tool = dict[str, Any]  # in OpenAI's form


@dataclass(frozen=True, slots=True)
class CallRules:
    """Grammar rules for the tool calls of one request.

    opening: the marker that opens a call.
    body: one call, without that marker.
    one: one call with its marker, as the whole answer.
    joined: one call or more, as the whole answer.
    plain: text without a call, if the format allows no text around calls; else None.
    """

    opening: str
    body: str
    one: str
    joined: str
    plain: str | None = None


_LINE_BREAK = '"\\n"?'


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


def _each(rules: Rules, tools: Sequence[Tool], body: Callable[[str, Tool], str]) -> str:
    """Rule for a call of any of the tools."""
    return rules.add(" | ".join(body(tool["function"]["name"], tool) for tool in tools))


def _json_call(rules: Rules, key: str, more: str = "") -> Callable[[str, Tool], str]:
    """Args: more: rule for the text after the arguments."""

    def call(name: str, tool: Tool) -> str:
        head = '{"name": ' + rules.literal(name) + f', "{key}": '
        return f'{rules.literal(head)} {rules.json(parameters_of(tool))} {more} "}}"'

    return call


def _tagged(rules: Rules, opening: str, body: str) -> CallRules:
    call = f"{rules.marker(opening)} {body}"
    return CallRules(opening, body, call, f"{call} ({_LINE_BREAK} {call})*")


def hermes(rules: Rules, tools: Sequence[Tool]) -> CallRules:
    call = _each(rules, tools, _json_call(rules, "arguments"))
    return _tagged(rules, "<tool_call>", f'"\\n" {call} "\\n" {rules.marker("</tool_call>")}')


def llama(rules: Rules, tools: Sequence[Tool]) -> CallRules:
    call = _each(rules, tools, _json_call(rules, "parameters"))
    plain = rules.add(r"/([^{ \n\r\t](.|\n)*)?/")
    return CallRules("{", call, call, f'{call} ("; " {call})*', plain)


def mistral(rules: Rules, tools: Sequence[Tool]) -> CallRules:
    marker, arguments = rules.marker("[TOOL_CALLS]"), rules.token_id("[ARGS]")
    if arguments is None:  # a list of calls after one marker
        own_id = rules.add(r'/, "id": "[A-Za-z0-9]{9}"/')  # as the templates write earlier calls
        call = _each(rules, tools, _json_call(rules, "arguments", f"{own_id}?"))
        body = f'" "? "[" {call} (", " {call})* "]"'  # older models write the space
        return CallRules("[TOOL_CALLS]", body, f'{marker} " "? "[" {call} "]"', f"{marker} {body}")
    number = rules.token_id("[CALL_ID]")  # which Mistral Small 3.2 writes
    named = "" if number is None else f"(<[{number}]> {rules.add('/[A-Za-z0-9]{9}/')})?"
    body = _each(
        rules, tools,
        lambda name, tool: f"{rules.literal(name)} {named} <[{arguments}]> {rules.json(parameters_of(tool))}",
    )  # fmt: skip
    return CallRules("[TOOL_CALLS]", body, f"{marker} {body}", f"({marker} {body})+")


def qwen_xml(rules: Rules, tools: Sequence[Tool]) -> CallRules:
    def call(name: str, tool: Tool) -> str:
        body = _arguments(rules, tool, lambda key: f"<parameter={key}>\n", "\n</parameter>\n")
        return f'{rules.literal(f"<function={name}>" + chr(10))} {body} "</function>"'

    return _tagged(rules, "<tool_call>", f'"\\n" {_each(rules, tools, call)} "\\n" {rules.marker("</tool_call>")}')


def seed(rules: Rules, tools: Sequence[Tool]) -> CallRules:
    def call(name: str, tool: Tool) -> str:
        body = _arguments(rules, tool, lambda key: f"<parameter={key}>", "</parameter>\n")
        return f'{rules.literal(f"<function={name}>" + chr(10))} {body} "</function>"'

    closing = rules.marker("</seed:tool_call>")
    return _tagged(rules, "<seed:tool_call>", f'"\\n" {_each(rules, tools, call)} "\\n" {closing}')


def glm(rules: Rules, tools: Sequence[Tool]) -> CallRules:
    """GLM-4.5 and 4.6 write each tag on a new line, later models do not."""

    def call(name: str, tool: Tool) -> str:
        return f"{rules.literal(name)} {_LINE_BREAK} {_arguments(rules, tool, None, '</arg_value>')}"

    return _tagged(rules, "<tool_call>", f"{_each(rules, tools, call)} {rules.marker('</tool_call>')}")


def _arguments(rules: Rules, tool: Tool, opening: Callable[[str], str] | None, closing: str) -> str:
    """Arguments between tags, in the order of the schema; raises ValueError for one without properties to name.

    Args:
        opening: the text before a value; None for GLM's two tags.
    """
    function, schema = tool["function"], parameters_of(tool)
    properties, required = schema.get("properties") or {}, schema.get("required") or []
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
    parts = []
    for key, own in properties.items():
        if opening is not None:
            head = rules.literal(opening(key))
        else:
            head = (
                f"{rules.marker('<arg_key>')} {rules.literal(key)} {rules.marker('</arg_key>')} "
                f"{_LINE_BREAK} {rules.marker('<arg_value>')}"
            )
        if is_text(own):  # as it stands; anything else as JSON
            owner = f"the string {key!r} of {function['name']!r}"
            guided = own | {"x-guidance": schema["x-guidance"]}
            value = text_value(rules, guided, closing, owner, is_strict=bool(function.get("strict")))
        else:
            value = f"{rules.json((own if isinstance(own, dict) else {}) | shared)} {rules.marker(closing)}"
        part = f"{head} {value}"
        if opening is None:
            part += f" {_LINE_BREAK}"
        parts.append(part if key in required else f"({part})?")
    return " ".join(parts) or '""'


def calls_to_channels(rules: Rules, tools: Sequence[Tool]) -> str:
    """Harmony's call, which ends the answer: one call per answer. The channel precedes or follows the name."""
    channel, message, constrain = map(rules.marker, (harmony.CHANNEL, harmony.MESSAGE, "<|constrain|>"))

    def call(name: str, tool: Tool) -> str:
        first = f"{channel} {rules.literal(f'commentary to=functions.{name} ')}"
        last = f'{rules.literal(f" to=functions.{name}")} {channel} "commentary "'
        return f'({first} | {last}) {constrain}? "json" {message} {rules.json(parameters_of(tool))}'

    return _each(rules, tools, call)


CALLS: dict[str, Callable[[Rules, Sequence[Tool]], CallRules]] = {
    "hermes": hermes,
    "llama": llama,
    "mistral": mistral,
    "qwen_xml": qwen_xml,
    "seed": seed,
    "glm": glm,
}
