"""Requests with one answer, without OpenAI's list of choices: /infill, /v1/responses, and the APIs of others."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from nanovllm.outputs import CompletionOutput, OutputKind, RequestOutput
from nanovllm.serving.server.errors import ApiError
from nanovllm.serving.server.openai.generation import AnswerForm, Tally, choices_of, queued
from nanovllm.serving.server.openai.protocol import SamplingFields
from nanovllm.serving.server.openai.translated import translated
from nanovllm.serving.server.openai.turn import ChatTurn
from nanovllm.serving.server.state import ServerState
from nanovllm.serving.streaming.streams import OutputStream


class SingleJob:
    """A request and its answer, see `generation.Job`; subclasses set `body` and `model`, and `turn` for a chat.

    model: name of the model or adapter that answers.
    renamed, known: see `translated`, for a chat in another API's words.
    """

    body: SamplingFields
    model: str
    turn: ChatTurn | None = None
    renamed: Mapping[str, str] = {}
    known: ClassVar[Sequence[str]] = ()

    def __init__(self, request_id: str) -> None:
        self.id = request_id
        self.request_ids = [request_id]

    async def start(self, kind: OutputKind) -> OutputStream:
        assert self.turn is not None
        with translated(self.renamed, self.known):
            return await self.turn.start(kind)

    def read(self, output: RequestOutput) -> None:
        """Do nothing: every output is the client's."""

    @property
    def num_reasoning_tokens(self) -> int | None:
        return None if self.turn is None else self.turn.num_reasoning_tokens

    def whole(self, output: RequestOutput, completion: CompletionOutput, tally: Tally) -> dict[str, Any]:
        """Format an answer that is not streamed."""
        raise NotImplementedError

    def opening(self) -> Iterable[bytes]:
        """Encode the events before the first output."""
        return ()

    def events(self, output: RequestOutput, completion: CompletionOutput, tally: Tally) -> Iterable[bytes]:
        """Encode the new parts of an answer, and its end."""
        raise NotImplementedError


async def whole_answer(state: ServerState, job: SingleJob) -> dict[str, Any]:
    """Make an answer that is not streamed; raises ApiError."""
    answer: dict[str, Any] = {}
    with state.admission.open_answer():
        async with queued(state, job, OutputKind.FINAL) as (outputs, tally):
            async for output in outputs:
                for _, completion in choices_of(job, output, tally):
                    answer = job.whole(output, completion, tally)
    return answer


async def streamed_answer(state: ServerState, job: SingleJob) -> AsyncGenerator[bytes, None]:
    """Yield the events of a streamed answer, see `EventStream`; raises ApiError."""
    with state.admission.open_answer():
        async with queued(state, job, OutputKind.DELTA) as (outputs, tally):
            yield b""  # marks the request as admitted
            for encoded in job.opening():
                yield encoded
            async for output in outputs:
                for _, completion in choices_of(job, output, tally):
                    for encoded in job.events(output, completion, tally):
                        yield encoded


def single_form(error_event: Callable[[ApiError], bytes], **of_stream: Any) -> AnswerForm[Any]:
    """Formats of a single answer; arguments as of `AnswerForm`."""
    return AnswerForm(whole_answer, streamed_answer, error_event, **of_stream)
