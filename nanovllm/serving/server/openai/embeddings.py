"""/v1/embeddings, /v1/rerank and /v1/score: last-token pooling of prompts, in the formats of OpenAI, Jina and vLLM."""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import aclosing
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
from fastapi import APIRouter, Depends, Request
from numpy.typing import NDArray
from pydantic import Field, field_validator
from starlette.responses import Response

from nanovllm.config import MAX_PRIORITY
from nanovllm.features.sampling_params import EmbeddingParams
from nanovllm.features.scoring.scores import ScoringPlan, embedding_output
from nanovllm.outputs import OutputKind, RequestOutput
from nanovllm.serving.server import errors
from nanovllm.serving.server.body_limits import LimitedRoute
from nanovllm.serving.server.errors import ANSWERS, ApiError
from nanovllm.serving.server.hints import POOLING
from nanovllm.serving.server.openai.generation import Tally, error_from_output, new_id
from nanovllm.serving.server.openai.limits import engine_options
from nanovllm.serving.server.openai.protocol import Number, TokenIds, longest_prompt
from nanovllm.serving.server.security import require_api_key
from nanovllm.serving.server.sse import CLIENT_GONE, ClientGone, compact, until_disconnect
from nanovllm.serving.server.state import ServerState, server_state
from nanovllm.serving.server.strict import Each, Strict

logger = logging.getLogger("nanovllm")
router = APIRouter(dependencies=[Depends(require_api_key)], route_class=LimitedRoute)
TIMED_OUT: dict[int | str, dict[str, Any]] = {408: {"model": errors.ErrorAnswer, "description": "timeout passed"}}
_ENCODER = msgspec.json.Encoder()  # ten times as fast as json for floats
Documents = Annotated[Each["str | DocumentText"], Field(min_length=1)]


class PoolingFields(Strict):
    """Fields of all three endpoints; the second half extends the APIs that they follow."""

    hints: ClassVar = POOLING[""]
    refused: ClassVar = {
        "add_special_tokens": ((True,), "send token ids to choose the special tokens around a prompt"),
        "truncation_side": (("left",), "truncate_prompt_tokens keeps the last tokens of a prompt"),
        "mm_processor_kwargs": (({},), "the engine reads text alone"),
        "embed_dtype": (("float32",), "embeddings are float32"),
        "endianness": (("native", "little"), "numbers are little-endian"),
    }

    model: str | None = None

    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    priority: int = 0
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    timeout: Annotated[Number, Field(gt=0)] | None = None


class EmbeddingRequest(PoolingFields):
    """Body of /v1/embeddings. dimensions: cut each embedding and normalise the rest."""

    input: str | Each[str] | TokenIds | Each[TokenIds]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    normalize: bool = True

    @field_validator("input", mode="before")
    @classmethod
    def _check_input(cls, given: Any) -> Any:
        if given in ("", []):
            raise ValueError("it is empty; an input needs at least one token.")
        kinds = set(map(type, given)) if isinstance(given, list) else {type(given)}
        if kinds not in ({str}, {int}, {list}):
            raise ValueError("it must be a string, a list of token ids, or a list of strings or of lists of token ids.")
        return given

    @property
    def prompts(self) -> list[Any]:
        return [self.input] if isinstance(self.input, str) or isinstance(self.input[0], int) else list(self.input)


class DocumentText(Strict):
    """A document as an object."""

    text: str


class ScoringFields(PoolingFields):
    """method, instruction: see `LLM.score`."""

    method: Literal["auto", "yes_no", "cosine"] = "auto"
    instruction: Annotated[str, Field(min_length=1)] | None = None


class RerankRequest(ScoringFields):
    """Body of /v1/rerank."""

    query: Annotated[str, Field(min_length=1)]
    documents: Documents
    top_n: Annotated[int, Field(ge=1)] | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = None  # Cohere's
    return_documents: bool = True


class ScoreRequest(ScoringFields):
    """Body of /v1/score: text_1 is one query for all documents of text_2, or one per document."""

    text_1: Annotated[str, Field(min_length=1)] | Annotated[Each[str], Field(min_length=1)]
    text_2: Annotated[str, Field(min_length=1)] | Annotated[Each[str], Field(min_length=1)]


class PoolingJob:
    """One request of these endpoints: queues its prompts together and waits for all of them."""

    def __init__(self, state: ServerState, request: Request, body: Any, prefix: str) -> None:
        self.id = new_id(prefix)
        self.usage: dict[str, Any] = {}
        self._state = state
        self._request = request
        self._body = body
        self.model = state.resolve(body.model)
        self._options = engine_options(state, request, body, self.model)

    @property
    def truncation(self) -> int | None:
        """Maximum number of a prompt's last tokens; None: all."""
        return longest_prompt(self._body.truncate_prompt_tokens, self._state.engine)

    def check_texts(self, param: str, texts: Sequence[Any]) -> None:
        """Raise ApiError (400) for too many texts, or a text that is too long."""
        limit = self._state.settings.max_prompts
        if len(texts) > limit:
            raise ApiError(
                400, f"{param}: {len(texts)} are too many for one request; at most {limit} (max_prompts).", param=param
            )
        for given in texts:
            if isinstance(given, str):
                self._state.check_length(given, param)

    async def beginnings(self, texts: list[str], limit: int | None) -> list[str]:
        """Cut each text to its first tokens, at most `limit` of them; None: no limit."""
        if limit is None:
            return texts
        engine = self._state.engine
        cut = []
        for text in texts:
            token_ids = await engine.tokenize(text, add_special_tokens=False)
            begun = text if len(token_ids) <= limit else await engine.detokenize(token_ids[:limit])
            cut.append(begun.rstrip("\ufffd"))  # half of a character
        return cut

    async def outputs(self, prompts: list[Any], params: Any) -> list[RequestOutput]:
        """Compute the final outputs in order of the prompts; raises ApiError if a prompt fails."""
        state = self._state
        request_ids = [f"{self.id}-{number}" for number in range(len(prompts))]
        tally = Tally(request_ids, state)
        is_left = False
        outputs = {}
        try:
            stream = await state.engine.submit(
                prompts, params, request_ids=request_ids, output_kind=OutputKind.FINAL, **self._options
            )
            tally.record_queued()
            async with aclosing(stream):
                async for output in stream:
                    number = tally.record(output)
                    _raise_failure(output)
                    tally.count(number, output)
                    outputs[number] = output
        except asyncio.CancelledError:
            is_left = True
            raise
        finally:
            tally.end(is_left=is_left)
            if tally.is_queued:
                state.admission.retry_after.record_ended(len(prompts))
        self.usage = tally.usage()
        self.usage["total_tokens"] -= self.usage.pop(
            "completion_tokens"
        )  # the yes and no of a generative score, which clients do not see
        return [outputs[number] for number in range(len(prompts))]

    async def scores(self, query: str | list[str], documents: list[str] | str) -> list[float]:
        """Compute one score per document."""
        body = self._body
        if body.instruction is not None:
            self.check_texts("instruction", [body.instruction])
        plan: ScoringPlan = await self._state.engine.plan_scores(
            query,
            documents,
            method=body.method,
            instruction=body.instruction,
            truncate_prompt_tokens=self.truncation,
        )
        scored = plan.scores(await self.outputs(plan.prompts, plan.params))
        return [0.0 if output.score is None else output.score for output in scored]

    async def answer(self, work: Coroutine[Any, Any, str]) -> Response:
        """Respond with the encoded JSON of `work`; converts exceptions to ApiError."""
        state = self._state
        if state.settings.log_prompts:
            logger.info("%s: %s", self._request.url.path, compact(self._body.model_dump(exclude_none=True)))

        async def admitted() -> str:
            try:
                with state.admission.open_answer():
                    return await work
            finally:
                work.close()  # a refused request has not awaited `work`

        try:
            encoded = await until_disconnect(self._request.receive, admitted())
        except ClientGone:
            return Response(status_code=CLIENT_GONE)
        except Exception as error:
            raise state.admission.api_error(error, self._body.names()) from error
        return Response(encoded, media_type="application/json")

    def head(self) -> dict[str, Any]:
        """Fields of a list, without its data."""
        head = {"id": self.id, "object": "list", "created": int(time.time()), "model": self.model}
        return head | {"usage": self.usage}


def _raise_failure(output: RequestOutput) -> None:
    if (error := error_from_output(output)) is not None:
        raise error
    if output.outputs[0].finish_reason == "timeout":
        raise ApiError(408, f"request {output.request_id!r} was not computed within its timeout.", code="timeout")


def limits(state: ServerState) -> dict[str, dict[str, Any]]:
    """Limits of the fields for the OpenAPI schema."""
    settings = state.settings
    model = {} if settings.any_model_name else {"model": {"enum": [*state.names, None]}}
    text = {"type": "string", "minLength": 1, "maxLength": state.max_prompt_chars}
    several = {"type": "array", "minItems": 1, "maxItems": settings.max_prompts}
    token = {"type": "integer", "minimum": 0, "maximum": state.engine.vocab_size - 1}
    token_ids = {"type": "array", "minItems": 1, "items": token}
    inputs = [text, token_ids, {**several, "items": text}, {**several, "items": token_ids}]
    both = [text, {**several, "items": text}]
    document = {"type": "object", "properties": {"text": text}, "required": ["text"], "additionalProperties": False}
    truncated = {"truncate_prompt_tokens": {"minimum": -1, "maximum": 2**63 - 1, "not": {"const": 0}}}
    common = {**model, **truncated, "priority": {"minimum": settings.min_priority, "maximum": MAX_PRIORITY}}
    scoring = {**common, "instruction": {"maxLength": state.max_prompt_chars}}
    documents = {"documents": {**several, "items": {"anyOf": [text, document]}}}
    return {
        "EmbeddingRequest": {**common, "input": {"anyOf": inputs}},
        "RerankRequest": {**scoring, **documents, "query": {"maxLength": state.max_prompt_chars}},
        "ScoreRequest": {**scoring, "text_1": {"anyOf": both}, "text_2": {"anyOf": both}},
    }


def _row(index: int, vector: NDArray[np.float32], encoding_format: str | None) -> str:
    if encoding_format != "base64":
        encoded = encode_numbers(vector)
    else:
        encoded = f'"{base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")}"'
    return f'{{"object":"embedding","index":{index},"embedding":{encoded}}}'


def encode_numbers(vector: NDArray[np.float32]) -> str:
    """Encode an embedding as a JSON list."""
    return _ENCODER.encode(vector.tolist()).decode("ascii")


async def with_rows(head: dict[str, Any], name: str, rows: Iterable[str]) -> str:
    """Encode an answer with a list of embeddings, in a thread: the event loop would stand still for a second.

    Args:
        rows: JSON text of each item of the list `name`; iterated in the thread.
    """
    return f'{compact(head)[:-1]},"{name}":[{await asyncio.to_thread(",".join, rows)}]}}'


@router.post("/v1/embeddings", responses=ANSWERS | TIMED_OUT, summary="Embed prompts")
async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
    job = PoolingJob(server_state(request), request, body, "embd")
    job.check_texts("input", body.prompts)

    async def work() -> str:
        params = EmbeddingParams(truncate_prompt_tokens=job.truncation)
        found = await vectors(job, body, params)
        rows = (_row(index, vector, body.encoding_format) for index, vector in enumerate(found))
        return await with_rows(job.head(), "data", rows)

    return await job.answer(work())


async def vectors(job: PoolingJob, body: EmbeddingRequest, params: EmbeddingParams) -> list[NDArray[np.float32]]:
    """Compute the embedding of each prompt: [dimensions] float32, or [hidden_size]."""
    outputs = await job.outputs(body.prompts, params)
    return await asyncio.to_thread(lambda: [_vector(output, body) for output in outputs])


def _vector(output: RequestOutput, body: EmbeddingRequest) -> NDArray[np.float32]:
    vector = embedding_output(output, normalize=body.normalize and body.dimensions is None).embedding
    assert vector is not None
    return vector if body.dimensions is None else _cut(vector, body.dimensions, normalize=body.normalize)


def _cut(vector: NDArray[np.float32], dimensions: int, *, normalize: bool) -> NDArray[np.float32]:
    if dimensions > len(vector):
        raise ApiError(
            400, f"dimensions is {dimensions}; the model's embeddings have {len(vector)}.", param="dimensions"
        )
    cut = vector[:dimensions]
    length = float(np.linalg.norm(cut))
    return cut / np.float32(length) if normalize and length else cut


@router.post("/rerank", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
@router.post("/v1/rerank", responses=ANSWERS | TIMED_OUT, summary="Order documents by relevance")
async def rerank(body: RerankRequest, request: Request) -> Response:
    job = PoolingJob(server_state(request), request, body, "rerank")
    documents = [given if isinstance(given, str) else given.text for given in body.documents]
    job.check_texts("documents", documents)
    job.check_texts("query", [body.query])

    async def work() -> str:
        scores = await job.scores(body.query, await job.beginnings(documents, body.max_tokens_per_doc))
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in best]
        if body.return_documents:
            for result in results:
                result["document"] = {"text": documents[result["index"]]}
        return compact({"id": job.id, "model": job.model, "usage": job.usage, "results": results})

    return await job.answer(work())


@router.post("/score", include_in_schema=False)
@router.post("/v1/score", responses=ANSWERS | TIMED_OUT, summary="Score pairs of texts")
async def score(body: ScoreRequest, request: Request) -> Response:
    job = PoolingJob(server_state(request), request, body, "score")
    for param, texts in (("text_1", body.text_1), ("text_2", body.text_2)):
        job.check_texts(param, [texts] if isinstance(texts, str) else texts)

    async def work() -> str:
        scores = await job.scores(body.text_1, body.text_2)
        data = [{"index": index, "object": "score", "score": own} for index, own in enumerate(scores)]
        return compact(job.head() | {"data": data})

    return await job.answer(work())
