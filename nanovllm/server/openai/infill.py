"""/infill: llama.cpp's endpoint for code completion, the middle between a prefix and a suffix."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Depends, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from nanovllm.core.outputs import CompletionOutput, OutputKind, RequestOutput
from nanovllm.server.body_limits import LimitedRoute
from nanovllm.server.errors import ANSWERS
from nanovllm.server.openai import neutral
from nanovllm.server.openai.forms import named_by, output_form
from nanovllm.server.openai.generation import AnswerForm, choices_of, new_id, queued, respond
from nanovllm.server.openai.limits import check_size, engine_options
from nanovllm.server.openai.protocol import SamplingFields
from nanovllm.server.security import require_api_key
from nanovllm.server.sse import compact, data_error, event
from nanovllm.server.state import ServerState, server_state
from nanovllm.server.strict import Each, Refused, Strict
from nanovllm.streaming.streams import OutputStream

router = APIRouter(dependencies=[Depends(require_api_key)], route_class=LimitedRoute)
MAX_FILES = 256
HINTS = ("samplers", "n_indent", "t_max_prompt_ms", "t_max_predict_ms", "response_fields", "id_slot")


class OtherFile(Strict):
    """A file for the model to read."""

    filename: str = ""
    text: str
    time: float | None = None  # of its change; the order is the client's


class InfillRequest(SamplingFields):
    """Body of /infill; the last fields are hints of editors, which an answer may disregard."""

    refused: ClassVar[Refused] = {name: row for name, row in neutral.SHARED.items() if name not in HINTS}

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[Each[OtherFile], Field(max_length=MAX_FILES)] | None = None
    prompt: str = ""
    n_predict: Annotated[int, Field(ge=-1)] = -1

    samplers: Annotated[Each[str], Field(max_length=64)] | None = None
    n_indent: int | None = None
    t_max_prompt_ms: int | None = None
    t_max_predict_ms: int | None = None
    response_fields: Annotated[Each[str], Field(max_length=64)] | None = None
    id_slot: int | None = None

    @model_validator(mode="after")
    def _check_n(self) -> InfillRequest:
        if self.n not in (None, 1):
            raise ValueError(f"n is {self.n}; there is one middle. Leave it out.")
        return self


class InfillJob:
    """A request for a middle and its answer; see `generation.Job`."""

    num_reasoning_tokens = None

    def __init__(self, state: ServerState, request: Request, body: InfillRequest) -> None:
        self.body, self._state, self.id = body, state, new_id("infill")
        self.request_ids = [self.id]
        state.check_model(body.model)
        self._infill = state.infill_for("input_suffix")
        check_size(state, body, 1, None)
        files = [(given.filename, given.text) for given in body.input_extra or ()]
        self._texts = body.input_prefix, body.input_suffix, body.prompt, files
        given = "".join((body.input_prefix, body.input_suffix, body.prompt, *(part for pair in files for part in pair)))
        state.check_length(given, "input_prefix")
        self._params = body.sampling_params(
            state.engine.default_sampling_params,
            max_tokens=None if body.n_predict == -1 else max(1, body.n_predict),
            stop_token_ids=[*(body.stop_token_ids or ()), *self._infill.stop_token_ids],
            structured_output=output_form(body.shape),
        )
        self._options = engine_options(state, request, body)

    async def start(self, kind: OutputKind) -> OutputStream:
        prefix, suffix, begun, files = self._texts
        engine, shape = self._state.engine, self.body.shape
        make = partial(self._infill.prompts, [prefix], suffix, files=files, begun=begun)
        token_ids = await engine.prepare(make, self._texts)
        with named_by(None if shape is None else shape.field):
            return await engine.submit(
                token_ids, self._params, request_ids=self.request_ids, output_kind=kind, **self._options
            )

    def read(self, output: RequestOutput) -> None:
        """Drop the token of n_predict 0, with which editors warm the prefix cache."""
        if self.body.n_predict == 0:
            for completion in output.outputs:
                completion.text, completion.token_ids = "", []

    def part(self, text: str, *, is_last: bool = False) -> dict[str, Any]:
        return {"index": 0, "content": text, "stop": is_last, "model": self._state.model_name}

    def end(self, output: RequestOutput, completion: CompletionOutput, num_generated: int) -> dict[str, Any]:
        """Fields of an answer that has ended."""
        word = completion.stop_reason if isinstance(completion.stop_reason, str) else ""
        kind = "limit" if completion.finish_reason != "stop" else "word" if word else "eos"
        return {
            "stop_type": kind,
            "stopping_word": word,
            "tokens_predicted": num_generated,
            "tokens_evaluated": len(output.prompt_token_ids),
            "tokens_cached": output.num_cached_tokens,
            "truncated": False,
            "timings": _timings(output, num_generated),
        }


def _timings(output: RequestOutput, num_generated: int) -> dict[str, Any]:
    """Durations in milliseconds, under llama.cpp's names."""
    metrics = output.metrics
    begin = metrics.scheduled_time or metrics.arrival_time
    first = metrics.first_token_time or begin
    prompt_ms = 1000 * (first - begin)
    predicted_ms = 1000 * max(0.0, (metrics.finished_time or first) - first)
    num_prompt = len(output.prompt_token_ids) - output.num_cached_tokens
    return {
        "cache_n": output.num_cached_tokens,
        "prompt_n": num_prompt,
        "prompt_ms": prompt_ms,
        "prompt_per_second": 1000 * num_prompt / prompt_ms if prompt_ms else 0.0,
        "predicted_n": num_generated,
        "predicted_ms": predicted_ms,
        "predicted_per_second": 1000 * num_generated / predicted_ms if predicted_ms else 0.0,
    }


async def _whole(state: ServerState, job: InfillJob) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    with state.admission.open_answer():
        async with queued(state, job, OutputKind.FINAL) as (outputs, tally):
            async for output in outputs:
                for _, completion in choices_of(job, output, tally):
                    count = len(completion.token_ids)
                    answer = job.part(completion.text, is_last=True) | job.end(output, completion, count)
    return answer


async def _events(state: ServerState, job: InfillJob) -> AsyncGenerator[bytes, None]:
    """Yield the events of a streamed answer, see `EventStream`; raises ApiError."""
    count = 0
    with state.admission.open_answer():
        async with queued(state, job, OutputKind.DELTA) as (outputs, tally):
            yield b""  # admitted
            async for output in outputs:
                for _, completion in choices_of(job, output, tally):
                    count += len(completion.token_ids)
                    if completion.text:
                        yield event(compact(job.part(completion.text)))
                    if completion.finish_reason is not None:
                        yield event(compact(job.part("", is_last=True) | job.end(output, completion, count)))


_FORM: AnswerForm[InfillJob] = AnswerForm(_whole, _events, data_error)


@router.post("/infill", responses=ANSWERS, summary="Complete code between a prefix and a suffix, as llama.cpp does")
async def infill(body: InfillRequest, request: Request) -> Response:
    return await respond(request, server_state(request), InfillJob, body, _FORM)
