"""A message request as a chat request, and a chat's answer as content blocks."""

from __future__ import annotations

import hashlib
import itertools
import json
from typing import Any

from nanovllm.outputs import CompletionOutput
from nanovllm.serving.server.anthropic import protocol
from nanovllm.serving.server.openai.messages import image_part
from nanovllm.serving.server.openai.protocol import ChatRequest

# Fields of the chat request -> fields of this request, for errors.
RENAMED = {
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
}


def renamed(body: protocol.ConversationFields) -> dict[str, str]:
    """`RENAMED` for this request: disabled `thinking` becomes a reasoning effort of none."""
    is_off = body.thinking is not None and body.thinking.type == "disabled"
    return RENAMED | {"reasoning_effort": "thinking.type"} if is_off else RENAMED


def as_chat(body: protocol.MessagesRequest) -> ChatRequest:
    """Translate a request; raises pydantic's ValidationError and ValueError if it makes no valid chat request."""
    given = conversation_fields(body) | {
        "max_tokens": body.max_tokens,
        "stream": bool(body.stream),
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": body.stop_sequences or None,
    }
    return ChatRequest.model_validate(given)


def conversation_fields(body: protocol.ConversationFields) -> dict[str, Any]:
    """Fields of a chat request that determine its prompt and constrain its answer."""
    messages = [{"role": "system", "content": _text(body.system)}] if body.system else []
    for message in body.messages:
        if isinstance(message, protocol.AssistantMessage):
            messages += _assistant(message)
        elif isinstance(message, protocol.UserMessage):
            messages += _user(message)
        else:
            messages.append({"role": "system", "content": _text(message.content)})
    given: dict[str, Any] = {"model": body.model, "messages": messages}
    if isinstance(body.messages[-1], protocol.AssistantMessage):
        if "tool_calls" in messages[-1] or not messages[-1]["content"]:
            raise ValueError("messages: the last one is the assistant's; an answer continues text alone.")
        given |= {"add_generation_prompt": False, "continue_final_message": True}
    if body.tools:
        given["tools"] = [_tool(tool) for tool in body.tools]
    if body.tool_choice is not None:
        given |= _tool_choice(body.tool_choice)
    return given | _thinking(body)


def _user(message: protocol.UserMessage) -> list[dict[str, Any]]:
    """Convert a user message; each tool result becomes a separate message, in order."""
    if isinstance(message.content, str):
        return [{"role": "user", "content": message.content}]
    messages: list[dict[str, Any]] = []
    for is_result, blocks in itertools.groupby(
        message.content, lambda block: isinstance(block, protocol.ToolResultBlock)
    ):
        if not is_result:
            messages.append({"role": "user", "content": _content(list(blocks))})
            continue
        block: Any
        for block in blocks:
            text = _text(block.content or "")
            content = f"Error: {text}" if block.is_error else text
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
    return messages or [{"role": "user", "content": ""}]


def _content(blocks: list[Any]) -> Any:
    """Content of a user message: a text, or parts where there are pictures."""
    if not any(isinstance(block, protocol.ImageBlock) for block in blocks):
        return _text(blocks)
    return [
        image_part(f"data:{block.source.media_type};base64,{block.source.data}")
        if isinstance(block, protocol.ImageBlock)
        else {"type": "text", "text": block.text}
        for block in blocks
    ]


def _assistant(message: protocol.AssistantMessage) -> list[dict[str, Any]]:
    if isinstance(message.content, str):
        return [{"role": "assistant", "content": message.content}]
    texts = [block.text for block in message.content if isinstance(block, protocol.TextBlock)]
    thoughts = [block.thinking for block in message.content if isinstance(block, protocol.ThinkingBlock)]
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": json.dumps(block.input)}}
        for block in message.content
        if isinstance(block, protocol.ToolUseBlock)
    ]
    given: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        given["reasoning_content"] = "\n".join(thoughts)
    if calls:
        given["tool_calls"] = calls
    return [given]


def _text(content: str | list[protocol.TextBlock] | list[protocol.ResultBlock] | None) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content or ())


def _tool(tool: protocol.Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(choice: protocol.ToolChoice) -> dict[str, Any]:
    named = {"type": "function", "function": {"name": choice.name}}
    given: dict[str, Any] = {
        "tool_choice": {"auto": "auto", "any": "required", "none": "none", "tool": named}[choice.type]
    }
    if choice.disable_parallel_tool_use:
        given["parallel_tool_calls"] = False
    return given


def _thinking(body: protocol.ConversationFields) -> dict[str, Any]:
    given: dict[str, Any] = {}
    config = body.output_config
    if config is not None and config.effort is not None:
        given["reasoning_effort"] = config.effort
    if config is not None and config.format is not None:
        schema = {"name": "output", "schema": config.format.schema_}
        given["response_format"] = {"type": "json_schema", "json_schema": schema}
    if body.thinking is not None and body.thinking.type == "disabled":
        given["reasoning_effort"] = "none"
    elif body.thinking is not None and body.thinking.type == "enabled":
        given["thinking_token_budget"] = body.thinking.budget_tokens
    return given


# ------------------------------------------------------------------------------------------------------------ answers


def signature(thought: str) -> str:
    """Signature of a thought for clients to send back: its digest."""
    return hashlib.sha256(thought.encode("utf-8", "surrogatepass")).hexdigest()


def tool_use(call: dict[str, Any], *, is_whole: bool = True) -> dict[str, Any]:
    """A tool call as a block; without its input if that is still to come."""
    function = call["function"]
    return {
        "type": "tool_use",
        "id": call["id"].replace("call_", "toolu_", 1),
        "name": function["name"],
        "input": json.loads(function["arguments"]) if is_whole else {},
    }


def stop_fields(completion: CompletionOutput, *, has_calls: bool) -> dict[str, Any]:
    """`stop_reason` and `stop_sequence` of an answer that ended."""
    match completion.finish_reason:
        case "stop" if isinstance(completion.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason}
        case "stop":
            return {"stop_reason": "tool_use" if has_calls else "end_turn", "stop_sequence": None}
        case _:  # max_tokens, the context, or a timeout
            return {"stop_reason": "max_tokens", "stop_sequence": None}


def usage(counted: dict[str, Any]) -> dict[str, Any]:
    """Convert OpenAI's usage to Anthropic's, with cached tokens excluded from `input_tokens`."""
    cached = counted["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counted["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counted["completion_tokens"],
    }
