"""Request models of /v1/messages: unknown fields are refused by name, unsupported ones with a reason."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from nanovllm.serving.server.errors import NO_THREAD, ApiError
from nanovllm.serving.server.hints import ANTHROPIC
from nanovllm.serving.server.openai.protocol import Number
from nanovllm.serving.server.strict import AnyObject, Each, Strict, lets_pass, tell_hint, text_alone


class Block(Strict):
    hints: ClassVar = ANTHROPIC["messages[].content[]"]


class TextBlock(Block):
    type: Literal["text"]
    text: str


class ImageSource(Strict):
    """A picture in the request itself; the server opens no address."""

    type: Literal["base64"]
    media_type: str
    data: str


class ImageBlock(Block):
    type: Literal["image"]
    source: ImageSource


class ThinkingBlock(Block):
    """Earlier thought."""

    type: Literal["thinking"]
    thinking: str


class OtherBlock(BaseModel):
    """A tool's work on another server, or thought that it sealed: left out of the conversation."""

    type: Literal[
        "redacted_thinking", "server_tool_use", "web_search_tool_result", "web_fetch_tool_result",
        "code_execution_tool_result", "bash_code_execution_tool_result", "text_editor_code_execution_tool_result",
        "tool_search_tool_result", "advisor_tool_result", "mcp_tool_use", "mcp_tool_result", "mcp_tool_listing",
        "fallback",
    ]  # fmt: skip

    @model_validator(mode="after")
    def _tell(self) -> OtherBlock:
        tell_hint(f"messages[].content[].type {self.type}", "another server's work is no part of the conversation")
        return self


class ToolReferenceBlock(Block):
    """A tool that a search found; every tool is shown to the model, so its name is the result."""

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def text(self) -> str:
        return self.tool_name


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: AnyObject


ResultBlock = Annotated[TextBlock | ToolReferenceBlock, Field(discriminator="type"), text_alone("text")]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Each[ResultBlock] | None = None
    is_error: bool | None = None


UserBlock = Annotated[
    TextBlock | ImageBlock | ToolResultBlock, Field(discriminator="type"), text_alone("text", "image")
]
AssistantBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | OtherBlock, Field(discriminator="type")]


class UserMessage(Strict):
    role: Literal["user"]
    content: str | Each[UserBlock]


class AssistantMessage(Strict):
    role: Literal["assistant"]
    content: str | Each[AssistantBlock]


class SystemMessage(Strict):
    """Instructions within a conversation, such as Claude Code's."""

    refused: ClassVar = {
        "clear_at": (("never",), "a conversation is taken whole"),
        "output_config": (({},), "give it for the whole conversation"),
    }

    role: Literal["system"]
    content: str | Each[Annotated[TextBlock, text_alone("text")]]


Message = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


class Tool(Strict):
    hints: ClassVar = ANTHROPIC["tools[]"]
    refused: ClassVar = {"allowed_callers": ((None, ["direct"]), "tools are called by the model alone")}

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    input_schema: AnyObject
    strict: bool | None = None


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name is for type 'tool', which needs it.")
        return self


class Thinking(Strict):
    hints: ClassVar = ANTHROPIC["thinking"]

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _check_budget(self) -> Thinking:
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise ValueError("budget_tokens is for type 'enabled', which needs it.")
        return self


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    schema_: Annotated[AnyObject, Field(alias="schema")]


class OutputConfig(Strict):
    refused: ClassVar = {"task_budget": ((None,), "limit an answer by max_tokens")}

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: SchemaFormat | None = None


class ConversationFields(Strict):
    """Fields of a message request and of its token count."""

    hints: ClassVar = ANTHROPIC[""]
    refused: ClassVar = {
        "container": ((None,), "code is not run here"),
        "mcp_servers": ((None, []), "there is no MCP client here"),
        "thread": (({"type": "create"},), "nothing is stored; send the whole conversation"),
        "compaction": ((), "a conversation is taken whole"),
    }

    model: str
    messages: Annotated[Each[Message], Field(min_length=1)]
    system: str | Each[TextBlock] | None = None
    tools: Each[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: AnyObject | None = None

    @model_validator(mode="before")
    @classmethod
    def _name_unsupported_parts(cls, given: Any) -> Any:
        """Refuse tools that run on the server, and a conversation that begins with a system message, by name."""
        messages = given.get("messages") if isinstance(given, dict) else None
        thread = given.get("thread") if isinstance(given, dict) else None
        goes_on = isinstance(thread, dict) and thread.get("type") == "continue" and "previous_message_id" in thread
        if goes_on and not lets_pass(f"{cls.__name__}.thread"):
            raise ApiError(404, "thread: nothing is stored; send the whole conversation.", code=NO_THREAD)
        first = messages[0] if isinstance(messages, list) and messages else None
        if isinstance(first, dict) and first.get("role") == "system":
            raise ValueError("messages[0].role: 'system' may follow a message, not begin a conversation. Use system.")
        tools = given.get("tools") if isinstance(given, dict) else None
        kept = []
        for number, tool in enumerate(tools if isinstance(tools, list) else ()):
            kind = tool.get("type") if isinstance(tool, dict) else None
            if kind in (None, "custom"):
                kept.append(tool)
            elif not lets_pass(f"the tool {kind}"):
                raise ValueError(f"tools[{number}].type: {kind!r} runs on a server of tools, of which there is none.")
        return given | {"tools": kept} if isinstance(tools, list) else given

    @field_validator("context_management")
    @classmethod
    def _check_edits(cls, given: dict[str, Any] | None) -> dict[str, Any] | None:
        """Accept the removal of earlier thought, which chat templates do anyway."""
        edits = (given or {}).get("edits") or []
        if not isinstance(edits, list):
            raise ValueError(f"edits must be a list, not {edits!r}.")
        for edit in edits:
            kind = edit.get("type") if isinstance(edit, dict) else edit
            if str(kind).startswith("clear_thinking"):
                tell_hint(f"the edit {kind}", "the chat template decides which earlier thought it shows")
            elif not lets_pass(f"the edit {kind}"):
                raise ValueError(f"the edit {kind!r} is not supported: a conversation is taken as it is.")
        return given


class MessagesRequest(ConversationFields):
    """Body of /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[Each[str], Field(max_length=64)] | None = None
    stream: bool | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None


class CountTokensRequest(ConversationFields):
    """Body of /v1/messages/count_tokens."""
