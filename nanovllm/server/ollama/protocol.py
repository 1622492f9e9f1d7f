"""Request models of Ollama's API: unknown fields are refused by name, unsupported ones with a reason."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from nanovllm.server.openai import neutral
from nanovllm.server.openai.protocol import Number
from nanovllm.server.strict import AnyObject, Each, Refused, Strict

NO_IMAGES = "the engine reads text alone, and no images"
# Options of loading a model, which a running server has done: without effect on an answer.
LOADING = (
    "numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "use_mmap", "use_mlock",
    "num_thread", "num_keep", "penalize_newline",
)  # fmt: skip
_SAMPLER = ("typical_p", "tfs_z", "mirostat", "mirostat_tau", "mirostat_eta")
Think = bool | Literal["low", "medium", "high", "max"]
KeepAlive = str | Number


class Options(Strict):
    """`options` of a request."""

    refused: ClassVar[Refused] = {name: neutral.SHARED[name] for name in _SAMPLER} | {
        "vocab_only": ((False,), "the model is loaded whole"),
        "embedding_only": ((False,), "the model is loaded whole"),
        **{name: (neutral.Anything(bool, int), "it must be a number or a boolean") for name in LOADING},
    }

    num_predict: int | None = None
    num_ctx: Annotated[int, Field(ge=1)] | None = None
    temperature: Number | None = None
    top_k: int | None = None
    top_p: Number | None = None
    min_p: Number | None = None
    seed: int | None = None
    stop: str | Annotated[Each[str], Field(max_length=64)] | None = None
    repeat_penalty: Number | None = None
    repeat_last_n: int | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None

    @model_validator(mode="after")
    def _check_window(self) -> Options:
        penalties = (self.repeat_penalty or 1, self.presence_penalty or 0, self.frequency_penalty or 0)
        if self.repeat_last_n not in (None, -1) and penalties != (1, 0, 0):
            raise ValueError(
                f"repeat_last_n is {self.repeat_last_n}, but penalties count every token. Send -1, or no penalty."
            )
        return self


class GeneratingFields(Strict):
    """Fields of /api/chat and /api/generate."""

    model: str
    stream: bool | None = None  # None: true
    options: Options | None = None
    format: AnyObject | Literal["", "json"] | None = None
    think: Think | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    keep_alive: KeepAlive | None = None  # without effect: a server keeps its one model

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
    index: int | None = None  # in Open WebUI here, not in the function; their order tells
    type: Literal["function"] | None = None


class Message(Strict):
    refused: ClassVar = {"images": (([],), NO_IMAGES)}

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Each[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    name: str | None = None


class ChatBody(GeneratingFields):
    """Body of /api/chat. Without messages it asks whether the model is loaded."""

    refused: ClassVar = {
        "truncate": ((False,), "a conversation is taken as it is"),
        "shift": ((False,), "an answer ends where the context does"),
    }

    messages: Each[Message] | None = None
    tools: Each[AnyObject] | None = None


class GenerateBody(GeneratingFields):
    """Body of /api/generate. Without a prompt it asks whether the model is loaded."""

    refused: ClassVar = ChatBody.refused | {
        "images": (([],), NO_IMAGES),
        "template": (("",), "the model's own template is used; send raw with the whole prompt"),
        "context": (([],), "send the conversation to /api/chat; its prefix is cached"),
        "width": ((0,), NO_IMAGES),
        "height": ((0,), NO_IMAGES),
        "steps": ((0,), NO_IMAGES),
    }

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None

    @model_validator(mode="after")
    def _check_together(self) -> GenerateBody:
        for name in ("suffix", "raw"):
            if getattr(self, name) and (self.system or self.think):
                other = "system" if self.system else "think"
                raise ValueError(f"{other} is given with {name}, which has no chat template. Leave one out.")
        return self


class EmbedBody(Strict):
    """Body of /api/embed. truncate has no effect: an input that is too long is refused."""

    model: str
    input: str | Each[str]
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    options: Options | None = None
    keep_alive: KeepAlive | None = None


class EmbeddingsBody(Strict):
    """Body of /api/embeddings, the older form for one prompt."""

    model: str
    prompt: str
    options: Options | None = None
    keep_alive: KeepAlive | None = None


class ShowBody(Strict):
    """Body of /api/show; `name` is the older word for `model`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None
    system: str | None = None
    template: str | None = None
    options: Any = None
