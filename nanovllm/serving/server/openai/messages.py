"""Messages and tools of a conversation: request models, and the chat template's input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from nanovllm.features.chat.plain_messages import bytes_of_url, data_of_url
from nanovllm.serving.server.hints import OPENAI
from nanovllm.serving.server.media_hosts import RemotePicture
from nanovllm.serving.server.strict import AnyObject, Each, Strict, text_alone


class TextPart(Strict):
    hints: ClassVar = OPENAI["messages[].content[]"]

    type: Literal["text"]
    text: str


def _checked(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        data_of_url(url)
    return url


ImageAddress = Annotated[
    str, AfterValidator(_checked), Field(json_schema_extra={"pattern": "^(https?://|data:[^,]*;base64,)"})
]


class ImageUrl(Strict):
    hints: ClassVar = {"detail": "the model's processor decides"}

    url: ImageAddress


class ImagePart(Strict):
    type: Literal["image_url"]
    image_url: ImageUrl


class RefusalPart(Strict):
    type: Literal["refusal"]
    refusal: str


Content = str | Each[Annotated[TextPart, text_alone("text")]] | None
GivenPart = Annotated[TextPart | ImagePart, Field(discriminator="type"), text_alone("text", "image_url")]
AnswerPart = Annotated[TextPart | RefusalPart, Field(discriminator="type")]


class FunctionCall(Strict):
    name: str
    arguments: str | AnyObject | None = None  # arguments of an earlier answer, maybe malformed


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
    content: str | Each[GivenPart] | None
    name: str | None = None


class AssistantMessage(_Message):
    refused: ClassVar = {
        "audio": ((None,), "the engine supports text only"),
        "function_call": ((None,), "it was replaced by tool_calls"),
    }

    role: Literal["assistant"]
    content: str | Each[Annotated[AnswerPart, text_alone("text")]] | None = None
    name: str | None = None
    refusal: str | None = None  # the text, where there is no content
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, as vLLM spells it
    tool_calls: Each[ToolCall] | None = None


class ToolMessage(_Message):
    role: Literal["tool"]
    content: Content = None
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
    """Convert messages for `ChatTemplate`, which shapes them for the template."""
    return [message.model_dump(exclude_none=True) | _content_of(message) for message in messages]


def _content_of(message: Any) -> dict[str, Any]:
    if message.content is None:
        return {"content": None}
    if isinstance(message.content, str) or not any(isinstance(part, ImagePart) for part in message.content):
        return {}
    return {
        "content": [_picture(part) if isinstance(part, ImagePart) else part.model_dump() for part in message.content]
    }


def image_part(url: str) -> dict[str, Any]:
    """A picture as a part of a chat request."""
    return {"type": "image_url", "image_url": {"url": url}}


def _picture(part: ImagePart) -> dict[str, Any]:
    """A part with a picture: its bytes, or the address from which an allowed host gives them."""
    url = part.image_url.url
    is_remote = url.startswith(("http://", "https://"))
    return {"type": "image", "image": RemotePicture(url) if is_remote else bytes_of_url(url, "image_url")}
