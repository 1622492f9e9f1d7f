"""Request models of /v1/messages: unknown fields are refused by name, unsupported ones with a reason."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from nanovllm.server.openai.protocol import Number
from nanovllm.server.strict import AnyObject, Each, Strict, text_alone


class CacheControl(Strict):
    """Accepted, and without effect: every prompt's prefix is cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(Strict):
    cache_control: CacheControl | None = None


class TextBlock(Block):
    refused: ClassVar = {"citations": ((None, []), "there are no citations")}

    type: Literal["text"]
    text: str


class ThinkingBlock(Strict):
    """Earlier thought; the `signature` of its answer is ignored."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(Block):
    refused: ClassVar = {
        "caller": ((None, {"type": "direct"}), "tools are called by the model alone"),
        "toolset_name": ((None,), "there are no toolsets"),
    }

    type: Literal["tool_use"]
    id: str
    name: str
    input: AnyObject


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Each[Annotated[TextBlock, text_alone("text")]] | None = None
    is_error: bool | None = None


UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type"), text_alone("text")]
AssistantBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]


class UserMessage(Strict):
    role: Literal["user"]
    content: str | Each[UserBlock]


class AssistantMessage(Strict):
    role: Literal["assistant"]
    content: str | Each[AssistantBlock]


class SystemMessage(Strict):
    """Instructions within a conversation, such as Claude Code's."""

    role: Literal["system"]
    content: str | Each[Annotated[TextBlock, text_alone("text")]]


Message = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


class Tool(Block):
    refused: ClassVar = {
        "defer_loading": ((None, False), "every tool is shown to the model"),
        "allowed_callers": ((None, ["direct"]), "tools are called by the model alone"),
        "input_examples": ((None, []), "chat templates have no place for them"),
        "eager_input_streaming": ((None, False), "a call arrives whole"),
    }

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
    refused: ClassVar = {"display": ((None, "summarized"), "thought is shown as it is")}

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

    model: str
    messages: Annotated[Each[Message], Field(min_length=1)]
    system: str | Each[TextBlock] | None = None
    tools: Each[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="before")
    @classmethod
    def _name_unsupported_parts(cls, given: Any) -> Any:
        """Refuse tools that run on the server, and a conversation that begins with a system message, by name."""
        messages = given.get("messages") if isinstance(given, dict) else None
        first = messages[0] if isinstance(messages, list) and messages else None
        if isinstance(first, dict) and first.get("role") == "system":
            raise ValueError("messages[0].role: 'system' may follow a message, not begin a conversation. Use system.")
        tools = given.get("tools") if isinstance(given, dict) else None
        for number, tool in enumerate(tools if isinstance(tools, list) else ()):
            kind = tool.get("type") if isinstance(tool, dict) else None
            if kind not in (None, "custom"):
                raise ValueError(f"tools[{number}].type: {kind!r} runs on a server of tools, of which there is none.")
        return given


class MessagesRequest(ConversationFields):
    """Body of /v1/messages."""

    refused: ClassVar = {
        "container": ((None,), "code is not run here"),
        "mcp_servers": ((None, []), "there is no MCP client here"),
        "service_tier": ((None, "auto", "standard_only"), "there is one"),
        "speed": ((None, "standard"), "there is one"),
        "inference_geo": ((None,), "there is one place"),
        "diagnostics": ((None,), "there are none"),
        "user_profile_id": ((None,), "there are no profiles"),
        "workspace_id": ((None,), "there are no workspaces"),
    }

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[Each[str], Field(max_length=64)] | None = None
    stream: bool | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    metadata: AnyObject | None = None
    context_management: AnyObject | None = None

    @field_validator("context_management")
    @classmethod
    def _check_edits(cls, given: dict[str, Any] | None) -> dict[str, Any] | None:
        """Accept the removal of earlier thought, which chat templates do anyway."""
        edits = (given or {}).get("edits") or []
        if not isinstance(edits, list):
            raise ValueError(f"edits must be a list, not {edits!r}.")
        for edit in edits:
            kind = edit.get("type") if isinstance(edit, dict) else edit
            if not str(kind).startswith("clear_thinking"):
                raise ValueError(f"the edit {kind!r} is not supported: a conversation is taken as it is.")
        return given


class CountTokensRequest(ConversationFields):
    """Body of /v1/messages/count_tokens."""

    refused: ClassVar = {
        "speed": ((None, "standard"), "there is one"),
        "user_profile_id": ((None,), "there are no profiles"),
        "workspace_id": ((None,), "there are no workspaces"),
    }
