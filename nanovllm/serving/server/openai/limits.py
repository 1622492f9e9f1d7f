"""Checks of a generating request against the server's limits, and its options for the engine."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from nanovllm.serving.server.errors import ApiError
from nanovllm.serving.server.openai.protocol import SamplingFields
from nanovllm.serving.server.security import client_of, key_of
from nanovllm.serving.server.settings import request_salt
from nanovllm.serving.server.state import ServerState


def check_size(
    state: ServerState, body: SamplingFields, num_prompts: int, num_logprobs: int | None, field: str = "logprobs"
) -> None:
    """Raise ApiError (400) for more prompts, samples or log-probabilities than the server's limits.

    Args:
        field: field of the request with the number of log-probabilities.
    """
    settings = state.settings
    for param, count, limit, what in (
        ("prompt", num_prompts, settings.max_prompts, "prompts"),
        ("n", num_prompts * (body.n or 1), state.max_samples, "completions"),
        (field, num_logprobs or 0, settings.max_logprobs, "log-probabilities beside a token"),
    ):
        if count > limit:
            raise ApiError(400, f"{param}: {count} {what} are too many for one request; at most {limit}.", param=param)


def engine_options(state: ServerState, request: Request, body: SamplingFields, model: str) -> dict[str, Any]:
    """Return priority, cache_salt, timeout, client and adapter of a request.

    Args:
        model: name from `ServerState.resolve`.

    Raises ApiError (400) below min_priority.
    """
    limit = state.settings.min_priority
    if body.priority < limit:
        raise ApiError(
            400, f"priority is {body.priority}; the server takes at least {limit} (--min-priority).", param="priority"
        )
    timeouts = [timeout for timeout in (body.timeout, state.settings.request_timeout) if timeout is not None]
    key = key_of(request)
    return {
        "priority": body.priority,
        "cache_salt": request_salt(state.settings, key, body.cache_salt or ""),
        "timeout": min(timeouts, default=None),
        "client": client_of(request, state.settings.client_header, key),
    } | ({} if model == state.model_name else {"adapter": model})
