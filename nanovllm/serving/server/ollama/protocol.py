"""Request models of Ollama's API: unknown fields are refused by name, unsupported ones with a reason."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from nanovllm.serving.server.hints import OLLAMA
from nanovllm.serving.server.openai.protocol import Number
from nanovllm.serving.server.strict import AnyObject, Each, Strict

NO_IMAGES = "the engine draws no images"
Think = bool | Literal["low", "medium", "high", "max"]


class Options(Strict):
    """`options` of a request."""

    hints: ClassVar = OLLAMA["options"]

    num_predict: int | None = None
    num_ctx: Annotated[int, Field(ge=1)] | None = None
    temperature: Number | None = None
    top_k: int | None = None
    top_p: Number | None = None
    min_p: Number | None = None
    seed: int | None = None
    stop: str | Annotated[Each[str], Field(max_length=64)] | None = None
    repeat_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None

    @model_validator(mode="before")
    @classmethod
    def _take_no_window(cls, given: Any) -> Any:
        """Drop the penalties if repeat_last_n is 0, since they then count no token."""
        if not isinstance(given, dict) or given.get("repeat_last_n") != 0:
            return given
        off = ("repeat_last_n", "repeat_penalty", "presence_penalty", "frequency_penalty")
        return {name: value for name, value in given.items() if name not in off}


class GeneratingFields(Strict):
    """Fields of /api/chat and /api/generate."""

    hints: ClassVar = OLLAMA[""]

    model: str
    stream: bool | None = None  # None: true
    options: Options | None = None
    format: AnyObject | Literal["", "json"] | None = None
    open_objects: bool | None = None  # this server's own: objects of a format take any property
    think: Think | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None

    @property
    def num_ctx(self) -> int | None:
        return None if self.options is None else self.options.num_ctx


class FunctionCall(Strict):
    name: str
    arguments: AnyObject
    index: int | None = None
    description: str | None = None


class ToolCall(Strict):
    function: FunctionCall
    id: str | None = None
    index: int | None = None  # Open WebUI sends it here instead of in `function`; calls are matched by their order
    type: Literal["function"] | None = None


class Message(Strict):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Each[str] | None = None  # base64
    tool_calls: Each[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    name: str | None = None


class ChatBody(GeneratingFields):
    """Body of /api/chat. Without messages it asks whether the model is loaded."""

    messages: Each[Message] | None = None
    tools: Each[AnyObject] | None = None


class GenerateBody(GeneratingFields):
    """Body of /api/generate. Without a prompt it asks whether the model is loaded."""

    refused: ClassVar = {
        "template": (("",), "the model's own template is used; send raw with the whole prompt"),
        "context": (([],), "send the conversation to /api/chat; its prefix is cached"),
        "width": ((0,), NO_IMAGES),
        "height": ((0,), NO_IMAGES),
        "steps": ((0,), NO_IMAGES),
    }

    prompt: str | None = None
    images: Each[str] | None = None  # base64
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None

    @model_validator(mode="after")
    def _check_together(self) -> GenerateBody:
        given = [other for other in ("system", "think", "images") if getattr(self, other)]
        for name in ("suffix", "raw"):
            if getattr(self, name) and given:
                other = given[0]
                raise ValueError(f"{other} is given with {name}, which has no chat template. Leave one out.")
        return self


class EmbedBody(Strict):
    """Body of /api/embed."""

    hints: ClassVar = OLLAMA[""]

    model: str
    input: str | Each[str] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    options: Options | None = None


class EmbeddingsBody(Strict):
    """Body of /api/embeddings, the older form for one prompt."""

    hints: ClassVar = OLLAMA[""]

    model: str
    prompt: str | None = None
    options: Options | None = None


class ShowBody(Strict):
    """Body of /api/show; `name` is the older word for `model`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None
    system: str | None = None
    template: str | None = None
    options: Any = None
