"""Request model of /v1/responses: the stateless part of OpenAI's API."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ModelWrapValidatorHandler, PrivateAttr, field_validator, model_validator

from nanovllm.server.answers.template_options import EFFORTS
from nanovllm.server.openai.protocol import Number
from nanovllm.server.strict import AnyObject, Each, Strict, text_alone

STATELESS = "nothing is stored; send the whole conversation as input"


class InputText(Strict):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None  # of an earlier answer
    logprobs: list[Any] | None = None


class MessageItem(Strict):
    """A message; `type` may be left out."""

    refused: ClassVar = {"phase": ((None, "commentary", "final_answer"), "chat templates have no phases")}

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Each[Annotated[InputText, text_alone("input_text")]]
    id: str | None = None
    status: str | None = None


class FunctionCallItem(Strict):
    refused: ClassVar = {
        "namespace": ((None,), "tools have no namespaces"),
        "async": ((None, False), "calls are answered in order"),
        "caller": ((None, {"type": "direct"}), "tools are called by the model alone"),
    }

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class FunctionOutputItem(Strict):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Each[Annotated[InputText, text_alone("input_text")]]
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


Item = Annotated[MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem, Field(discriminator="type")]


class FunctionTool(Strict):
    refused: ClassVar = {
        "defer_loading": ((None, False), "every tool is shown to the model"),
        "allowed_callers": ((None, ["direct"]), "tools are called by the model alone"),
        "async": ((None, False), "calls are answered in order"),
        "output_schema": ((None,), "chat templates have no place for it"),
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
    refused: ClassVar = {"verbosity": ((None, "medium"), "no chat template supports it")}

    format: Annotated[TextFormat | SchemaFormat, Field(discriminator="type")] | None = None


class Reasoning(Strict):
    """`summary` has no effect: the answer always has the thought, as reasoning_text."""

    refused: ClassVar = {
        "context": ((None, "auto"), "the chat template decides which thought it shows"),
        "mode": ((None, "standard"), "there is one"),
    }

    effort: Literal[EFFORTS] | None = None  # type: ignore[valid-type]
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(Strict):
    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(Strict):
    """Body of /v1/responses. Tools other than functions are left out; a header of the answer names their types."""

    refused: ClassVar = {
        "conversation": ((None,), STATELESS),
        "background": ((None, False), STATELESS),
        "prompt": ((None,), "there are no stored prompts"),
        "max_tool_calls": ((None,), "tools are called by the client"),
        "service_tier": ((None, "auto", "default"), "there is one"),
        "top_logprobs": ((None, 0), "use /v1/chat/completions"),
        "prompt_cache_retention": ((None, "in_memory", "in-memory"), "a prefix is kept as long as there is room"),
        "prompt_cache_options": ((None, {}), "every prompt's prefix is cached"),
        "context_management": ((None, []), "a conversation is taken as it is"),
        "moderation": ((None,), "there is none"),
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
    # Accepted, and without effect.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    client_metadata: AnyObject | None = None

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
            if name != "reasoning.encrypted_content":
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
