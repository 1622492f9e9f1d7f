"""Messages and tools of a conversation: request models, and the chat template's input."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from nanovllm.server.hints import OPENAI
from nanovllm.server.strict import AnyObject, Each, Strict, check_nesting, text_alone


class TextPart(Strict):
    hints: ClassVar = OPENAI["messages[].content[]"]

    type: Literal["text"]
    text: str


Content = str | Each[Annotated[TextPart, text_alone("text")]]


class FunctionCall(Strict):
    name: str
    arguments: str


class ToolCall(Strict):
    hints: ClassVar = OPENAI["messages[].tool_calls[]"]

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class _Message(Strict):
    hints: ClassVar = OPENAI["messages[]"]


class SystemMessage(_Message):
    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(_Message):
    role: Literal["user"]
    content: Content
    name: str | None = None


class AssistantMessage(_Message):
    refused: ClassVar = {
        "audio": ((None,), "the engine supports text only"),
        "function_call": ((None,), "it was replaced by tool_calls"),
    }

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    refusal: str | None = None  # the text, where there is no content
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, as vLLM spells it
    tool_calls: Each[ToolCall] | None = None


class ToolMessage(_Message):
    role: Literal["tool"]
    content: Content | None = None
    tool_call_id: str
    name: str | None = None


ChatMessage = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Function(Strict):
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: AnyObject | None = None
    strict: bool | None = None


class Tool(Strict):
    hints: ClassVar = OPENAI["tools[]"]

    type: Literal["function"]
    function: Function


def as_conversation(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Convert messages for the chat template; raises ValueError for tool call arguments that are not JSON."""
    return [_as_template_message(message, number) for number, message in enumerate(messages)]


def _as_template_message(message: Any, number: int) -> dict[str, Any]:
    """Join text parts by line breaks, map "developer" to "system", and parse the arguments of tool calls."""
    given: dict[str, Any] = message.model_dump(exclude_none=True)
    thought, refusal = given.pop("reasoning", None), given.pop("refusal", None)
    if thought is not None:
        given.setdefault("reasoning_content", thought)
    content = given.get("content") or refusal
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
