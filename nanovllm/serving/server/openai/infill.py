"""/infill: llama.cpp's endpoint for code completion, the middle between a prefix and a suffix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import Field, field_validator, model_validator
from starlette.responses import Response

from nanovllm.features.sampling_params import SamplingParams
from nanovllm.outputs import CompletionOutput, OutputKind, RequestOutput
from nanovllm.sampling_params import FILTERS
from nanovllm.serving.server.body_limits import LimitedRoute
from nanovllm.serving.server.errors import ANSWERS
from nanovllm.serving.server.openai import neutral
from nanovllm.serving.server.openai.forms import named_by, output_form
from nanovllm.serving.server.openai.generation import Tally, new_id, respond
from nanovllm.serving.server.openai.limits import check_size, engine_options
from nanovllm.serving.server.openai.middle_limits import LimitedStream, MiddleLimits
from nanovllm.serving.server.openai.protocol import Number, SamplingFields
from nanovllm.serving.server.openai.single import SingleJob, single_form
from nanovllm.serving.server.security import require_api_key
from nanovllm.serving.server.sse import compact, data_error, event
from nanovllm.serving.server.state import ServerState, server_state
from nanovllm.serving.server.strict import Each, Refused, Strict
from nanovllm.serving.streaming.streams import OutputStream

router = APIRouter(dependencies=[Depends(require_api_key)], route_class=LimitedRoute)
MAX_FILES = 256
# min_p for llama.cpp's filter `infill`, which keeps the second of two likely tokens from half of the first's share on.
INFILL_MIN_P = 0.5
FIELDS = ("samplers", "n_indent", "t_max_prompt_ms", "t_max_predict_ms", "response_fields")
SAMPLERS = (*FILTERS, "infill")
Names = Annotated[Each[str], Field(max_length=64)]


class OtherFile(Strict):
    """A file for the model to read."""

    filename: str = ""
    text: str
    time: Number | Each[Number] | None = None  # last change, in Vim a pair; unused, since clients sort the files


class InfillRequest(SamplingFields):
    """Body of /infill.

    t_max_prompt_ms: No effect, as in llama.cpp.
    """

    refused: ClassVar[Refused] = {name: row for name, row in neutral.SHARED.items() if name not in FIELDS} | {
        "n_cmpl": ((1,), "there is one middle")
    }

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[Each[OtherFile], Field(max_length=MAX_FILES)] | None = None
    prompt: str = ""
    n_predict: Annotated[int, Field(ge=-1)] = -1
    n_indent: Annotated[int, Field(ge=0)] | None = None
    t_max_predict_ms: Annotated[Number, Field(ge=-1)] | None = None
    samplers: Annotated[Each[Literal[SAMPLERS]], Field(max_length=len(SAMPLERS))] | None = None  # type: ignore[valid-type]
    response_fields: Names | None = None
    t_max_prompt_ms: Number | None = None

    @field_validator("samplers")
    @classmethod
    def _check_samplers(cls, names: list[str] | None) -> list[str] | None:
        if names and sorted(names, key=SAMPLERS.index) != names:
            raise ValueError(f"filters act in the order {', '.join(SAMPLERS)}. Name them in this order.")
        return names

    @model_validator(mode="after")
    def _check_n(self) -> InfillRequest:
        if self.n not in (None, 1):
            raise ValueError(f"n is {self.n}; there is one middle. Leave it out.")
        return self

    @property
    def limits(self) -> MiddleLimits:
        milliseconds = self.t_max_predict_ms or 0
        return MiddleLimits(milliseconds / 1000 if milliseconds > 0 else None, self.n_indent or 0)

    def filters(self, defaults: SamplingParams) -> dict[str, Any]:
        """Options of the filters; filters missing in `samplers` are off."""
        if self.samplers is None:
            return {}
        given = {name: getattr(self, name) for name in FILTERS}
        options = {name: getattr(defaults, name) if value is None else value for name, value in given.items()}
        off = {name: getattr(SamplingParams(), name) for name in FILTERS if name not in self.samplers}
        options |= off
        if "infill" in self.samplers:
            options["min_p"] = max(options["min_p"], INFILL_MIN_P)
        return options


class InfillJob(SingleJob):
    """A request for a middle and its answer."""

    body: InfillRequest

    def __init__(self, state: ServerState, request: Request, body: InfillRequest) -> None:
        super().__init__(new_id("infill"))
        self.body = body
        self._state = state
        self.model = state.resolve(body.model)
        self._infill = state.infill_for("input_suffix")
        check_size(state, body, 1, None)
        files = [(given.filename, given.text) for given in body.input_extra or ()]
        self._texts = body.input_prefix, body.input_suffix, body.prompt, files
        given = "".join((body.input_prefix, body.input_suffix, body.prompt, *(part for pair in files for part in pair)))
        state.check_length(given, "input_prefix")
        self._params = body.sampling_params(
            state.engine,
            max_tokens=None if body.n_predict == -1 else max(1, body.n_predict),
            stop_token_ids=[*(body.stop_token_ids or ()), *self._infill.stop_token_ids],
            structured_output=output_form(body, open_objects=state.settings.open_objects),
            **body.filters(state.engine.default_sampling_params),
        )
        self._options = engine_options(state, request, body, self.model)

    async def start(self, kind: OutputKind) -> OutputStream:
        prefix, suffix, begun, files = self._texts
        engine = self._state.engine
        shape = self.body.shape
        make = partial(self._infill.prompts, [prefix], suffix, files=files, begun=begun)
        token_ids = await engine.prepare(make, self._texts)
        limits = self.body.limits
        needed = OutputKind.DELTA if limits.is_set else kind
        with named_by(None if shape is None else shape.field):
            outputs = await engine.submit(
                token_ids, self._params, request_ids=self.request_ids, output_kind=needed, **self._options
            )
        return LimitedStream(outputs, limits, kind) if limits.is_set else outputs

    def read(self, output: RequestOutput) -> None:
        """Drop the token of n_predict 0, with which editors warm the prefix cache."""
        if self.body.n_predict == 0:
            for completion in output.outputs:
                completion.text = ""
                completion.token_ids = []

    def whole(self, output: RequestOutput, completion: CompletionOutput, tally: Tally) -> dict[str, Any]:
        answer = self._part(completion.text, is_last=True) | self._end(output, completion, tally)
        return selected(answer, self.body.response_fields)

    def events(self, output: RequestOutput, completion: CompletionOutput, tally: Tally) -> Iterator[bytes]:
        if completion.text:
            yield event(compact(self._part(completion.text)))
        if completion.finish_reason is not None:
            last = self._part("", is_last=True) | self._end(output, completion, tally)
            yield event(compact(selected(last, self.body.response_fields)))

    def _part(self, text: str, *, is_last: bool = False) -> dict[str, Any]:
        return {"index": 0, "content": text, "stop": is_last, "model": self.model}

    def _end(self, output: RequestOutput, completion: CompletionOutput, tally: Tally) -> dict[str, Any]:
        """Fields of an answer that has ended."""
        word = completion.stop_reason if isinstance(completion.stop_reason, str) else ""
        kind = "limit" if completion.finish_reason != "stop" else "word" if word else "eos"
        num_generated = tally.num_generated
        return {
            "stop_type": kind,
            "stopping_word": word,
            "tokens_predicted": num_generated,
            "tokens_evaluated": len(output.prompt_token_ids),
            "tokens_cached": output.num_cached_tokens,
            "truncated": False,
            "timings": _timings(output, num_generated),
        }


def selected(answer: dict[str, Any], paths: Sequence[str] | None) -> dict[str, Any]:
    """Fields of an answer by their paths, such as "timings/prompt_n"; unknown ones are left out. None or []: all."""
    found = {}
    for path in paths or ():
        value: Any = answer
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            found[path] = value
    return found if paths else answer


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
        "prompt_per_token_ms": prompt_ms / num_prompt if num_prompt else 0.0,
        "prompt_per_second": 1000 * num_prompt / prompt_ms if prompt_ms else 0.0,
        "predicted_n": num_generated,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / num_generated if num_generated else 0.0,
        "predicted_per_second": 1000 * num_generated / predicted_ms if predicted_ms else 0.0,
    }


_FORM = single_form(data_error)


@router.post("/infill", responses=ANSWERS, summary="Complete code between a prefix and a suffix, as llama.cpp does")
async def infill(body: InfillRequest, request: Request) -> Response:
    return await respond(request, server_state(request), InfillJob, body, _FORM)
