"""Messages and tools of a conversation: request models, and the chat template's input."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from nanovllm.server.strict import AnyObject, Each, Strict, check_nesting, text_alone

# Accepted and left out of the template: every prompt's prefix is cached.
CacheControl = Annotated[AnyObject | None, Field(exclude=True)]


class TextPart(Strict):
    type: Literal["text"]
    text: str
    cache_control: CacheControl = None


Content = str | Each[Annotated[TextPart, text_alone("text")]]


class FunctionCall(Strict):
    name: str
    arguments: str


class ToolCall(Strict):
    id: str
    index: Annotated[int | None, Field(exclude=True)] = None  # of a stream's delta, sent back; their order tells
    type: Literal["function"] = "function"
    function: FunctionCall


class SystemMessage(Strict):
    role: Literal["system", "developer"]
    content: Content
    name: str | None = None
    cache_control: CacheControl = None


class UserMessage(Strict):
    role: Literal["user"]
    content: Content
    name: str | None = None
    cache_control: CacheControl = None


class AssistantMessage(Strict):
    refused: ClassVar = {
        "refusal": ((None,), "refusals are part of the text"),
        "audio": ((None,), "the engine supports text only"),
        "function_call": ((None,), "it was replaced by tool_calls"),
    }

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Each[ToolCall] | None = None
    annotations: Annotated[list[Any] | None, Field(exclude=True)] = None  # of an earlier answer
    cache_control: CacheControl = None


class ToolMessage(Strict):
    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None
    cache_control: CacheControl = None


ChatMessage = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Function(Strict):
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: AnyObject | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function
    cache_control: CacheControl = None


def as_conversation(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Convert messages for the chat template; raises ValueError for tool call arguments that are not JSON."""
    return [_as_template_message(message, number) for number, message in enumerate(messages)]


def _as_template_message(message: Any, number: int) -> dict[str, Any]:
    """Join text parts by line breaks, map "developer" to "system", and parse the arguments of tool calls."""
    given: dict[str, Any] = message.model_dump(exclude_none=True)
    content = given.get("content")
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    given["content"] = content if content is not None else ""
    if given["role"] == "developer":
        given["role"] = "system"
    for index, call in enumerate(given.get("tool_calls", ())):
        try:
            call["function"]["arguments"] = check_nesting(json.loads(call["function"]["arguments"] or "{}"))
        except (ValueError, RecursionError) as error:
            where = f"messages[{number}].tool_calls[{index}].function.arguments"
            raise ValueError(f"{where}: the arguments of {call['id']!r} are not valid JSON ({error}).") from error
    return given
