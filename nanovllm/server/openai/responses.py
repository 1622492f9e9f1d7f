"""/v1/responses: OpenAI's API for agents, answered as a chat; `--store-responses` keeps conversations."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from nanovllm.core.outputs import CompletionOutput, OutputKind, RequestOutput
from nanovllm.server.body_limits import LARGE, LimitedRoute
from nanovllm.server.errors import ANSWERS, ApiError
from nanovllm.server.openai.generation import AnswerForm, Tally, choices_of, queued, respond
from nanovllm.server.openai.protocol import ChatRequest
from nanovllm.server.openai.response_store import ResponseStore, StoredConversation, size_of
from nanovllm.server.openai.responses_input import RENAMED, answer_message, as_chat, new_messages
from nanovllm.server.openai.responses_items import Items
from nanovllm.server.openai.responses_protocol import ResponsesRequest
from nanovllm.server.openai.translated import translated
from nanovllm.server.openai.turn import ChatTurn
from nanovllm.server.security import key_of, require_api_key
from nanovllm.server.sse import named_event
from nanovllm.server.state import ServerState, server_state
from nanovllm.streaming.streams import OutputStream

logger = logging.getLogger("nanovllm")
router = APIRouter(dependencies=[Depends(require_api_key)], route_class=LimitedRoute)

_KNOWN = [*ChatRequest.names(), "input"]  # fields that may begin an error message
SKIPPED = "X-Skipped-Tools"  # header with the types of the skipped tools


class ResponsesJob:
    """A responses request and its answer; see `generation.Job`."""

    def __init__(self, state: ServerState, request: Request, given: ResponsesRequest) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self.request_ids = [self.id]
        self.created = int(time.time())
        self._state, self._given = state, given
        self._store: ResponseStore = request.app.state.responses
        self._owner = request.app.state.api_keys.name_of_key(key_of(request))
        if given.store and not self._store.max_responses:
            raise ApiError(
                400,
                "store: nothing is stored; leave it out, or start the server with --store-responses.",
                param="store",
            )
        self._is_stored = given.store is not False and self._store.max_responses > 0
        previous = given.previous_response_id
        before = None if previous is None else self._store.find(previous, self._owner)
        with translated(RENAMED, _KNOWN):
            self._before = () if before is None else before.messages
            self.body = as_chat(given, self._before)
            self._new = new_messages(given)
            self._num_bytes = (before.num_bytes if before else 0) + (size_of(self._new) if self._is_stored else 0)
            self.turn = ChatTurn(state, request, self.body, self.id)
        self.items = Items(seals="reasoning.encrypted_content" in (given.include or ()))

    async def start(self, kind: OutputKind) -> OutputStream:
        with translated(RENAMED, _KNOWN):
            return await self.turn.start(kind)

    def read(self, output: RequestOutput) -> None:
        """Do nothing: every output is the client's."""

    @property
    def num_reasoning_tokens(self) -> int | None:
        return self.turn.num_reasoning_tokens

    def response(self, status: str = "in_progress") -> dict[str, Any]:
        """The response so far, with the request's options."""
        given, defaults = self._given, self._state.engine.default_sampling_params
        dumped = given.model_dump(
            include={"instructions", "max_output_tokens", "metadata", "prompt_cache_key", "safety_identifier", "user"},
        )
        text = None if given.text is None else given.text.model_dump(exclude_none=True, by_alias=True)
        return dumped | {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self._state.model_name,
            "output": list(self.items.output),
            "error": None,
            "incomplete_details": None,
            "metadata": given.metadata or {},
            "temperature": defaults.temperature if given.temperature is None else given.temperature,
            "top_p": defaults.top_p if given.top_p is None else given.top_p,
            "parallel_tool_calls": given.parallel_tool_calls is not False,
            "tools": [
                {"parameters": None, "strict": None} | t.model_dump(exclude_none=True) for t in given.tools or ()
            ],
            "tool_choice": _choice(given),
            "reasoning": None if given.reasoning is None else given.reasoning.model_dump(exclude_none=True),
            "text": {"format": {"type": "text"}} | (text or {}),
            "truncation": given.truncation or "disabled",
            "store": self._is_stored,
            "background": False,
            "previous_response_id": given.previous_response_id,
            "usage": None,
        }

    def ended(self, completion: CompletionOutput, tally: Tally) -> dict[str, Any]:
        """The response of an answer that has ended."""
        if self._is_stored:
            answer = answer_message(self.items.output)
            messages, num_bytes = (*self._before, *self._new, *answer), self._num_bytes + size_of(answer)
            self._store.keep(self.id, StoredConversation(self._owner, messages, num_bytes))
        is_whole = completion.finish_reason == "stop"
        response = self.response("completed" if is_whole else "incomplete")
        if not is_whole:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return response | {"usage": _usage(tally, self.num_reasoning_tokens)}


def _choice(given: ResponsesRequest) -> Any:
    choice = given.tool_choice or "auto"
    return choice if isinstance(choice, str) else choice.model_dump()


def _usage(tally: Tally, num_reasoning: int | None) -> dict[str, Any]:
    counted = tally.usage()
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": counted["prompt_tokens_details"] | {"cache_write_tokens": 0},
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": num_reasoning or 0},
        "total_tokens": counted["total_tokens"],
    }


def _status(completion: CompletionOutput) -> str | None:
    """Status of the item that is open when an answer ends; None before."""
    match completion.finish_reason:
        case None:
            return None
        case "stop":
            return "completed"
        case _:
            return "incomplete"


async def _whole(state: ServerState, job: ResponsesJob) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    with state.admission.open_answer():
        async with queued(state, job, OutputKind.FINAL) as (outputs, tally):
            async for output in outputs:
                for _, completion in choices_of(job, output, tally):
                    new = job.turn.answer(0, output).read(completion, is_whole=True)
                    list(job.items.add(new, end=_status(completion)))
                    answer = job.ended(completion, tally)
    return answer


async def _events(state: ServerState, job: ResponsesJob) -> AsyncGenerator[bytes, None]:
    """Yield the events of a streamed answer, see `EventStream`; raises ApiError."""
    number = -1

    def event(fields: dict[str, Any]) -> bytes:
        nonlocal number
        number += 1
        return named_event(fields["type"], fields | {"sequence_number": number})

    with state.admission.open_answer():
        try:
            async with queued(state, job, OutputKind.DELTA) as (outputs, tally):
                yield b""  # admitted
                for kind in ("created", "in_progress"):
                    yield event({"type": f"response.{kind}", "response": job.response()})
                async for output in outputs:
                    for _, completion in choices_of(job, output, tally):
                        new = job.turn.answer(0, output).read(completion)
                        for fields in job.items.add(new, end=_status(completion)):
                            yield event(fields)
                        if (status := _status(completion)) is not None:
                            yield event({"type": f"response.{status}", "response": job.ended(completion, tally)})
        except ApiError as error:  # a response that has begun fails as one
            if number < 0:
                raise
            failed = job.response("failed")
            failed["error"] = {"code": "server_error", "message": error.message}
            yield event({"type": "response.failed", "response": failed})


def _error_event(error: ApiError) -> bytes:
    return named_event("error", error.body()["error"] | {"type": "error", "sequence_number": 0})


_FORM: AnswerForm[ResponsesJob] = AnswerForm(_whole, _events, _error_event)


@router.post("/v1/responses", responses=ANSWERS, summary="Answer a conversation, as OpenAI's Responses API does")
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    if body.previous_response_id is not None:
        request.scope[LARGE] = True  # the whole conversation is validated again: not in the event loop
    response = await respond(request, server_state(request), ResponsesJob, body, _FORM)
    if body.skipped:
        logger.info("tools of types %s are left out: only functions are supported", ", ".join(body.skipped))
        response.headers[SKIPPED] = ", ".join(body.skipped)
    return response
