"""Messages between the front and an engine process, encoded by msgspec as MessagePack.

::

    front                                     engine process
    Start                    ─────────────▶   builds its engine
                             ◀─────────────   Ready, or LoadFailed
    Add, Abort, ResetCache   ─────────────▶   between two steps
    LoadAdapter, DropAdapter ─────────────▶   between two steps, before the requests that follow
                             ◀─────────────   AdapterLoaded
    Order                    ─────────────▶   weights, pauses and sleep, as LoadAdapter
                             ◀─────────────   Obeyed
    Close                    ─────────────▶   ends once prefixes and events are written
                             ◀─────────────   Report: outputs, statistics, step records
                             ◀─────────────   Refused: a request that lacks its adapter
                             ◀─────────────   Died: the engine has failed for good

A request carries its placement number and its id, so that the front can drop outputs of an earlier placement.
Times are seconds of `time.monotonic`, which all processes of a host share.
"""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import Any

from msgspec import Struct
from msgspec.msgpack import Decoder, Encoder

from nanovllm.features.engine_stats import EngineStats
from nanovllm.features.intake.preparation import compiles_form
from nanovllm.features.intake.prompts import ChatPrompt
from nanovllm.features.refusals import REPLICAS, refuse
from nanovllm.features.resume.resumption import Resumed
from nanovllm.features.sampling_params import EmbeddingParams, SamplingParams
from nanovllm.features.scoring.scores import AnswerLogits
from nanovllm.observability.step_records import StepRecord
from nanovllm.outputs import (
    CompletionOutput,
    ErrorKind,
    FinishReason,
    OutputKind,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from nanovllm.requests import InputProcessor, RequestLimits
from nanovllm.sequence import NewRequest
from nanovllm.serving.replicas.token_columns import TokenColumns
from nanovllm.serving.replicas.weight_images import SentImage

# ----------------------------------------------------------------------------------------------- to the engine process


class Start(Struct, tag=True, array_like=True):
    """Order to build an engine.

    setup: options, pickled, see `opening`; they never leave the host.
    sends_records, sends_block_events: True if reports include them.
    """

    setup: bytes
    sends_records: bool
    sends_block_events: bool


class SentRequest(Struct, array_like=True):
    """A `NewRequest` without its text.

    params: sampling options that differ from the default.
    answer_ids: token ids of `AnswerLogits`, the only logits processor that can be sent.
    """

    placement: int
    request_id: str
    prompt_token_ids: list[int]
    params: dict[str, Any]
    bad_words: tuple[tuple[int, ...], ...]
    priority: int
    cache_salt: str
    timeout: float | None
    arrival_time: float
    output_kind: OutputKind
    resumed: Resumed | None
    embeds: bool = False
    answer_ids: tuple[int, int] | None = None
    client: str = ""
    end_token_ids: tuple[int, ...] = ()
    media: bytes | None = None  # pictures

    @classmethod
    def from_new(cls, new: NewRequest, placement: int, resumed: Resumed | None) -> SentRequest:
        """Convert a request; for cumulative outputs it asks for deltas, which the front joins."""
        is_final = new.output_kind is OutputKind.FINAL
        media = getattr(new.prompt_token_ids, "media", None)
        answer = AnswerLogits.find_in(new.params)
        return cls(
            placement,
            new.request_id,
            new.prompt_token_ids,
            {name: value for name, default in SENT_OPTIONS if (value := getattr(new.params, name)) != default},
            new.bad_words,
            new.priority,
            str(new.cache_salt),  # an `AdapterSalt` spells its adapter
            new.timeout,
            new.arrival_time,
            OutputKind.FINAL if is_final else OutputKind.DELTA,
            resumed,
            new.params.embeds,
            None if answer is None else answer.token_ids,
            new.client,
            getattr(new.prompt_token_ids, "end_token_ids", ()),
            None if media is None else media.sent(),
        )

    def to_new(self, input_processor: InputProcessor) -> NewRequest:
        """Convert to a request for this process's engine, and compile its structured output."""
        params = self._sampling_params()
        form = params.structured_output
        prompt = self.prompt_token_ids
        if self.end_token_ids or self.media is not None:
            media = None if self.media is None else input_processor.parts.pictures.registry.received(self.media)
            prompt = ChatPrompt(prompt, self.end_token_ids, media)
        return NewRequest(
            self.request_id,
            prompt,
            params,
            bad_words=self.bad_words,
            priority=self.priority,
            cache_salt=self.cache_salt,
            timeout=self.timeout,
            arrival_time=self.arrival_time,
            output_kind=self.output_kind,
            resumed=self.resumed,
            matcher=None if form is None else input_processor.parts.grammars.matcher(form, is_tried=True),
            client=self.client,
        )

    def compiles(self, input_processor: InputProcessor) -> bool:
        """Whether `to_new` compiles a structured output, which may take half a second."""
        return "structured_output" in self.params and compiles_form(input_processor, self._sampling_params())

    def _sampling_params(self) -> SamplingParams:
        processors = () if self.answer_ids is None else (AnswerLogits(self.answer_ids),)
        return EmbeddingParams() if self.embeds else SamplingParams(**self.params, logits_processors=processors)


def check_params(params: SamplingParams) -> None:
    """Raise ValueError for logits processors that cannot be sent, and for reports that cannot."""
    if params.logits_processors and AnswerLogits.find_in(params) is None:
        refuse("logits_processors", REPLICAS)
    if params.reports_draws:
        refuse("a report of draws", REPLICAS)


class Add(Struct, tag=True, array_like=True):
    """Requests to queue."""

    requests: list[SentRequest]


class Abort(Struct, tag=True, array_like=True):
    """Request to end without a further output, if it still has this placement."""

    request_id: str
    placement: int


class ResetCache(Struct, tag=True, array_like=True):
    """Order to drop every cached prefix."""


class LoadAdapter(Struct, tag=True, array_like=True):
    """Order to load an adapter from a folder; digest: expected digest, None for any."""

    number: int
    name: str
    path: str
    digest: str | None


class DropAdapter(Struct, tag=True, array_like=True):
    """Order to drop an adapter, which no request of the front names any more."""

    digest: str


class Order(Struct, tag=True, array_like=True):
    """Order to check or write weights, to pause or resume, to sleep at a level or to wake.

    call: check_weights, or the name of the call of `AsyncLLM`.
    """

    number: int
    call: str
    level: int = 1
    image: SentImage | None = None
    keep_kv: bool = False
    version: str | None = None


class Close(Struct, tag=True, array_like=True):
    """Order to drop all requests, close the engine, and end."""


# ---------------------------------------------------------------------------------------------- from the engine process


class Ready(Struct, tag=True, array_like=True):
    """Resolved options of the engine, and limits of its model.

    hash_seed: seed of the block hashes, see `BlockManager`.
    stats: statistics of the new engine, until its first report.
    worker_ids: process ids of its other ranks.
    """

    config: dict[str, Any]
    limits: RequestLimits
    hash_seed: str
    stats: EngineStats
    worker_ids: tuple[int, ...] = ()


class LoadFailed(Struct, tag=True, array_like=True):
    """Failure to build the engine. error: pickled exception, empty if it does not pickle."""

    error: bytes
    message: str


class SentCompletion(Struct, array_like=True):
    """A `CompletionOutput`."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    logprobs: list[TokenLogprobs] | None
    weight_versions: list[tuple[int, str | None]] | None = None

    def to_output(self) -> CompletionOutput:
        return CompletionOutput(*(getattr(self, name) for name in self.__struct_fields__))


class SentOutput(Struct, array_like=True):
    """A delta, a final output, or new tokens of a request with a final output only.

    metrics: values of `RequestMetrics`, in order.
    prompt_logprobs: None if unchanged since the last output.
    embedding: float32 numbers as bytes.
    answer_logits: logits of `AnswerLogits`.
    """

    placement: int
    request_id: str
    completions: list[SentCompletion]
    finished: bool
    num_cached_tokens: int
    metrics: tuple[Any, ...]
    error: str | None = None
    error_kind: ErrorKind | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    embedding: bytes | None = None
    answer_logits: tuple[float, float] | None = None

    @classmethod
    def from_output(cls, output: RequestOutput, placement: int, answer: AnswerLogits | None) -> SentOutput:
        completions = [
            SentCompletion(c.index, c.text, c.token_ids, c.finish_reason, c.stop_reason, c.logprobs, c.weight_versions)
            for c in output.outputs
        ]
        return cls(
            placement,
            output.request_id,
            completions,
            output.finished,
            output.num_cached_tokens,
            metric_values(output.metrics),
            output.error,
            output.error_kind,
            output.prompt_logprobs,
            None if output.embedding is None else output.embedding.tobytes(),
            None if answer is None else answer.logits,
        )


class Report(Struct, tag=True, array_like=True):
    """Events since the last report; stats are current, block_events is a batch for a `PrefixIndex`."""

    outputs: list[SentOutput]
    stats: EngineStats
    records: list[StepRecord]
    block_events: bytes
    tokens: TokenColumns | None = None


class AdapterLoaded(Struct, tag=True, array_like=True):
    """Answer to the `LoadAdapter` of this number; error: reason why nothing was loaded, or None."""

    number: int
    digest: str
    rank: int
    error: str | None = None


class Obeyed(Struct, tag=True, array_like=True):
    """Answer to the `Order` of this number.

    error: exception, pickled, or None.
    names: other names of the weights that were checked.
    """

    number: int
    error: bytes | None = None
    names: list[str] = []


class Refused(Struct, tag=True, array_like=True):
    """Request that was not queued, since its adapter is missing."""

    placement: int
    error: str


class Died(Struct, tag=True, array_like=True):
    """Last message of a failed engine."""

    message: str


ToEngine = Start | Add | Abort | ResetCache | LoadAdapter | DropAdapter | Order | Close
FromEngine = Ready | LoadFailed | Report | AdapterLoaded | Obeyed | Refused | Died

# (name, default) of each option except functions.
SENT_OPTIONS = [
    (field.name, getattr(SamplingParams(), field.name))
    for field in fields(SamplingParams)
    if field.name != "logits_processors"
]
metric_values = attrgetter(*(field.name for field in fields(RequestMetrics)))
encode = Encoder().encode
decode_to_engine = Decoder(ToEngine).decode
decode_from_engine = Decoder(FromEngine).decode
