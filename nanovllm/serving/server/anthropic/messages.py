"""/v1/messages and /v1/messages/count_tokens: Anthropic's API, answered as a chat."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.serving.server.anthropic.protocol import CountTokensRequest, MessagesRequest
from nanovllm.serving.server.anthropic.translation import (
    as_chat,
    conversation_fields,
    renamed,
    signature,
    stop_fields,
    tool_use,
    usage,
)
from nanovllm.serving.server.body_limits import BodyLimits, LimitedRoute
from nanovllm.serving.server.errors import MESSAGES_ANSWERS, MESSAGES_PATH, ApiError, from_engine
from nanovllm.serving.server.openai.generation import Tally, respond
from nanovllm.serving.server.openai.protocol import ChatRequest
from nanovllm.serving.server.openai.single import SingleJob, single_form
from nanovllm.serving.server.openai.translated import translated
from nanovllm.serving.server.openai.turn import ChatTurn
from nanovllm.serving.server.security import require_api_key
from nanovllm.serving.server.sse import named_event, while_connected
from nanovllm.serving.server.state import ServerState, server_state

router = APIRouter(dependencies=[Depends(require_api_key)], route_class=LimitedRoute)


class MessagesJob(SingleJob):
    """A message request and its answer."""

    turn: ChatTurn
    known = ChatRequest.names()

    def __init__(self, state: ServerState, request: Request, given: MessagesRequest) -> None:
        super().__init__(f"msg_{uuid.uuid4().hex}")
        self.renamed = renamed(given)
        with translated(self.renamed, self.known):
            self.body = as_chat(given)
            self.turn = ChatTurn(state, request, self.body, self.id)
        self.model, self._writer = self.turn.model, EventWriter(self)

    def head(self) -> dict[str, Any]:
        """A message without content."""
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": []}

    def whole(self, output: RequestOutput, completion: CompletionOutput, tally: Tally) -> dict[str, Any]:
        new = self.turn.answer(0, output).read(completion, is_whole=True)
        content: list[dict[str, Any]] = []
        if new.reasoning:
            content.append({"type": "thinking", "thinking": new.reasoning, "signature": signature(new.reasoning)})
        for part in new.parts:
            if not isinstance(part, str):
                content.append(tool_use(part))
            elif content and content[-1]["type"] == "text":  # pieces of one text
                content[-1]["text"] += part
            else:
                content.append({"type": "text", "text": part})
        stop = stop_fields(completion, has_calls=bool(new.calls))
        return self.head() | {"content": content} | stop | {"usage": usage(tally.usage())}

    def events(self, output: RequestOutput, completion: CompletionOutput, tally: Tally) -> Iterator[bytes]:
        return self._writer.add(output, completion, tally)


class EventWriter:
    """Events of one streamed answer: its blocks, one after the other."""

    def __init__(self, job: MessagesJob) -> None:
        self._job = job
        self._index = -1
        self._open: str | None = None  # type of the block that is open
        self._thought = ""
        self._has_begun = False

    def add(self, output: RequestOutput, completion: CompletionOutput, tally: Tally) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            message = self._job.head() | {"stop_reason": None, "stop_sequence": None}
            message["usage"] = usage(tally.usage()) | {"output_tokens": 0}
            yield _event("message_start", message=message)
        answer = self._job.turn.answer(0, output)
        new = answer.read(completion)
        if new.reasoning:
            yield from self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self._thought += new.reasoning
            yield self._delta({"type": "thinking_delta", "thinking": new.reasoning})
        for part in new.parts:
            if isinstance(part, str):
                yield from self._begin("text", {"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": part})
            else:
                if "id" in part:  # a part without one goes on with the call
                    yield from self._end_block()
                    yield from self._begin("tool_use", tool_use(part, is_whole=False))
                yield self._delta({"type": "input_json_delta", "partial_json": part["function"]["arguments"]})
        if completion.finish_reason is not None:
            yield from self._end_block()
            stop = stop_fields(completion, has_calls=answer.num_calls > 0)
            yield _event("message_delta", delta=stop, usage=usage(tally.usage()))
            yield _event("message_stop")

    def _begin(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        if self._open == kind:
            return
        yield from self._end_block()
        self._index += 1
        self._open = kind
        yield _event("content_block_start", index=self._index, content_block=block)

    def _end_block(self) -> Iterator[bytes]:
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": signature(self._thought)})
            self._thought = ""
        yield _event("content_block_stop", index=self._index)
        self._open = None

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def _event(name: str, **fields: Any) -> bytes:
    return named_event(name, {"type": name} | fields)


def _error_event(error: ApiError) -> bytes:
    return named_event("error", error.body(MESSAGES_PATH))


_FORM = single_form(_error_event)


@router.post("/v1/messages", responses=MESSAGES_ANSWERS, summary="Answer a conversation, as Anthropic's API does")
async def create_message(body: MessagesRequest, request: Request) -> Response:
    return await respond(request, server_state(request), MessagesJob, body, _FORM)


@router.post("/v1/messages/count_tokens", responses=MESSAGES_ANSWERS, summary="Number of tokens of a conversation")
async def count_tokens(body: CountTokensRequest, request: Request) -> dict[str, int]:
    state = server_state(request)
    limits: BodyLimits = request.app.state.body_limits

    def turn() -> ChatTurn:
        with translated(renamed(body), ChatRequest.names()):
            chat = ChatRequest.model_validate(conversation_fields(body))
            return ChatTurn(state, request, chat, "")

    try:
        with state.admission.open_answer():
            counted = await limits.off_loop(request, turn)
            token_ids = await while_connected(request.receive, counted.prompt_token_ids())
            return {"input_tokens": len(token_ids)}
    except Exception as error:
        raise from_engine(error, body.names()) from error
