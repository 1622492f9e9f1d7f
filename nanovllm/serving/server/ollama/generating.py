"""/api/chat and /api/generate: answers whole, or as a stream of JSON lines."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from nanovllm.outputs import CompletionOutput, OutputKind, RequestOutput
from nanovllm.serving.server.answers.delta import AnswerDelta
from nanovllm.serving.server.body_limits import LimitedRoute
from nanovllm.serving.server.errors import ApiError
from nanovllm.serving.server.ollama import protocol
from nanovllm.serving.server.ollama.translation import (
    RENAMED,
    chat_of,
    check_thought,
    completion_of,
    durations,
    now,
    tell_context,
    tool_calls,
    turn_of,
)
from nanovllm.serving.server.openai.completions import CompletionJob
from nanovllm.serving.server.openai.generation import Tally, respond
from nanovllm.serving.server.openai.logprobs import format_chat_logprobs
from nanovllm.serving.server.openai.protocol import ChatRequest, CompletionRequest
from nanovllm.serving.server.openai.single import SingleJob, single_form
from nanovllm.serving.server.openai.translated import translated
from nanovllm.serving.server.openai.turn import ChatTurn
from nanovllm.serving.server.security import require_api_key
from nanovllm.serving.server.sse import compact
from nanovllm.serving.server.state import ServerState, server_state
from nanovllm.serving.streaming.streams import OutputStream


class OllamaRoute(LimitedRoute):
    """Route that takes every body as JSON: `curl -d`, as in Ollama's documentation, calls it a form.

    Browsers send forms and texts to other origins unasked, but never without an Origin header: from these, JSON must
    be called JSON.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def typed(request: Request) -> Response:
            headers = request.scope["headers"]
            if not any(name == b"origin" for name, _ in headers):
                others = [(name, value) for name, value in headers if name != b"content-type"]
                request.scope["headers"] = [*others, (b"content-type", b"application/json")]
            return await handle(Request(request.scope, request.receive))

        return typed


router = APIRouter(dependencies=[Depends(require_api_key)], route_class=OllamaRoute, include_in_schema=False)
LINES = "application/x-ndjson"
_KNOWN = [*ChatRequest.names(), *CompletionRequest.names()]


class OllamaJob(SingleJob):
    """A request of these endpoints and its answer."""

    renamed = RENAMED
    known = _KNOWN

    def __init__(self, state: ServerState, given: protocol.GeneratingFields) -> None:
        super().__init__(f"ollama-{uuid.uuid4().hex}")
        self._state, self._begin = state, time.monotonic()
        self._num_top = given.top_logprobs or 0
        check_thought(state, given)
        tell_context(state, given)

    def part(self, text: str, thought: str = "", calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """Fields of an answer that hold its new parts."""
        raise NotImplementedError

    def line(self, output: RequestOutput, completion: CompletionOutput, *, is_whole: bool) -> dict[str, Any] | None:
        """Format the new parts of an answer; None if there are none."""
        new = AnswerDelta(parts=[completion.text] if completion.text else [])
        first = 0
        if self.turn is not None:
            answer = self.turn.answer(0, output)
            new = answer.read(completion, is_whole=is_whole)
            first = answer.num_calls - len(new.calls)
        logprobs = self._logprobs(completion)
        if not (new or logprobs or is_whole):
            return None
        return self.head() | self.part(new.content, new.reasoning, tool_calls(new.calls, first)) | logprobs

    def whole(self, output: RequestOutput, completion: CompletionOutput, tally: Tally) -> dict[str, Any]:
        line = self.line(output, completion, is_whole=True) or {}
        return line | self.end(output, completion, tally)

    def events(self, output: RequestOutput, completion: CompletionOutput, tally: Tally) -> Iterator[bytes]:
        if (line := self.line(output, completion, is_whole=False)) is not None:
            yield _encoded(line)
        if completion.finish_reason is not None:
            yield _encoded(self.head() | self.part("") | self.end(output, completion, tally))

    def head(self) -> dict[str, Any]:
        return {"model": self.model, "created_at": now(), "done": False}

    def end(self, output: RequestOutput, completion: CompletionOutput, tally: Tally) -> dict[str, Any]:
        """Fields of an answer that has ended."""
        reason = "stop" if completion.finish_reason == "stop" else "length"
        counted = durations(self._begin, time.monotonic(), output, tally.num_generated)
        return {"done": True, "done_reason": reason} | counted

    def _logprobs(self, completion: CompletionOutput) -> dict[str, Any]:
        if completion.logprobs is None or not completion.token_ids:
            return {}
        text = self._state.token_text
        return {
            "logprobs": format_chat_logprobs(text, completion.token_ids, completion.logprobs, self._num_top)["content"]
        }


class ChatJob(OllamaJob):
    """A request of /api/chat."""

    def __init__(self, state: ServerState, request: Request, given: protocol.ChatBody) -> None:
        super().__init__(state, given)
        with translated(self.renamed, self.known):
            self.body = chat_of(given)
            self.turn = ChatTurn(state, request, self.body, self.id, whole_calls=True)
        self.model = self.turn.model

    def part(self, text: str, thought: str = "", calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thought:
            message["thinking"] = thought
        if calls:
            message["tool_calls"] = calls
        return {"message": message}


class GenerateJob(OllamaJob):
    """A request of /api/generate: one turn of a chat, or a completion if it is raw or has a suffix."""

    def __init__(self, state: ServerState, request: Request, given: protocol.GenerateBody) -> None:
        super().__init__(state, given)
        has_template = bool(getattr(state.engine.tokenizer, "chat_template", None))
        is_plain = given.raw or given.suffix or not (has_template or given.system)
        with translated(self.renamed, self.known):
            if is_plain:
                self.body = completion_of(given)
                self._completion = CompletionJob(state, request, self.body)
                self.id, self.model = self._completion.id, self._completion.model
                self.request_ids = self._completion.request_ids
            else:
                self.body = turn_of(given)
                self.turn = ChatTurn(state, request, self.body, self.id, whole_calls=True)
                self.model = self.turn.model

    async def start(self, kind: OutputKind) -> OutputStream:
        if self.turn is not None:
            return await super().start(kind)
        with translated(self.renamed, self.known):
            return await self._completion.start(kind)

    def part(self, text: str, thought: str = "", calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        return {"response": text} | ({"thinking": thought} if thought else {})


def _encoded(line: dict[str, Any]) -> bytes:
    return f"{compact(line)}\n".encode()


def _empty_line(job: OllamaJob) -> bytes:
    """A line without text: clients parse every line, so a comment is none."""
    return _encoded(job.head() | job.part(""))


def _error_line(error: ApiError) -> bytes:
    return _encoded({"error": error.message})


_FORM = single_form(_error_line, media_type=LINES, comment=_empty_line)


def _loaded(state: ServerState, model: str, part: dict[str, Any], *, streams: bool) -> Response:
    """Answer to a request without input, by which clients load or unload a model: it stays loaded."""
    line = {"model": state.resolve(model), "created_at": now(), "done": True, "done_reason": "load"} | part
    return Response(_encoded(line), media_type=LINES if streams else "application/json")


@router.post("/api/chat")
async def chat(body: protocol.ChatBody, request: Request) -> Response:
    state = server_state(request)
    if not body.messages:
        message = {"message": {"role": "assistant", "content": ""}}
        return _loaded(state, body.model, message, streams=body.stream is not False)
    return await respond(request, state, ChatJob, body, _FORM)


@router.post("/api/generate")
async def generate(body: protocol.GenerateBody, request: Request) -> Response:
    state = server_state(request)
    if not (body.prompt or body.suffix or body.system):
        return _loaded(state, body.model, {"response": ""}, streams=body.stream is not False)
    return await respond(request, state, GenerateJob, body, _FORM)
