"""An Ollama request as a chat request or a completion, and outputs in Ollama's form."""

from __future__ import annotations

import json
from collections import deque
from datetime import UTC, datetime
from typing import Any

from nanovllm.outputs import RequestOutput
from nanovllm.serving.server.errors import ApiError
from nanovllm.serving.server.ollama import protocol
from nanovllm.serving.server.openai.messages import image_part
from nanovllm.serving.server.openai.protocol import ChatRequest, CompletionRequest
from nanovllm.serving.server.state import ServerState
from nanovllm.serving.server.strict import tell_hint

# Options -> fields of a chat request or a completion.
_FIELDS = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "seed": "seed", "stop": "stop",
    "repeat_penalty": "repetition_penalty", "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty", "num_predict": "max_tokens",
}  # fmt: skip
# Fields of these requests -> fields of Ollama's, for errors.
RENAMED = {field: f"options.{option}" for option, field in _FIELDS.items()} | {
    "response_format.json_schema.schema": "format",
    "response_format": "format",
    "reasoning_effort": "think",
}
NO_LIMIT = (-1, -2)  # num_predict: to the end, or until the context is full


def tell_context(state: ServerState, body: protocol.GeneratingFields) -> None:
    """Log once that a num_ctx above the server's max_model_len is taken for that, as Ollama does."""
    limit = state.engine.config.max_model_len
    if body.num_ctx is not None and body.num_ctx > limit:
        tell_hint(f"options.num_ctx {body.num_ctx}", f"the server's context has {limit} tokens (--max-model-len)")


def check_thought(state: ServerState, body: protocol.GeneratingFields) -> None:
    """Raise ApiError (400), as Ollama does, for a think that asks a model without thought for some."""
    if body.think and state.answer_format.reasoning is None:
        raise ApiError(400, f"think: {state.model_name!r} does not support thinking. Leave it out.", param="think")


def chat_of(body: protocol.ChatBody) -> ChatRequest:
    """Translate a conversation; raises pydantic's ValidationError and ValueError if it makes no valid chat request."""
    tools = [{"type": "function"} | tool for tool in body.tools or ()]
    return ChatRequest.model_validate(
        _shared(body) | {"messages": _messages(body)} | ({"tools": tools} if tools else {})
    )


def turn_of(body: protocol.GenerateBody) -> ChatRequest:
    """Translate a prompt for the chat template; raises as `chat_of`."""
    messages = [{"role": "system", "content": body.system}] if body.system else []
    messages.append({"role": "user", "content": _content(body.prompt, body.images)})
    return ChatRequest.model_validate(_shared(body) | {"messages": messages})


def completion_of(body: protocol.GenerateBody) -> CompletionRequest:
    """Translate a raw prompt, or one with a suffix; raises as `chat_of`."""
    given = {"max_tokens": None} | _shared(body) | {"prompt": body.prompt}
    given["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    given.pop("top_logprobs", None)
    if body.suffix:
        given["suffix"] = body.suffix
    made: CompletionRequest = CompletionRequest.model_validate(given)
    return made


def _shared(body: protocol.GeneratingFields) -> dict[str, Any]:
    """Fields of a chat request that do not depend on its prompt."""
    options = {} if body.options is None else body.options.model_dump(exclude_none=True, include=set(_FIELDS))
    if options.get("num_predict") in NO_LIMIT:
        del options["num_predict"]
    given: dict[str, Any] = {_FIELDS[name]: value for name, value in options.items()}
    given |= {"model": body.model, "stream": body.stream is not False, "top_logprobs": body.top_logprobs}
    given |= {"logprobs": body.logprobs, "open_objects": body.open_objects}
    if body.format == "json":
        given["response_format"] = {"type": "json_object"}
    elif body.format:
        given["response_format"] = {"type": "json_schema", "json_schema": {"name": "format", "schema": body.format}}
    if body.think is not None:
        effort = {True: "medium", False: "none"}.get(body.think) if isinstance(body.think, bool) else body.think
        given["reasoning_effort"] = effort
    return given


def _messages(body: protocol.ChatBody) -> list[dict[str, Any]]:
    """Messages of the chat request; calls get ids, which results find by their tool's name, or by their order."""
    messages: list[dict[str, Any]] = []
    open_calls: deque[tuple[str, str]] = deque()  # (id, name) of calls without a result
    for number, message in enumerate(body.messages or ()):
        given: dict[str, Any] = {"role": message.role, "content": _content(message.content, message.images)}
        if message.role == "assistant" and message.thinking:
            given["reasoning_content"] = message.thinking
        if message.role == "assistant" and message.tool_calls:
            calls = [
                (call.id or f"call_{number}_{index}", call.function) for index, call in enumerate(message.tool_calls)
            ]
            open_calls = deque((call_id, function.name) for call_id, function in calls)
            given["tool_calls"] = [
                {"id": call_id, "function": {"name": function.name, "arguments": json.dumps(function.arguments)}}
                for call_id, function in calls
            ]
        if message.role == "tool":
            name = message.tool_name or message.name
            given["tool_call_id"] = message.tool_call_id or _take(open_calls, name) or f"call_{number}"
            if name:
                given["name"] = name
        messages.append(given)
    return messages


def _content(text: str | None, images: list[str] | None) -> Any:
    """Content of a message: its text, after its pictures if it has some."""
    if not images:
        return text or ""
    return [*(image_part(f"data:;base64,{image}") for image in images), {"type": "text", "text": text or ""}]


def _take(open_calls: deque[tuple[str, str]], name: str | None) -> str | None:
    """Take the first open call of a tool, or of any; returns its id."""
    for call in open_calls:
        if name in (None, call[1]):
            open_calls.remove(call)
            return call[0]
    return None


# ------------------------------------------------------------------------------------------------------------ answers


def now() -> str:
    """The time in ISO 8601, in UTC."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def tool_calls(calls: list[dict[str, Any]], first: int) -> list[dict[str, Any]]:
    """Calls in Ollama's form, with their arguments as objects."""
    return [
        {
            "id": call["id"],
            "function": {"index": number, "name": function["name"], "arguments": json.loads(function["arguments"])},
        }
        for number, call in enumerate(calls, first)
        for function in [call["function"]]
    ]


def durations(begin: float, end: float, output: RequestOutput, num_generated: int) -> dict[str, int]:
    """Counts of tokens, and durations in nanoseconds.

    Args:
        begin, end: seconds of `time.monotonic`, of the request and now.
    """
    metrics = output.metrics
    scheduled = metrics.scheduled_time or metrics.arrival_time
    first = metrics.first_token_time or scheduled
    return {
        "total_duration": _nanoseconds(end - begin),
        "load_duration": 0,
        "prompt_eval_count": len(output.prompt_token_ids),
        "prompt_eval_duration": _nanoseconds(first - scheduled),
        "eval_count": num_generated,
        "eval_duration": _nanoseconds((metrics.last_token_time or first) - first),
    }


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
