"""What the endpoints of one server share; nothing of it belongs to the process."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import Request

from nanovllm.async_llm import AsyncLLM
from nanovllm.model.default_model import DEFAULT_MODEL
from nanovllm.server.errors import TOO_LONG, ApiError
from nanovllm.server.lifecycle import Admission
from nanovllm.server.metrics import ServerMetrics
from nanovllm.server.openai.protocol import SamplingFields
from nanovllm.server.openai.token_text import TokenText
from nanovllm.server.security import require_api_key
from nanovllm.server.settings import ServerSettings, salt_of
from nanovllm.server.sse import EventStream
from nanovllm.validation import texts

CHARS_PER_TOKEN = 32  # no text of a language has so many on average


@dataclass(frozen=True, slots=True)
class ServerState:
    """A server's parts."""

    engine: AsyncLLM
    settings: ServerSettings
    model_name: str
    admission: Admission
    metrics: ServerMetrics
    token_text: TokenText
    tool_format: str  # not "auto"

    @property
    def max_prompt_chars(self) -> int:
        return self.settings.max_prompt_chars or CHARS_PER_TOKEN * self.engine.config.max_model_len

    @property
    def max_samples(self) -> int:
        """Of one request: no more than ever have room."""
        places = self.admission.num_places
        return self.settings.max_samples if places is None else min(self.settings.max_samples, places)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError (404) unless it is the model that is served; None is."""
        if name is not None and name != self.model_name:
            raise ApiError(
                404,
                f"the model {name!r} does not exist here; {self.model_name!r} is served.",
                param="model",
                code="model_not_found",
            )

    def check_length(self, prompt: str, param: str) -> None:
        """Raise ApiError (400) for a text that is too long to be worth tokenising, or that is none."""
        limit = self.max_prompt_chars
        if len(prompt) > limit:
            raise ApiError(
                400,
                f"{param} has {len(prompt)} characters, and the server takes {limit}. Shorten it.",
                param=param,
                code=TOO_LONG,
            )
        _check_text(param, prompt)

    def check_conversation(self, *parts: Any) -> None:
        """The same for all that the chat template is given: its parts count as JSON."""
        _check_text("messages", parts[0])
        self.check_length(json.dumps(parts, ensure_ascii=False), "messages")

    def check_size(self, body: SamplingFields, num_prompts: int, num_logprobs: int | None) -> None:
        """Raise ApiError (400) for more prompts, samples or log-probabilities than one request may ask for."""
        settings = self.settings
        for param, count, limit, what in (
            ("prompt", num_prompts, settings.max_prompts, "prompts"),
            ("n", num_prompts * (body.n or 1), self.max_samples, "completions"),
            ("logprobs", num_logprobs or 0, settings.max_logprobs, "log-probabilities beside a token"),
        ):
            if count > limit:
                raise ApiError(
                    400, f"{param}: {count} {what} are too many for one request; at most {limit}.", param=param
                )

    def cache_salt(self, request: Request, body: SamplingFields) -> str:
        """The client's own salt, behind its key's if keys do not share prefixes."""
        own = body.cache_salt or ""
        key = require_api_key(request)
        if key is None or not self.settings.cache_salt_per_key:
            return own
        return f"{salt_of(key)}:{own}"

    def priority(self, body: SamplingFields) -> int:
        """A request's priority; raises ApiError (400) for one that is more urgent than the server allows."""
        limit = self.settings.min_priority
        if body.priority < limit:
            raise ApiError(
                400,
                f"priority is {body.priority}; this server takes {limit} and above (its option --min-priority).",
                param="priority",
            )
        return body.priority

    def timeout(self, body: SamplingFields) -> float | None:
        limits = [limit for limit in (body.timeout, self.settings.request_timeout) if limit is not None]
        return min(limits, default=None)

    def event_stream(self, events: AsyncGenerator[bytes, None]) -> EventStream:
        settings = self.settings
        return EventStream(events, send_timeout=settings.send_timeout, keep_alive=settings.keep_alive_interval)


def served_name(settings: ServerSettings, model: str | os.PathLike[str] = DEFAULT_MODEL) -> str:
    """What clients call a model: never where it lies on the disk."""
    if settings.served_model_name is not None:
        return settings.served_model_name
    return Path(model).resolve().name if Path(model).exists() else str(model)


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


def _check_text(param: str, given: Any) -> None:
    """Raise ApiError (400) for half of a surrogate pair, in a string or within what is given."""
    try:
        texts(param, given)
    except ValueError as error:
        raise ApiError(400, str(error), param=param) from error
