"""Grammars of tool calls, one for each format that `tool_calls` reads: what it accepts there, no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nanovllm.server.answers import harmony
from nanovllm.server.answers.rules import Rules
from nanovllm.server.answers.tagged_calls import is_text

Tool = dict[str, Any]  # in OpenAI's form


@dataclass(frozen=True, slots=True)
class CallRules:
    """Rules of one request's calls.

    opening: the marker in front of a call.
    body: one call behind its marker.
    one: one call with its marker, as the whole answer.
    joined: one call or more, as the whole answer.
    plain: text that is no call, for a format whose calls are whole answers; None for others.
    """

    opening: str
    body: str
    one: str
    joined: str
    plain: str | None = None


def parameters_of(tool: Tool) -> dict[str, Any]:
    """Schema of a tool's arguments; keywords that the compiler does not know are errors for strict tools alone."""
    function = tool["function"]
    schema = dict(function.get("parameters") or {})
    schema.setdefault("type", "object")
    # One line, as templates write calls: white space without end is what small models get lost in.
    schema["x-guidance"] = {"whitespace_pattern": " ?", "lenient": not function.get("strict")}
    return schema


def _each(rules: Rules, tools: Sequence[Tool], body: Callable[[str, Tool], str]) -> str:
    """One of the tools' calls."""
    return rules.add(" | ".join(body(tool["function"]["name"], tool) for tool in tools))


def _json_call(rules: Rules, key: str) -> Callable[[str, Tool], str]:
    def call(name: str, tool: Tool) -> str:
        head = '{"name": ' + rules.literal(name) + f', "{key}": '
        return f'{rules.literal(head)} {rules.json(parameters_of(tool))} "}}"'

    return call


def _tagged(rules: Rules, opening: str, body: str) -> CallRules:
    call = f"{rules.marker(opening)} {body}"
    return CallRules(opening, body, call, f'{call} ("\\n" {call})*')


def hermes(rules: Rules, tools: Sequence[Tool]) -> CallRules:
    call = _each(rules, tools, _json_call(rules, "arguments"))
    return _tagged(rules, "<tool_call>", f'"\\n" {call} "\\n" {rules.marker("</tool_call>")}')


def llama(rules: Rules, tools: Sequence[Tool]) -> CallRules:
    call = _each(rules, tools, _json_call(rules, "parameters"))
    plain = rules.add(r"/([^{ \n\r\t](.|\n)*)?/")
    return CallRules("{", call, call, f'{call} ("; " {call})*', plain)


def mistral(rules: Rules, tools: Sequence[Tool]) -> CallRules:
    marker, arguments = rules.marker("[TOOL_CALLS]"), rules.token_id("[ARGS]")
    if arguments is None:  # a list behind one marker
        call = _each(rules, tools, _json_call(rules, "arguments"))
        body = f'"[" {call} (", " {call})* "]"'
        return CallRules("[TOOL_CALLS]", body, f'{marker} "[" {call} "]"', f"{marker} {body}")
    body = _each(
        rules, tools, lambda name, tool: f"{rules.literal(name)} <[{arguments}]> {rules.json(parameters_of(tool))}"
    )
    return CallRules("[TOOL_CALLS]", body, f"{marker} {body}", f"({marker} {body})+")


def qwen_xml(rules: Rules, tools: Sequence[Tool]) -> CallRules:
    def call(name: str, tool: Tool) -> str:
        body = _arguments(rules, tool, lambda key: f"<parameter={key}>\n", "\n</parameter>\n")
        return f'{rules.literal(f"<function={name}>" + chr(10))} {body} "</function>"'

    return _tagged(rules, "<tool_call>", f'"\\n" {_each(rules, tools, call)} "\\n" {rules.marker("</tool_call>")}')


def glm(rules: Rules, tools: Sequence[Tool]) -> CallRules:
    def call(name: str, tool: Tool) -> str:
        return f"{rules.literal(name + chr(10))} {_arguments(rules, tool, None, '</arg_value>')}"

    return _tagged(rules, "<tool_call>", f"{_each(rules, tools, call)} {rules.marker('</tool_call>')}")


def _arguments(rules: Rules, tool: Tool, opening: Callable[[str], str] | None, closing: str) -> str:
    """Arguments between tags, in the order of the schema; raises ValueError for a schema without properties to name.

    Args:
        opening: the text before a value; None for GLM's two tags.
    """
    function, schema = tool["function"], parameters_of(tool)
    properties, required = schema.get("properties") or {}, schema.get("required") or ()
    if function.get("strict") and (unknown := sorted({"anyOf", "oneOf", "allOf", "$ref", "not"} & schema.keys())):
        raise ValueError(
            f"tools: the parameters of {function['name']!r} have {unknown[0]!r} at their root, and this model writes "
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
                f'"\\n" {rules.marker("<arg_value>")}'
            )
        part = f"{head} {_value(rules, own, shared, closing)}"
        if opening is None:
            part += ' "\\n"'
        parts.append(part if key in required else f"({part})?")
    return " ".join(parts) or '""'


def _value(rules: Rules, schema: Any, shared: dict[str, Any], closing: str) -> str:
    """A value with the tag behind it: a string as it stands, anything else as JSON."""
    if not is_text(schema):
        own = schema if isinstance(schema, dict) else {}
        return f"{rules.json(own | shared)} {rules.marker(closing)}"
    if "const" in schema or "enum" in schema:
        texts = [schema["const"]] if "const" in schema else schema["enum"]
        return f"{rules.add(' | '.join(map(rules.literal, texts)))} {rules.marker(closing)}"
    return rules.until(closing)


def calls_to_channels(rules: Rules, tools: Sequence[Tool]) -> str:
    """Harmony's call, whose end ends the answer: there is one in each."""
    channel, message, constrain = map(rules.marker, (harmony.CHANNEL, harmony.MESSAGE, "<|constrain|>"))

    def call(name: str, tool: Tool) -> str:
        head = rules.literal(f"commentary to=functions.{name} ")
        return f'{channel} {head} {constrain} "json" {message} {rules.json(parameters_of(tool))}'

    return _each(rules, tools, call)


CALLS: dict[str, Callable[[Rules, Sequence[Tool]], CallRules]] = {
    "hermes": hermes,
    "llama": llama,
    "mistral": mistral,
    "qwen_xml": qwen_xml,
    "glm": glm,
}
