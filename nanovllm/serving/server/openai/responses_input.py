"""A responses request as a chat request."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any

from nanovllm.serving.server.openai import responses_protocol as protocol
from nanovllm.serving.server.openai.messages import image_part
from nanovllm.serving.server.openai.protocol import ChatRequest
from nanovllm.serving.server.strict import tell_hint

# Fields of the chat request -> fields of this request, for errors.
RENAMED = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


def as_chat(body: protocol.ResponsesRequest, before: Sequence[dict[str, Any]] = ()) -> ChatRequest:
    """Translate a request; raises pydantic's ValidationError and ValueError if it makes no valid chat request.

    Args:
        before: messages of the conversation that it continues.
    """
    given: dict[str, Any] = {
        "model": body.model,
        "messages": [*_instructions(body), *before, *new_messages(body)],
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "stream": bool(body.stream),
        "open_objects": body.open_objects,
    }
    tools = body.tools or []
    if isinstance(body.tool_choice, protocol.AllowedTools):
        allowed = {tool.name for tool in body.tool_choice.tools}
        if unknown := sorted(allowed - {tool.name for tool in tools}):
            raise ValueError(f"tool_choice allows {unknown[0]!r}, which is not among the tools.")
        tools = [tool for tool in tools if tool.name in allowed]
    if tools:
        given["tools"] = [_tool(tool) for tool in tools]
    given |= _tool_choice(body, has_tools=bool(tools))
    if body.reasoning is not None and body.reasoning.effort is not None:
        given["reasoning_effort"] = body.reasoning.effort
    form = None if body.text is None else body.text.format
    if isinstance(form, protocol.SchemaFormat):
        schema = {"name": form.name, "schema": form.schema_}
        given["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif form is not None:
        given["response_format"] = {"type": form.type}
    return ChatRequest.model_validate(given)


def _tool(tool: protocol.FunctionTool) -> dict[str, Any]:
    function = tool.model_dump(exclude={"type"}, exclude_none=True)
    return {"type": "function", "function": function}


def _tool_choice(body: protocol.ResponsesRequest, *, has_tools: bool) -> dict[str, Any]:
    choice = body.tool_choice
    given: dict[str, Any] = {"parallel_tool_calls": body.parallel_tool_calls}
    if isinstance(choice, protocol.NamedFunction):
        given["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif isinstance(choice, protocol.AllowedTools):
        given["tool_choice"] = choice.mode
    elif choice != "auto" or has_tools:  # clients say "auto" without tools too
        given["tool_choice"] = choice
    return given


def _instructions(body: protocol.ResponsesRequest) -> list[dict[str, Any]]:
    return [] if body.instructions is None else [{"role": "system", "content": body.instructions}]


def answer_message(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The assistant's message of an answer's items; none without items."""
    messages: list[dict[str, Any]] = []
    for item in items:
        match item["type"]:
            case "message":
                _answer(messages, joins=True)["content"] += "".join(part["text"] for part in item["content"])
            case "reasoning":
                _answer(messages, joins=False)["reasoning_content"] = "".join(part["text"] for part in item["content"])
            case "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                _answer(messages, joins=True).setdefault("tool_calls", []).append(call)
    return messages


def new_messages(body: protocol.ResponsesRequest) -> list[dict[str, Any]]:
    """Messages of the input; an answer's thought, text and calls become one message."""
    messages: list[dict[str, Any]] = []
    if isinstance(body.input, str):
        return [{"role": "user", "content": body.input}]
    for item in body.input:
        match item:
            case protocol.MessageItem(role="assistant"):
                answer = _answer(messages, joins=True)
                answer["content"] += _text(item.content)
            case protocol.MessageItem():
                messages.append({"role": item.role, "content": _content(item.content)})
            case protocol.ReasoningItem():
                if thought := _thought(item):
                    _answer(messages, joins=False)["reasoning_content"] = thought
            case protocol.FunctionCallItem():
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                _answer(messages, joins=True).setdefault("tool_calls", []).append(call)
            case protocol.FunctionOutputItem():
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
    return messages


def _answer(messages: list[dict[str, Any]], *, joins: bool) -> dict[str, Any]:
    """Assistant message for an item: the last message if it is the assistant's, else a new one.

    Args:
        joins: True if the item may join the last message; False for thought, which begins an answer.
    """
    last = messages[-1] if messages else {}
    if not joins or last.get("role") != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(content: str | list[Any] | None) -> str:
    if _has_picture(content):
        raise ValueError("input: a picture stands in a message of the user alone.")
    return content if isinstance(content, str) else "\n".join(part.text for part in content or ())


def _has_picture(content: str | list[Any] | None) -> bool:
    return any(isinstance(part, protocol.InputImage) for part in content or ())


def _content(content: str | list[Any] | None) -> Any:
    """Content of a message: a text, or parts where there are pictures."""
    if not _has_picture(content):
        return _text(content)
    parts: list[Any] = list(content or ())
    return [
        image_part(part.image_url) if isinstance(part, protocol.InputImage) else {"type": "text", "text": part.text}
        for part in parts
    ]


def _thought(item: protocol.ReasoningItem) -> str:
    """Thought of an item: its text, the text that this server sealed, or its summary."""
    if item.content:
        return "\n".join(part.text for part in item.content)
    if item.encrypted_content is not None:
        if (thought := opened(item.encrypted_content)) is not None:
            return thought
        tell_hint("input[].encrypted_content", "it was sealed by another server, which alone can read it")
    return "\n".join(part.text for part in item.summary or ())


def sealed(thought: str) -> str:
    """Encode thought for a client to send back; it is not encrypted."""
    return base64.b64encode(thought.encode("utf-8", "surrogatepass")).decode()


def opened(text: str) -> str | None:
    """Decode `sealed` thought; None for other text."""
    try:
        return base64.b64decode(text, validate=True).decode("utf-8")
    except (ValueError, binascii.Error):  # also text that is not ASCII
        return None
