"""Request models of the endpoints: unknown fields are refused by name, unsupported ones with a reason.

`SamplingParams` checks the ranges of sampling options; the models check only the differences of JSON.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    create_model,
    field_validator,
    model_validator,
)

from nanovllm.config import integer, real, truth
from nanovllm.features.chat.chat import NOT_FOR_TEMPLATES
from nanovllm.features.sampling_params import CHECKS, SamplingParams
from nanovllm.sampling_params import MAX_SEED
from nanovllm.serving.async_llm import AsyncLLM
from nanovllm.serving.server.answers.template_options import EFFORTS
from nanovllm.serving.server.hints import OPENAI
from nanovllm.serving.server.openai import neutral
from nanovllm.serving.server.openai.constraints import ConstraintFields
from nanovllm.serving.server.openai.messages import ChatMessage, Tool, as_conversation
from nanovllm.serving.server.openai.tool_choice import ToolChoice, check_tool_choice
from nanovllm.serving.server.strict import AnyObject, Each, Strict

PIECE_ITEMS = 16384


def _in_pieces(given: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Check token ids in a Python function, so that other threads can run: pydantic holds the GIL for a whole list."""
    if not isinstance(given, list):
        return validate(given)
    pieces = (given[first : first + PIECE_ITEMS] for first in range(0, len(given), PIECE_ITEMS))
    if all(set(map(type, piece)) == {int} and min(piece) >= 0 for piece in pieces):
        return given
    return validate(given)  # says which one is wrong


TokenIds = Annotated[Each[Annotated[int, Field(ge=0)]], WrapValidator(_in_pieces)]
Number = Annotated[float, Field(allow_inf_nan=False)]

MAX_BIASES = 1024
_KINDS = {integer: int, real: Number, truth: bool}
_NOT_PLAIN = {"max_tokens", "seed", "logprobs", "prompt_logprobs", "prompt_logprobs_start"}
# JSON types of the numbers and booleans of `SamplingParams` that are fields under the same name.
PLAIN_OPTIONS = {
    name: _KINDS[kind]
    for name, check in CHECKS.items()
    if (kind := getattr(check, "func", check)) in _KINDS and name not in _NOT_PLAIN
}
# Lists in `SamplingParams`, where None here means not set.
_LISTS = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words", "logit_bias")


def longest_prompt(limit: int | None, engine: AsyncLLM) -> int | None:
    """Resolve truncate_prompt_tokens; -1 is vLLM's word for the longest prompt that the engine takes."""
    return engine.config.max_model_len - 1 if limit == -1 else limit


class StreamOptions(Strict):
    """include_usage: add a last chunk with the usage. continuous_usage_stats: add the usage to every chunk."""

    hints: ClassVar = OPENAI["stream_options"]

    include_usage: bool = False
    continuous_usage_stats: bool = False


_plain_fields: dict[str, Any] = {name: (kind | None, None) for name, kind in PLAIN_OPTIONS.items()}
_PlainFields: Any = create_model("_PlainFields", __base__=ConstraintFields, **_plain_fields)


class SamplingFields(_PlainFields):  # type: ignore[misc]
    """Fields of both generating endpoints; the second half extends OpenAI's API, see docs/guide/server.md."""

    hints: ClassVar = OPENAI[""]

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: Annotated[dict[str, Number], Field(max_length=MAX_BIASES)] | None = None
    stop: str | Annotated[Each[str], Field(max_length=64)] | None = None
    seed: Annotated[int, Field(ge=-1, le=MAX_SEED)] | None = None

    stop_token_ids: Annotated[TokenIds, Field(max_length=64)] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[Each[str], Field(max_length=256)] | None = None
    return_token_ids: bool = False
    priority: int = 0
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    timeout: Number | None = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _check_biases(cls, biases: Any) -> Any:
        # pydantic checks the length last, after collecting an error per invalid entry.
        if isinstance(biases, dict) and len(biases) > MAX_BIASES:
            raise ValueError(f"it has {len(biases)} entries; at most {MAX_BIASES}.")
        return biases

    @field_validator("seed")
    @classmethod
    def _check_seed(cls, seed: int | None) -> int | None:
        return None if seed == -1 else seed  # vLLM's and llama.cpp's word for none

    @model_validator(mode="after")
    def _check_stream_options(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is given, but stream is not true. Set it, or leave stream_options out.")
        return self

    def sampling_params(self, engine: AsyncLLM, **options: Any) -> SamplingParams:
        """Build the `SamplingParams`; raises their TypeError and ValueError.

        Args:
            engine: its defaults are the values of fields that the body leaves out.
        """
        defaults = engine.default_sampling_params
        names = (*PLAIN_OPTIONS, "seed", *_LISTS)
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if "truncate_prompt_tokens" in given:
            given["truncate_prompt_tokens"] = longest_prompt(given["truncate_prompt_tokens"], engine)
        return replace(defaults, **(given | options))


class CompletionRequest(SamplingFields):
    """Body of /v1/completions."""

    refused: ClassVar = neutral.COMPLETION

    prompt: str | Each[str] | TokenIds | Each[TokenIds]
    max_tokens: Annotated[int, Field(ge=0)] | None = 16
    logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _check_suffix(self) -> CompletionRequest:
        if self.suffix and self.echo:
            raise ValueError(
                "suffix is given with echo; an answer is the text between prompt and suffix. Leave one out."
            )
        return self

    @field_validator("prompt", mode="before")
    @classmethod
    def _check_prompt(cls, prompt: Any) -> Any:
        if prompt in ("", []):
            raise ValueError("it is empty; a prompt needs at least one token.")
        kinds = set(map(type, prompt)) if isinstance(prompt, list) else {type(prompt)}
        if kinds not in ({str}, {int}, {list}):
            raise ValueError("it must be a string, a list of token ids, or a list of strings or of lists of token ids.")
        return prompt

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]


class TemplateFields(Strict):
    """Fields for the chat template."""

    chat_template_kwargs: AnyObject | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_template_kwargs(cls, options: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in sorted(NOT_FOR_TEMPLATES & set(options or ())):
            raise ValueError(f"{name} is not a variable of the chat template. Leave it out.")
        return options

    @model_validator(mode="after")
    def _check_end(self) -> TemplateFields:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message continues the last message; set add_generation_prompt to false.")
        return self

    @property
    def prompt_end(self) -> dict[str, Any]:
        """Options of `apply_chat_template` for the end of the prompt."""
        options = {"add_generation_prompt": self.add_generation_prompt}
        return options | {"continue_final_message": True} if self.continue_final_message else options


class ChatRequest(TemplateFields, SamplingFields):
    """Body of /v1/chat/completions."""

    refused: ClassVar = neutral.CHAT

    messages: Annotated[Each[ChatMessage], Field(min_length=1)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    tools: Each[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal[EFFORTS] | None = None  # type: ignore[valid-type]

    thinking_token_budget: Annotated[int, Field(ge=1)] | None = None

    @field_validator("max_tokens", "max_completion_tokens")
    @classmethod
    def _check_limit(cls, limit: int | None) -> int | None:
        return None if limit == -1 else limit  # llama.cpp's word for none

    @model_validator(mode="after")
    def _check_together(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is given, but logprobs is not true. Set it, or leave top_logprobs out.")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs is given, but a stream has none. Set stream to false, or leave it out.")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ValueError("max_tokens and max_completion_tokens differ; they mean the same, so give one.")
        check_tool_choice(self.tool_choice, self.tools)
        return self

    @property
    def output_limit(self) -> int | None:
        """Maximum number of new tokens; None: up to max_model_len."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def callable_tools(self) -> list[dict[str, Any]] | None:
        """Tools for the chat template; None without any."""
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    @property
    def must_call(self) -> bool:
        """Whether the answer consists of tool calls only."""
        return self.tool_choice not in (None, "auto", "none")

    def conversation(self) -> list[dict[str, Any]]:
        """Convert the messages for the chat template."""
        return as_conversation(self.messages)


class TokenizeRequest(TemplateFields):
    """Body of /tokenize: a prompt, or messages for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Each[ChatMessage], Field(min_length=1)] | None = None
    tools: Each[Tool] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages, one of the two.")
        if self.messages is None:
            for name in ("tools", "chat_template_kwargs", "continue_final_message"):
                if getattr(self, name):
                    raise ValueError(f"{name} is given, but only messages go through the chat template. Leave it out.")
            if not self.add_generation_prompt:
                raise ValueError("add_generation_prompt is false, but only messages have one. Leave it out.")
        elif self.add_special_tokens:
            raise ValueError(
                "add_special_tokens is true, but messages get theirs from the chat template. Leave it out."
            )
        return self


class DetokenizeRequest(Strict):
    """Body of /detokenize."""

    model: str | None = None
    tokens: TokenIds
    skip_special_tokens: bool = False
