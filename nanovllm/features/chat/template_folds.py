"""Other forms of a conversation, for a template that refuses the client's: each keeps all texts, in their order."""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Callable, Iterator
from typing import Any

from nanovllm.features.chat.plain_messages import (
    MAX_NESTING,
    THOUGHT,
    PlainMessage,
    as_parts,
    call_text,
    joined,
    text_of,
)

_DIGITS = string.ascii_letters + string.digits

Tools = list[dict[str, Any]] | None
Conversation = tuple[list[PlainMessage], Tools]


def complete_tools(messages: list[PlainMessage], tools: Tools) -> Conversation:
    """Tools have a description and parameters with properties, empty where the client gave none."""
    complete = []
    for tool in tools or ():
        function = tool.get("function") or {}
        parameters = {"type": "object", "properties": {}} | (function.get("parameters") or {})
        function = {"description": ""} | function | {"parameters": parameters}
        complete.append(tool | {"function": function})
    return messages, complete


def simplify_schemas(messages: list[PlainMessage], tools: Tools) -> Conversation:
    """Each schema of a parameter is an object with one type: the first that is not null, or a string."""
    simple = []
    for tool in tools or ():
        function = tool.get("function") or {}
        parameters = function.get("parameters") or {}
        properties = parameters.get("properties") or {}
        shown = parameters | {"properties": {name: _simple(schema) for name, schema in properties.items()}}
        simple.append(tool | {"function": function | {"parameters": shown}})
    return messages, simple


def _simple(schema: Any, depth: int = 0) -> dict[str, Any]:
    """A schema for templates that write types out, in words or as a signature."""
    made = dict(schema) if isinstance(schema, dict) else {}
    options = [each for key in ("anyOf", "oneOf", "allOf") for each in made.pop(key, ()) if isinstance(each, dict)]
    types = made.get("type", [each.get("type") for each in options])
    named = [each for each in (types if isinstance(types, list) else [types]) if isinstance(each, str)]
    made["type"] = next((each for each in named if each != "null"), "string")
    if depth < MAX_NESTING and "items" in made:
        made["items"] = _simple(made["items"], depth + 1)
    if depth < MAX_NESTING and isinstance(made.get("properties"), dict):
        made["properties"] = {name: _simple(each, depth + 1) for name, each in made["properties"].items()}
    return made


def leave_out_empty(messages: list[PlainMessage], tools: Tools) -> Conversation:
    """Answers without text and calls are left out."""
    made = [each for each in messages if each["role"] != "assistant" or each["content"] or "tool_calls" in each]
    return made or messages, tools


def shorten_ids(messages: list[PlainMessage], tools: Tools) -> Conversation:
    """Ids of calls are nine letters or digits, the same for the same id: the prefix of a conversation stays."""
    made = []
    for message in messages:
        if "tool_calls" in message:
            message = message | {"tool_calls": [call | {"id": _short(call["id"])} for call in message["tool_calls"]]}
        if message.get("tool_call_id"):
            message = message | {"tool_call_id": _short(message["tool_call_id"])}
        made.append(message)
    return made, tools


def _short(call_id: str) -> str:
    if re.fullmatch("[A-Za-z0-9]{9}", call_id):
        return call_id
    digest = hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).digest()
    return "".join(_DIGITS[byte % len(_DIGITS)] for byte in digest[:9])


def split_calls(messages: list[PlainMessage], tools: Tools) -> Conversation:
    """Each message has one call, and its result follows."""
    made: list[PlainMessage] = []
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            made.append(message)
            continue
        results: list[PlainMessage] = []
        while place < len(messages) and messages[place]["role"] == "tool":
            results.append(messages[place])
            place += 1
        for number, call in enumerate(calls):
            first = message if number == 0 else {"role": "assistant", "content": ""}
            own = [result for result in results if result.get("tool_call_id") == call["id"]]
            made += [first | {"tool_calls": [call]}, *own]
            results = [result for result in results if result not in own]
        made += results
    return made, tools


def split_text(messages: list[PlainMessage], tools: Tools) -> Conversation:
    """Puts the text of a message with calls into a separate message before it."""
    made: list[PlainMessage] = []
    for message in messages:
        if "tool_calls" in message and text_of(message["content"]):
            made.append({"role": "assistant", "content": message["content"]})
            message = message | {"content": ""}
        made.append(message)
    return made, tools


def fold_system(messages: list[PlainMessage], tools: Tools) -> Conversation:
    """System messages at the beginning are one; a later one is text of the user's message next to it."""
    made: list[PlainMessage] = []
    is_first = True
    waiting = ""  # text for the next message, if it is the user's
    for message in messages:
        is_system = message["role"] == "system"
        text = text_of(message["content"])
        if not is_system and waiting:
            if message["role"] == "user":
                message = message | {"content": _prefixed(waiting, message["content"])}
            else:
                made.append({"role": "user", "content": waiting})
            waiting = ""
        if not is_system:
            made.append(message)
        elif is_first and made:
            made[-1] = made[-1] | {"content": joined(made[-1]["content"], text)}
        elif is_first:
            made.append(message)
        elif made[-1]["role"] == "user":  # no second user message: roles must alternate in some templates
            made[-1] = made[-1] | {"content": joined(made[-1]["content"], text, "\n")}
        else:
            waiting = joined(waiting, text, "\n")
        is_first = is_first and is_system
    return [*made, {"role": "user", "content": waiting}] if waiting else made, tools


def _prefixed(text: str, content: Any) -> Any:
    return joined(text, content) if isinstance(content, str) else [*as_parts(text), *content]


def join_thought(messages: list[PlainMessage], tools: Tools) -> Conversation:
    """Text next to thought and calls is part of the thought."""
    made = []
    for message in messages:
        thought = message.get(THOUGHT[0])
        if thought and message.get("tool_calls"):
            longer = joined(thought, text_of(message["content"]))
            message = message | dict.fromkeys(THOUGHT, longer) | {"content": ""}
        made.append(message)
    return made, tools


def results_as_text(messages: list[PlainMessage], tools: Tools) -> Conversation:
    """Results without a call are the user's text."""
    known = {call["id"] for message in messages for call in message.get("tool_calls", ())}
    made = []
    for message in messages:
        is_result = message["role"] == "tool" and message.get("tool_call_id") not in known
        made.append(as_user(message) if is_result else message)
    return made, tools


def exchanges_as_text(messages: list[PlainMessage], tools: Tools) -> Conversation:
    """Calls and results are text."""
    made = [with_calls_as_text(message) for message in messages]
    return [as_user(message) if message["role"] == "tool" else message for message in made], tools


def join_turns(messages: list[PlainMessage], tools: Tools) -> Conversation:
    """Neighbouring messages of the user, or of the assistant without calls, are one."""
    made: list[PlainMessage] = []
    for message in messages:
        last = made[-1] if made else {}
        is_same = message["role"] in ("user", "assistant") and last.get("role") == message["role"]
        if is_same and "tool_calls" not in last and "tool_calls" not in message:
            made[-1] = message | {"content": joined(last["content"], text_of(message["content"]))}
        else:
            made.append(message)
    return made, tools


def move_system(messages: list[PlainMessage], tools: Tools) -> Conversation:
    """The first system message is the beginning of the user's first text."""
    if messages[0]["role"] != "system":
        return messages, tools
    text = text_of(messages[0]["content"])
    rest = list(messages[1:])
    if rest and rest[0]["role"] == "user":
        rest[0] = rest[0] | {"content": _prefixed(text, rest[0]["content"])}
    else:
        rest.insert(0, {"role": "user", "content": text})
    return rest, tools


def begin_with_user(messages: list[PlainMessage], tools: Tools) -> Conversation:
    """An answer at the beginning follows an empty message of the user."""
    place = next((number for number, message in enumerate(messages) if message["role"] != "system"), 0)
    if messages[place]["role"] != "assistant":
        return messages, tools
    return [*messages[:place], {"role": "user", "content": ""}, *messages[place:]], tools


def as_user(message: PlainMessage) -> PlainMessage:
    return {"role": "user", "content": message["content"]}


def with_calls_as_text(message: PlainMessage) -> PlainMessage:
    if "tool_calls" not in message:
        return message
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    functions = [call["function"] for call in message["tool_calls"]]
    written = "\n".join(call_text(function["name"], function["arguments"]) for function in functions)
    return rest | {"content": joined(message["content"], written, "\n")}


# Folds that keep calls and results, from the one that changes least.
FOLDS: tuple[Callable[[list[PlainMessage], Tools], Conversation], ...] = (
    complete_tools, simplify_schemas, shorten_ids, leave_out_empty, split_calls, join_thought, split_text, fold_system,
    results_as_text, join_turns, begin_with_user, move_system,
)  # fmt: skip


def folded(messages: list[PlainMessage], tools: Tools) -> Iterator[Conversation]:
    """Different forms of a conversation: each fold alone, then more and more of them, then without calls as well."""
    tried = [(messages, tools)]
    for start in ((messages, tools), exchanges_as_text(messages, tools)):
        alone = [start, *(fold(*start) for fold in FOLDS)]
        together = [start]
        for fold in FOLDS:
            together.append(fold(*together[-1]))
        for conversation in (*alone, *together):
            if conversation not in tried:
                tried.append(conversation)
                yield conversation
