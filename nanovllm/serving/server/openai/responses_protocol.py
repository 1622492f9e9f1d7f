"""Request model of /v1/responses: the stateless part of OpenAI's API."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, ModelWrapValidatorHandler, PrivateAttr, field_validator, model_validator

from nanovllm.serving.server.answers.template_options import EFFORTS
from nanovllm.serving.server.hints import RESPONSES
from nanovllm.serving.server.openai.messages import ImageAddress
from nanovllm.serving.server.openai.protocol import Number
from nanovllm.serving.server.strict import AnyObject, Each, Strict, lets_pass, tell_hint, text_alone

# Details of items that no answer here has.
_OF_OTHER_TOOLS = (
    "file_search_call.", "web_search_call.", "computer_call_output.", "code_interpreter_call.", "message.input_image.",
)  # fmt: skip
STATELESS = "nothing is stored; send the whole conversation as input"


class InputText(Strict):
    hints: ClassVar = RESPONSES["input[].content[]"]

    type: Literal["input_text", "output_text", "text"]
    text: str


class Refusal(Strict):
    """A refusal of an earlier answer: text of its message."""

    hints: ClassVar = RESPONSES["input[].content[]"]

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class InputImage(Strict):
    hints: ClassVar = {"detail": "the model's processor decides"}
    refused: ClassVar = {"file_id": ((None,), "files are not stored; send a data URL as image_url")}

    type: Literal["input_image"]
    image_url: ImageAddress


Part = Annotated[InputText | Refusal, Field(discriminator="type"), text_alone("input_text")]
GivenPart = Annotated[
    InputText | InputImage | Refusal, Field(discriminator="type"), text_alone("input_text", "input_image")
]


class MessageItem(Strict):
    """A message; `type` may be left out."""

    hints: ClassVar = RESPONSES["input[]"]

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Each[GivenPart] | None
    id: str | None = None
    status: str | None = None


class FunctionCallItem(Strict):
    hints: ClassVar = RESPONSES["input[]"]
    refused: ClassVar = {
        "namespace": ((None,), "tools have no namespaces"),
        "async": ((None, False), "calls are answered in order"),
    }

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str | AnyObject | None = None  # arguments of an earlier answer, maybe malformed
    id: str | None = None
    status: str | None = None


class FunctionOutputItem(Strict):
    hints: ClassVar = RESPONSES["input[]"]

    type: Literal["function_call_output"]
    call_id: str
    output: str | Each[Part] | None
    id: str | None = None
    status: str | None = None


class ReasoningText(Strict):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Strict):
    """Thought of an earlier answer: in `content`, or only in `encrypted_content`."""

    type: Literal["reasoning"]
    summary: Each[ReasoningText] | None = None
    content: Each[ReasoningText] | None = None
    encrypted_content: str | None = None
    id: str | None = None
    status: str | None = None


class OtherItem(BaseModel):
    """A tool's work on another server for an earlier answer: left out of the conversation."""

    type: Literal[
        "web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call", "tool_search_call",
        "tool_search_output", "mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response",
    ]  # fmt: skip

    @model_validator(mode="after")
    def _tell(self) -> OtherItem:
        tell_hint(f"input[].type {self.type}", "another server's tools are no part of the conversation")
        return self


Item = Annotated[
    MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem | OtherItem, Field(discriminator="type")
]


class FunctionTool(Strict):
    hints: ClassVar = RESPONSES["tools[]"]
    refused: ClassVar = {
        "allowed_callers": ((None, ["direct"]), "tools are called by the model alone"),
        "async": ((None, False), "calls are answered in order"),
    }

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: AnyObject | None = None
    strict: bool | None = None


class NamedFunction(Strict):
    type: Literal["function"]
    name: str


class AllowedTools(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Each[NamedFunction]


class TextFormat(Strict):
    type: Literal["text", "json_object"]


class SchemaFormat(Strict):
    """`strict` has no effect: the answer always matches."""

    type: Literal["json_schema"]
    name: str
    schema_: Annotated[AnyObject, Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class TextConfig(Strict):
    hints: ClassVar = RESPONSES["text"]

    format: Annotated[TextFormat | SchemaFormat, Field(discriminator="type")] | None = None


class Reasoning(Strict):
    hints: ClassVar = RESPONSES["reasoning"]
    refused: ClassVar = {
        "context": ((None, "auto"), "the chat template decides which thought it shows"),
        "mode": ((None, "standard"), "there is one"),
    }

    effort: Literal[EFFORTS] | None = None  # type: ignore[valid-type]


class ResponseStreamOptions(Strict):
    hints: ClassVar = RESPONSES["stream_options"]


class ResponsesRequest(Strict):
    """Body of /v1/responses. Tools other than functions are left out; a header of the answer names their types."""

    hints: ClassVar = RESPONSES[""]
    refused: ClassVar = {
        "conversation": ((None,), STATELESS),
        "background": ((None, False), STATELESS),
        "prompt": ((None,), "there are no stored prompts"),
        "top_logprobs": ((None, 0), "use /v1/chat/completions"),
        "context_management": ((None, []), "a conversation is taken as it is"),
        "moderation": ((None,), "there is none"),
        "access_programs": ((None, {}), "there are none"),
        "background_options": ((None, {}), STATELESS),
        "image": ((None, {}), "the engine reads text alone"),
    }

    model: str | None = None
    input: str | Each[Item]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedFunction | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    store: bool | None = None  # None: true where the server keeps responses
    truncation: Literal["auto", "disabled"] | None = None  # a conversation that is too long is refused under both
    open_objects: bool | None = None  # this server's own, as in a chat
    # Fields that the answer repeats, without effect on it.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    _skipped: list[str] = PrivateAttr(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        """Add the type of messages without one."""
        if not isinstance(given, dict) or not isinstance(given.get("input"), list):
            return given
        items = [
            item | {"type": "message"} if isinstance(item, dict) and "type" not in item and "role" in item else item
            for item in given["input"]
        ]
        return given | {"input": items}

    @model_validator(mode="wrap")
    @classmethod
    def _leave_out_tools(cls, given: Any, make: ModelWrapValidatorHandler[ResponsesRequest]) -> ResponsesRequest:
        """Leave out tools of other types than functions, and keep the names of these types."""
        tools = given.get("tools") if isinstance(given, dict) else None
        if not isinstance(tools, list):
            return make(given)
        made = make(given | {"tools": [tool for tool in tools if _other_type(tool) is None]})
        kinds = [kind for tool in tools if (kind := _other_type(tool)) is not None]
        made._skipped = sorted({kind if re.fullmatch(r"[\w.-]{1,64}", kind, re.ASCII) else "other" for kind in kinds})
        return made

    @property
    def skipped(self) -> list[str]:
        """Types of the tools that were left out."""
        return self._skipped

    @field_validator("include")
    @classmethod
    def _check_include(cls, include: list[str] | None) -> list[str] | None:
        for name in include or ():
            if name.startswith(_OF_OTHER_TOOLS):
                tell_hint(f"include {name}", "there are no such items")
            elif name != "reasoning.encrypted_content" and not lets_pass(f"include {name}"):
                raise ValueError(f"{name!r} is not supported; reasoning.encrypted_content is.")
        return include

    @field_validator("input")
    @classmethod
    def _check_input(cls, given: Any) -> Any:
        if not given:
            raise ValueError("it is empty; a conversation needs at least one message.")
        return given


def _other_type(tool: Any) -> str | None:
    """Type of a tool other than a function, such as web_search; None for functions and for values without a type."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return kind if isinstance(kind, str) and kind != "function" else None
