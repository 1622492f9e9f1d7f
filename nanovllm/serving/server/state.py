"""State of one server, shared by its endpoints, and the limits that they check."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import Request

from nanovllm.features.infill.infill import Infill
from nanovllm.features.option_checks import texts
from nanovllm.models.default_model import DEFAULT_MODEL
from nanovllm.models.source import is_gguf
from nanovllm.serving.async_llm import AsyncLLM
from nanovllm.serving.server.answers.answer_format import AnswerFormat
from nanovllm.serving.server.errors import TOO_LONG, ApiError
from nanovllm.serving.server.lifecycle import Admission
from nanovllm.serving.server.metrics import ServerMetrics
from nanovllm.serving.server.request_facts import InFlight
from nanovllm.serving.server.settings import ServerSettings
from nanovllm.serving.server.sse import EventStream, data_error
from nanovllm.serving.server.token_text import TokenText

CHARS_PER_TOKEN = 32  # more than the average of text in any language


@dataclass(frozen=True, slots=True)
class ServerState:
    """The parts of a server."""

    engine: AsyncLLM
    settings: ServerSettings
    model_name: str
    admission: Admission
    metrics: ServerMetrics
    in_flight: InFlight
    token_text: TokenText
    answer_format: AnswerFormat
    template_variables: frozenset[str] | None  # None: not known
    infill: Infill | None  # None: the tokenizer has no markers
    loading_turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # one adapter or model is read at a time

    @property
    def max_prompt_chars(self) -> int:
        return self.settings.max_prompt_chars or CHARS_PER_TOKEN * self.engine.config.max_model_len

    @property
    def max_samples(self) -> int:
        """Maximum number of samples of a request: the setting, at most the capacity of engine and queue."""
        limit = self.admission.max_unfinished
        return self.settings.max_samples if limit is None else min(self.settings.max_samples, limit)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names of the model in requests, the one in answers first."""
        return self.settings.served_model_name or (self.model_name,)

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that requests may give as `model`: those of the model, then those of its adapters."""
        return (*self.model_names, *self.engine.adapters)

    @property
    def capabilities(self) -> list[str]:
        """Abilities of the model, in Ollama's words; without a head it embeds alone."""
        given = {
            "completion": True,
            "tools": self.answer_format.tools is not None,
            "thinking": self.answer_format.reasoning is not None,
            "insert": self.infill is not None,
        }
        return [name for name, has_it in given.items() if has_it and self.engine.limits.has_head] + ["embedding"]

    def resolve(self, name: str | None) -> str:
        """Return the name in answers: the adapter's that `name` asks for, else the model's; raises ApiError (404)."""
        if name is None or name in self.model_names:
            return self.model_name
        untagged = name.removesuffix(":latest")  # a tag that Ollama's clients add
        adapters = self.engine.adapters
        for given in (name, untagged):
            if given in adapters:
                return given
        if self.settings.any_model_name or untagged in self.model_names:
            return self.model_name
        served = " or ".join(map(repr, self.names))
        raise ApiError(
            404, f"the model {name!r} does not exist here; {served} is served.", param="model", code="model_not_found"
        )

    def infill_for(self, field: str) -> Infill:
        """Return FIM prompts; raises ApiError (400) that begins with `field` if the tokenizer has no markers."""
        if self.infill is None:
            raise ApiError(
                400,
                f"{field}: the tokenizer of {self.model_name!r} has no tokens that mark a prefix, a suffix and the "
                "middle, so it completes prompts at their end alone. Serve a model for code, such as Qwen Coder.",
                param=field,
                code="no_infill",
            )
        return self.infill

    def check_length(self, prompt: str, param: str) -> None:
        """Raise ApiError (400) for a text above max_prompt_chars, or with a lone surrogate."""
        limit = self.max_prompt_chars
        if len(prompt) > limit:
            raise ApiError(
                400,
                f"{param} has {len(prompt)} characters, above max_prompt_chars ({limit}). "
                f"This model's maximum context length is {self.engine.config.max_model_len} tokens. Shorten it.",
                param=param,
                code=TOO_LONG,
            )
        _check_text(param, prompt)

    def check_conversation(self, *parts: Any) -> None:
        """Check the input of the chat template like `check_length`, measured as JSON."""
        _check_text("messages", parts[0])
        self.check_length(json.dumps(parts, ensure_ascii=False, default=lambda picture: ""), "messages")

    def event_stream(
        self, events: AsyncGenerator[bytes, None], error_event: Callable[[ApiError], bytes] = data_error, **form: Any
    ) -> EventStream:
        """Stream events; `form` is as of `EventStream`."""
        settings = self.settings
        return EventStream(
            events, error_event, send_timeout=settings.send_timeout, keep_alive=settings.keep_alive_interval, **form
        )


def served_name(settings: ServerSettings, model: str | os.PathLike[str] = DEFAULT_MODEL) -> str:
    """Return the model's name for clients, never its path."""
    if settings.served_model_name:
        return settings.served_model_name[0]
    path = Path(model)
    if is_gguf(path):  # not resolved: the hub's cache links each file to one named by its checksum
        return path.name.removesuffix(".gguf")
    return path.resolve().name if path.exists() else str(model)


def server_state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


def _check_text(param: str, given: Any) -> None:
    """Raise ApiError (400) for a lone surrogate in a string or nested value."""
    try:
        texts(param, given)
    except ValueError as error:
        raise ApiError(400, str(error), param=param) from error
