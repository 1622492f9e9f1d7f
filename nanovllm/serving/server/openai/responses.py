"""/v1/responses: OpenAI's API for agents, answered as a chat; `--store-responses` keeps conversations."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.serving.server.body_limits import LARGE, LimitedRoute
from nanovllm.serving.server.errors import ANSWERS, ApiError
from nanovllm.serving.server.openai.generation import AnswerForm, Tally, respond
from nanovllm.serving.server.openai.protocol import ChatRequest
from nanovllm.serving.server.openai.response_store import ResponseStore, StoredConversation, size_of
from nanovllm.serving.server.openai.responses_input import RENAMED, answer_message, as_chat, new_messages
from nanovllm.serving.server.openai.responses_items import Items
from nanovllm.serving.server.openai.responses_protocol import ResponsesRequest
from nanovllm.serving.server.openai.single import SingleJob, streamed_answer, whole_answer
from nanovllm.serving.server.openai.translated import translated
from nanovllm.serving.server.openai.turn import ChatTurn
from nanovllm.serving.server.security import key_of, require_api_key
from nanovllm.serving.server.sse import named_event
from nanovllm.serving.server.state import ServerState, server_state

logger = logging.getLogger("nanovllm")
router = APIRouter(dependencies=[Depends(require_api_key)], route_class=LimitedRoute)

_KNOWN = [*ChatRequest.names(), "input"]  # fields that may begin an error message
SKIPPED = "X-Skipped-Tools"  # header with the types of the skipped tools


class ResponsesJob(SingleJob):
    """A responses request and its answer."""

    turn: ChatTurn
    renamed = RENAMED
    known = _KNOWN

    def __init__(self, state: ServerState, request: Request, given: ResponsesRequest) -> None:
        super().__init__(f"resp_{uuid.uuid4().hex}")
        self._number = -1  # sequence number of the last event
        self.created = int(time.time())
        self._state = state
        self._given = given
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
        with translated(self.renamed, self.known):
            self._before = () if before is None else before.messages
            self.body = as_chat(given, self._before)
            self._new = new_messages(given)
            self._num_bytes = (before.num_bytes if before else 0) + (size_of(self._new) if self._is_stored else 0)
            self.turn = ChatTurn(state, request, self.body, self.id)
        self.model = self.turn.model
        self.items = Items(seals="reasoning.encrypted_content" in (given.include or ()))

    def whole(self, output: RequestOutput, completion: CompletionOutput, tally: Tally) -> dict[str, Any]:
        new = self.turn.answer(0, output).read(completion, is_whole=True)
        list(self.items.add(new, end=_status(completion)))
        return self.ended(completion, tally)

    def opening(self) -> Iterator[bytes]:
        for kind in ("created", "in_progress"):
            yield self.event({"type": f"response.{kind}", "response": self.response()})

    def events(self, output: RequestOutput, completion: CompletionOutput, tally: Tally) -> Iterator[bytes]:
        new = self.turn.answer(0, output).read(completion)
        for fields in self.items.add(new, end=_status(completion)):
            yield self.event(fields)
        if (status := _status(completion)) is not None:
            yield self.event({"type": f"response.{status}", "response": self.ended(completion, tally)})

    def event(self, fields: dict[str, Any]) -> bytes:
        """Encode an event with the next number."""
        self._number += 1
        return named_event(fields["type"], fields | {"sequence_number": self._number})

    @property
    def has_begun(self) -> bool:
        return self._number >= 0

    def response(self, status: str = "in_progress") -> dict[str, Any]:
        """The response so far, with the request's options."""
        given = self._given
        defaults = self._state.engine.default_sampling_params
        dumped = given.model_dump(
            include={"instructions", "max_output_tokens", "metadata", "prompt_cache_key", "safety_identifier", "user"},
        )
        text = None if given.text is None else given.text.model_dump(exclude_none=True, by_alias=True)
        return dumped | {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.model,
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
            messages = (*self._before, *self._new, *answer)
            num_bytes = self._num_bytes + size_of(answer)
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


async def _events(state: ServerState, job: ResponsesJob) -> AsyncGenerator[bytes, None]:
    """Yield the events of `streamed_answer`; a response that has begun fails as one."""
    try:
        async with aclosing(streamed_answer(state, job)) as events:
            async for encoded in events:
                yield encoded
    except ApiError as error:
        if not job.has_begun:
            raise
        failed = job.response("failed")
        failed["error"] = {"code": "server_error", "message": error.message}
        yield job.event({"type": "response.failed", "response": failed})


def _error_event(error: ApiError) -> bytes:
    return named_event("error", error.body()["error"] | {"type": "error", "sequence_number": 0})


_FORM: AnswerForm[ResponsesJob] = AnswerForm(whole_answer, _events, _error_event)


@router.post("/v1/responses", responses=ANSWERS, summary="Answer a conversation, as OpenAI's Responses API does")
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    if body.previous_response_id is not None:
        request.scope[LARGE] = True  # the whole conversation is validated again: not in the event loop
    response = await respond(request, server_state(request), ResponsesJob, body, _FORM)
    if body.skipped:
        logger.info("tools of types %s are left out: only functions are supported", ", ".join(body.skipped))
        response.headers[SKIPPED] = ", ".join(body.skipped)
    return response
