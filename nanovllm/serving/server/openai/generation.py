"""Generation of an answer, whole or streamed in chunks: the common part of the generating endpoints.

Choice i * n + j of an answer is sample j of prompt i.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from fastapi import Request
from starlette.responses import Response

from nanovllm.features.intake.headless import check_head
from nanovllm.outputs import CompletionOutput, ErrorKind, OutputKind, RequestOutput
from nanovllm.serving.server import errors
from nanovllm.serving.server.body_limits import BodyLimits
from nanovllm.serving.server.openai.protocol import SamplingFields
from nanovllm.serving.server.sse import (
    CLIENT_GONE,
    COMMENT,
    DONE,
    EVENTS,
    ClientGone,
    compact,
    data_error,
    event,
    until_disconnect,
)
from nanovllm.serving.server.state import ServerState
from nanovllm.serving.server.strict import Strict
from nanovllm.serving.streaming.streams import OutputStream

logger = logging.getLogger("nanovllm")

ANY_TEXT = "\0text\0"  # text that no event holds: JSON escapes a null character
quoted = json.encoder.encode_basestring_ascii  # same escapes as `compact`

Body = TypeVar("Body", bound=Strict)


class Job(Protocol):
    """A request of one endpoint: submits its prompts and formats their outputs."""

    @property
    def body(self) -> SamplingFields: ...

    @property
    def id(self) -> str:
        """Id of the answer."""

    @property
    def model(self) -> str:
        """Name of the model or adapter that answers."""

    @property
    def request_ids(self) -> Sequence[str]:
        """Request ids of the prompts in the engine and its log; they start with the answer's id."""

    async def start(self, kind: OutputKind) -> OutputStream:
        """Queue all prompts together; raises if one is invalid or the queue lacks room for all."""

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Tokens of thought in the answer, for its usage; None if the model has no such format."""

    def read(self, output: RequestOutput) -> None:
        """Process an output before it is counted and sent; may remove parts."""


class ChoicesJob(Job, Protocol):
    """Job with a list of choices as its answer; `object` and `chunk_object` are fields of an answer and a chunk."""

    @property
    def object(self) -> str: ...

    @property
    def chunk_object(self) -> str: ...

    def opening(self, choice: int, output: RequestOutput) -> dict[str, Any] | None:
        """Format the first chunk of a choice, before its text; None for no such chunk."""

    def delta(self, choice: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any] | str | None:
        """Format the delta of a choice; its text if it is nothing else, None if it is empty."""

    def text_delta(self, choice: int, text: str) -> dict[str, Any]:
        """Format a delta that is nothing but text."""

    def whole(self, choice: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        """Format a choice of an answer that is not streamed."""

    async def encoded_fields(self) -> str:
        """Encode further fields of an answer that is not streamed, too large for the event loop; "" for none."""


AnyJob = TypeVar("AnyJob", bound=Job)


@dataclass(frozen=True, slots=True)
class AnswerForm(Generic[AnyJob]):
    """Answer formats of a protocol.

    whole: makes the answer; raises ApiError.
    events: yields the encoded events of a stream, see `EventStream`; raises ApiError.
    error_event: encodes an error in mid-stream.
    encoded_fields: see `ChoicesJob`.
    media_type: content type of a stream.
    comment: encoder of an event without content.
    """

    whole: Callable[[ServerState, AnyJob], Coroutine[Any, Any, dict[str, Any]]]
    events: Callable[[ServerState, AnyJob], AsyncGenerator[bytes, None]]
    error_event: Callable[[errors.ApiError], bytes]
    encoded_fields: Callable[[AnyJob], Coroutine[Any, Any, str]] | None = None
    media_type: str = EVENTS
    comment: Callable[[AnyJob], bytes] = lambda job: COMMENT


class Tally:
    """Counts of one answer: tokens for its usage, and finished prompts for the metrics.

    Args:
        request_ids: request ids of the prompts.

    num_generated: tokens so far.
    """

    def __init__(self, request_ids: Sequence[str], state: ServerState) -> None:
        self._numbers = {request_id: number for number, request_id in enumerate(request_ids)}
        self._watch = state.metrics.watch(len(request_ids))
        self._in_flight = state.in_flight
        self._in_flight.add(request_ids)
        self.is_queued = False
        self._prompts: dict[int, tuple[int, int]] = {}  # (prompt tokens, cached tokens) by index of the prompt
        self.num_generated = 0

    def record_queued(self) -> None:
        """Record that the engine accepted all prompts."""
        self.is_queued = self._watch.is_queued = True

    def record(self, output: RequestOutput) -> int:
        """Record an output; returns the index of its prompt."""
        number = self._numbers[output.request_id]
        self._watch.record(number, output)
        return number

    def count(self, number: int, output: RequestOutput) -> None:
        """Add an output's tokens to the usage."""
        self._prompts[number] = len(output.prompt_token_ids), output.num_cached_tokens
        for completion in output.outputs:
            self.num_generated += len(completion.token_ids)

    def end(self, *, is_left: bool) -> None:
        self._watch.end(is_left=is_left)
        if not self.is_queued:
            self._in_flight.forget(list(self._numbers))

    def usage(self, num_reasoning: int | None = None) -> dict[str, Any]:
        """The usage so far.

        Args:
            num_reasoning: number of thought tokens among the generated ones; None omits this detail.
        """
        num_prompt = sum(num for num, _ in self._prompts.values())
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": self.num_generated,
            "total_tokens": num_prompt + self.num_generated,
            "prompt_tokens_details": {"cached_tokens": sum(num for _, num in self._prompts.values())},
        }
        if num_reasoning is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
        return usage


def finish_reasons(completion: CompletionOutput) -> tuple[str | None, int | str | None]:
    """Return OpenAI's finish_reason, and stop_reason: the stop string or token, or "timeout"."""
    if completion.finish_reason == "timeout":
        return "length", "timeout"
    return completion.finish_reason, completion.stop_reason


def prompt_ids(body: SamplingFields, output: RequestOutput) -> dict[str, Any]:
    """Return `prompt_token_ids` for a choice with return_token_ids, else no field."""
    return {"prompt_token_ids": output.prompt_token_ids} if body.return_token_ids else {}


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def error_from_output(output: RequestOutput) -> errors.ApiError | None:
    """Return the error of an output that ends its answer: the request failed, or the engine closes; else None."""
    for completion in output.outputs:
        if completion.finish_reason == "error" and output.error_kind is ErrorKind.REQUEST:
            return errors.ApiError(400, f"{output.error}.")
        if completion.finish_reason == "error":
            logger.error("request %s: %s", output.request_id, output.error)
            return errors.request_failed(output.request_id)
        if completion.finish_reason == "abort":
            return errors.shutting_down()
    return None


async def respond(
    request: Request,
    state: ServerState,
    make_job: Callable[[ServerState, Request, Body], AnyJob],
    body: Body,
    form: AnswerForm[AnyJob],
) -> Response:
    """Answer a request; raises ApiError if it fails before the response starts."""
    limits: BodyLimits = request.app.state.body_limits
    try:
        check_head(state.engine.limits)
        job = await limits.off_loop(request, partial(make_job, state, request, body))
    except (TypeError, ValueError) as error:
        raise errors.from_engine(error, body.names()) from error
    if state.settings.log_prompts:
        logger.info("%s: %s", request.url.path, compact(body.model_dump(exclude_none=True)))
    try:
        if job.body.stream:
            comment = partial(form.comment, job)
            return state.event_stream(
                form.events(state, job), form.error_event, media_type=form.media_type, comment=comment
            )
        answer = await until_disconnect(request.receive, form.whole(state, job))
        encoded = compact(answer)  # ASCII only, since text may hold a lone surrogate
        if form.encoded_fields is not None and (fields := await form.encoded_fields(job)):
            encoded = f"{encoded[:-1]},{fields}}}"
        return Response(encoded, media_type="application/json")
    except ClientGone:
        return Response(status_code=CLIENT_GONE)


def _head(job: ChoicesJob, name: str) -> dict[str, Any]:
    return {
        "id": job.id,
        "object": name,
        "created": int(time.time()),
        "model": job.model,
    }


@asynccontextmanager
async def queued(state: ServerState, job: Job, kind: OutputKind) -> AsyncIterator[tuple[OutputStream, Tally]]:
    """Queue the prompts and yield their outputs; converts all exceptions to ApiError."""
    tally = Tally(job.request_ids, state)
    is_left = False
    try:
        async with aclosing(await job.start(kind)) as outputs:
            tally.record_queued()
            yield outputs, tally
    except errors.ApiError:
        raise
    except (asyncio.CancelledError, GeneratorExit):
        is_left = True
        raise
    except Exception as error:
        raise state.admission.api_error(error, job.body.names()) from error
    finally:
        tally.end(is_left=is_left)
        if tally.is_queued:
            state.admission.retry_after.record_ended(len(job.request_ids) * (job.body.n or 1))


def choices_of(job: Job, output: RequestOutput, tally: Tally) -> list[tuple[int, CompletionOutput]]:
    """Count an output and return its completions by choice; raises ApiError for one that ends the answer."""
    number = tally.record(output)
    if (error := error_from_output(output)) is not None:
        raise error
    job.read(output)
    tally.count(number, output)
    num_samples = job.body.n or 1
    if len(output.outputs) == 1:  # nearly every token passes here
        completion = output.outputs[0]
        return [(number * num_samples + completion.index, completion)]
    return [(number * num_samples + completion.index, completion) for completion in output.outputs]


async def _whole(state: ServerState, job: ChoicesJob) -> dict[str, Any]:
    choices = {}
    with state.admission.open_answer():
        async with queued(state, job, OutputKind.FINAL) as (outputs, tally):
            async for output in outputs:
                for choice, completion in choices_of(job, output, tally):
                    choices[choice] = job.whole(choice, output, completion)
    ordered = [choices[choice] for choice in sorted(choices)]
    return _head(job, job.object) | {"choices": ordered, "usage": tally.usage(job.num_reasoning_tokens)}


async def _chunks(state: ServerState, job: ChoicesJob) -> AsyncGenerator[bytes, None]:
    """Yield the events of a streamed answer, see `EventStream`; raises ApiError."""
    options = job.body.stream_options
    with_usage = options is not None and options.include_usage
    each = options is not None and options.continuous_usage_stats
    head = compact(_head(job, job.chunk_object))[:-1] + ',"choices":'

    def chunk(choices: list[dict[str, Any]], *, is_last: bool = False) -> bytes:
        shown = ',"usage":null' if with_usage else ""
        if is_last or each:  # thought is counted once, at the end
            shown = f',"usage":{compact(tally.usage(job.num_reasoning_tokens if is_last else None))}'
        return event(f"{head}{compact(choices)}{shown}}}")

    frames: dict[int, tuple[bytes, bytes]] = {}  # bytes before and after the text in a choice's events

    def text_chunk(choice: int, text: str) -> bytes:
        if each:
            return chunk([job.text_delta(choice, text)])
        if choice not in frames:
            before, _, after = chunk([job.text_delta(choice, ANY_TEXT)]).partition(quoted(ANY_TEXT).encode())
            frames[choice] = before, after
        before, after = frames[choice]
        return before + quoted(text).encode() + after

    opened: set[int] = set()
    ended: set[int] = set()  # choices that have ended; outputs repeat them until the whole prompt ends
    with state.admission.open_answer():
        async with queued(state, job, OutputKind.DELTA) as (outputs, tally):
            yield b""  # marks the request as admitted
            async for output in outputs:
                for choice, completion in choices_of(job, output, tally):
                    if choice in ended:
                        continue
                    if completion.finish_reason is not None:
                        ended.add(choice)
                    if choice not in opened:
                        opened.add(choice)
                        if (opening := job.opening(choice, output)) is not None:
                            yield chunk([opening])
                    delta = job.delta(choice, output, completion)
                    if isinstance(delta, str):
                        yield text_chunk(choice, delta)
                    elif delta is not None:
                        yield chunk([delta])
        if with_usage:
            yield chunk([], is_last=True)
        yield DONE


CHOICES: AnswerForm[Any] = AnswerForm(_whole, _chunks, data_error, lambda job: job.encoded_fields())
