"""Grammars of tool calls, one per format of `call_formats`: they allow exactly the calls that its parser accepts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from nanovllm.serving.server.answers import harmony
from nanovllm.serving.server.answers.call_arguments import Tool, Value, parameters_of, values_of
from nanovllm.serving.server.answers.call_formats import DSML
from nanovllm.serving.server.answers.lenient_json import GEMMA_QUOTE
from nanovllm.serving.server.answers.rules import Rules


@dataclass(frozen=True, slots=True)
class CallRules:
    """Grammar rules for the tool calls of one request.

    opening: the marker that opens a call.
    body: one call, or the calls of one block, without that marker.
    one: one call with its marker, as the whole answer.
    joined: one call or more, as the whole answer.
    plain: text without a call, if the format allows no text around calls; else None.
    single: one call without the marker, where `body` may hold several.
    """

    opening: str
    body: str
    one: str
    joined: str
    plain: str | None = None
    single: str | None = None


_LINE_BREAK = '"\\n"?'
_NEW_LINE = '"\\n"'


def _each(rules: Rules, tools: Sequence[Tool], body: Callable[[str, Tool], str]) -> str:
    """Rule for a call of any of the tools."""
    return rules.add(" | ".join(body(tool["function"]["name"], tool) for tool in tools))


def _json_call(rules: Rules, key: str, more: str = "") -> Callable[[str, Tool], str]:
    """A function that makes the rule of one tool's call; more: rule for the text after the arguments."""

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


def _block(rules: Rules, opening: str, call: str, closing: str, *, head: str = "", between: str = "") -> CallRules:
    """Calls in one block, between two markers.

    Args:
        head, between: rules for the text after the opening marker, and between calls.
    """
    marker = rules.marker(opening)
    end = rules.marker(closing)
    single = f"{head} {call} {end}"
    body = f"{head} {call} ({between} {call})* {end}"
    return CallRules(opening, body, f"{marker} {single}", f"{marker} {body}", single=single)


def llama(rules: Rules, tools: Sequence[Tool]) -> CallRules:
    call = _each(rules, tools, _json_call(rules, "parameters"))
    plain = rules.add(r"/([^{ \n\r\t](.|\n)*)?/")
    return CallRules("{", call, call, f'{call} ("; " {call})*', plain)


def mistral(rules: Rules, tools: Sequence[Tool]) -> CallRules:
    marker = rules.marker("[TOOL_CALLS]")
    arguments = rules.token_id("[ARGS]")
    if arguments is None:  # a list of calls after one marker
        own_id = rules.add(r'/, "id": "[A-Za-z0-9]{9}"/')  # templates write earlier calls with such an id
        call = _each(rules, tools, _json_call(rules, "arguments", f"{own_id}?"))
        body = f'" "? "[" {call} (", " {call})* "]"'  # older models write the space
        single = f'" "? "[" {call} "]"'
        return CallRules("[TOOL_CALLS]", body, f"{marker} {single}", f"{marker} {body}", single=single)
    number = rules.token_id("[CALL_ID]")  # Mistral Small 3.2 writes this token before a call's id
    named = "" if number is None else f"(<[{number}]> {rules.add('/[A-Za-z0-9]{9}/')})?"
    body = _each(
        rules, tools,
        lambda name, tool: f"{rules.literal(name)} {named} <[{arguments}]> {rules.json(parameters_of(tool))}",
    )  # fmt: skip
    return CallRules("[TOOL_CALLS]", body, f"{marker} {body}", f"({marker} {body})+")


def qwen_xml(rules: Rules, tools: Sequence[Tool]) -> CallRules:
    def call(name: str, tool: Tool) -> str:
        body = _arguments(rules, tool, lambda value: f"<parameter={value.key}>\n", "\n</parameter>\n")
        return f'{rules.literal(f"<function={name}>" + chr(10))} {body} "</function>"'

    return _tagged(rules, "<tool_call>", f'"\\n" {_each(rules, tools, call)} "\\n" {rules.marker("</tool_call>")}')


def seed(rules: Rules, tools: Sequence[Tool]) -> CallRules:
    def call(name: str, tool: Tool) -> str:
        body = _arguments(rules, tool, lambda value: f"<parameter={value.key}>", "</parameter>\n")
        return f'{rules.literal(f"<function={name}>" + chr(10))} {body} "</function>"'

    closing = rules.marker("</seed:tool_call>")
    return _tagged(rules, "<seed:tool_call>", f'"\\n" {_each(rules, tools, call)} "\\n" {closing}')


def glm(rules: Rules, tools: Sequence[Tool]) -> CallRules:
    """GLM-4.5 and 4.6 write each tag on a new line, later models do not."""

    def call(name: str, tool: Tool) -> str:
        return f"{rules.literal(name)} {_LINE_BREAK} {_arguments(rules, tool, None, '</arg_value>')}"

    return _tagged(rules, "<tool_call>", f"{_each(rules, tools, call)} {rules.marker('</tool_call>')}")


def _deepseek(rules: Rules, tools: Sequence[Tool], before: str, behind: str, end: str) -> CallRules:
    """DeepSeek's calls, with the texts before a call's name, after it, and after the arguments."""
    opening = rules.marker("<｜tool▁call▁begin｜>")
    closing = rules.marker("<｜tool▁call▁end｜>")

    def call(name: str, tool: Tool) -> str:
        arguments = rules.json(parameters_of(tool))
        return f"{opening} {before} {rules.literal(name)} {behind} {arguments} {end} {closing}"

    return _block(
        rules, "<｜tool▁calls▁begin｜>", _each(rules, tools, call), "<｜tool▁calls▁end｜>", between=_LINE_BREAK
    )


def deepseek_v3(rules: Rules, tools: Sequence[Tool]) -> CallRules:
    separator = rules.marker("<｜tool▁sep｜>")
    return _deepseek(rules, tools, f'"function" {separator}', rules.literal("\n```json\n"), rules.literal("\n```"))


def deepseek_v31(rules: Rules, tools: Sequence[Tool]) -> CallRules:
    return _deepseek(rules, tools, "", rules.marker("<｜tool▁sep｜>"), "")


def kimi_k2(rules: Rules, tools: Sequence[Tool]) -> CallRules:
    opening = rules.marker("<|tool_call_begin|>")
    closing = rules.marker("<|tool_call_end|>")
    separator = rules.marker("<|tool_call_argument_begin|>")
    number = rules.add("/[0-9]{1,4}/")

    def call(name: str, tool: Tool) -> str:
        head = f"{rules.literal(f'functions.{name}:')} {number}"
        return f"{opening} {head} {separator} {rules.json(parameters_of(tool))} {closing}"

    call_rule = _each(rules, tools, call)
    return _block(rules, "<|tool_calls_section_begin|>", call_rule, "<|tool_calls_section_end|>")


def cohere(rules: Rules, tools: Sequence[Tool]) -> CallRules:
    space = rules.add(r"/[ \n]{0,8}/")
    own_id = rules.add(r'/\{"tool_call_id": "[0-9]{1,4}", /')

    def call(name: str, tool: Tool) -> str:
        head = f'"tool_name": {rules.literal(name)}, "parameters": '
        return f'{own_id} {rules.literal(head)} {rules.json(parameters_of(tool))} "}}"'

    marker = rules.marker("<|START_ACTION|>")
    end = rules.marker("<|END_ACTION|>")
    one = _each(rules, tools, call)
    single, body = (f'"[" {space} {one} {more} {space} "]" {end}' for more in ("", f'("," {space} {one})*'))
    return CallRules("<|START_ACTION|>", body, f"{marker} {single}", f"{marker} {body}", single=single)


def gemma4(rules: Rules, tools: Sequence[Tool]) -> CallRules:
    """Strings of arguments within Gemma's quotes, other values as JSON."""

    def call(name: str, tool: Tool) -> str:
        members = _members(rules, values_of(rules, tool, GEMMA_QUOTE, is_for_text=True))
        return f"{rules.literal(f'call:{name}{{')} {members} {rules.literal('}')}"

    return _tagged(rules, "<|tool_call>", f"{_each(rules, tools, call)} {rules.marker('<tool_call|>')}")


def _members(rules: Rules, values: Sequence[Value]) -> str:
    """Rule for names and values in their order, with commas between the present ones."""
    quote = rules.marker(GEMMA_QUOTE)
    # rules of the later values: `more` follows another value, `members` does not
    more = '""'
    members = '""'
    for value in reversed(values):
        member = f"{rules.literal(f'{value.key}:')} {quote if value.is_text else ''} {value.rule}"
        if value.is_required:
            members = rules.add(f"{member} {more}")
            more = rules.add(f'"," {member} {more}')
        else:
            members = rules.add(f"{member} {more} | {members}")
            more = rules.add(f'("," {member})? {more}')
    return members


def minimax_m2(rules: Rules, tools: Sequence[Tool]) -> CallRules:
    def call(name: str, tool: Tool) -> str:
        body = _arguments(rules, tool, lambda value: f'<parameter name="{value.key}">', "</parameter>", "\n")
        head = rules.literal(f'<invoke name="{name}">\n')
        return f"{head} {body} {rules.literal('</invoke>' + chr(10))}"

    calls = _each(rules, tools, call)
    return _block(rules, "<minimax:tool_call>", calls, "</minimax:tool_call>", head=_NEW_LINE)


def _dsml(rules: Rules, tools: Sequence[Tool], block: str) -> CallRules:
    def opening(value: Value) -> str:
        return f'<{DSML}parameter name="{value.key}" string="{"true" if value.is_text else "false"}">'

    def call(name: str, tool: Tool) -> str:
        body = _arguments(rules, tool, opening, f"</{DSML}parameter>", "\n")
        head = rules.marker(f'<{DSML}invoke name="{name}">\n')
        return f"{head} {body} {rules.marker(f'</{DSML}invoke>' + chr(10))}"

    return _block(rules, f"<{DSML}{block}>", _each(rules, tools, call), f"</{DSML}{block}>", head=_NEW_LINE)


def _arguments(rules: Rules, tool: Tool, opening: Callable[[Value], str] | None, closing: str, behind: str = "") -> str:
    """Arguments between tags, in the order of the schema; raises ValueError for one without properties to name.

    Args:
        opening: the text before a value; None for GLM's two tags.
        behind: text after the closing tag.
    """
    parts = []
    for value in values_of(rules, tool, closing):
        if opening is not None:
            part = f"{rules.marker(opening(value))} {value.rule} {rules.literal(behind) if behind else ''}"
        else:
            part = (
                f"{rules.marker('<arg_key>')} {rules.literal(value.key)} {rules.marker('</arg_key>')} "
                f"{_LINE_BREAK} {rules.marker('<arg_value>')} {value.rule} {_LINE_BREAK}"
            )
        parts.append(part if value.is_required else f"({part})?")
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
    "deepseek_v3": deepseek_v3,
    "deepseek_v31": deepseek_v31,
    "deepseek_v32": partial(_dsml, block="function_calls"),
    "deepseek_v4": partial(_dsml, block="tool_calls"),
    "kimi_k2": kimi_k2,
    "cohere": cohere,
    "gemma4": gemma4,
    "minimax_m2": minimax_m2,
}
