"""/v1/chat/completions: answers a conversation through the model's chat template."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from nanovllm.outputs import CompletionOutput, OutputKind, RequestOutput, TokenLogprobs
from nanovllm.serving.server.body_limits import LimitedRoute
from nanovllm.serving.server.errors import ANSWERS
from nanovllm.serving.server.openai.generation import CHOICES, finish_reasons, new_id, prompt_ids, respond
from nanovllm.serving.server.openai.logprobs import encode_prompt_logprobs, format_chat_logprobs
from nanovllm.serving.server.openai.protocol import ChatRequest
from nanovllm.serving.server.openai.turn import ChatTurn
from nanovllm.serving.server.security import require_api_key
from nanovllm.serving.server.state import ServerState, server_state
from nanovllm.serving.streaming.streams import OutputStream

router = APIRouter(dependencies=[Depends(require_api_key)], route_class=LimitedRoute)


class ChatJob:
    """A chat request and its choices; see `generation.Job`."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, state: ServerState, request: Request, body: ChatRequest) -> None:
        self.body, self._state, self.id = body, state, new_id("chatcmpl")
        self.request_ids = [self.id]
        self._turn = ChatTurn(state, request, body, self.id)
        self.model = self._turn.model
        self._prompt_logprobs: Sequence[TokenLogprobs | None] | None = None

    async def start(self, kind: OutputKind) -> OutputStream:
        return await self._turn.start(kind)

    def read(self, output: RequestOutput) -> None:
        if output.finished:
            self._prompt_logprobs = output.prompt_logprobs

    @property
    def num_reasoning_tokens(self) -> int | None:
        return self._turn.num_reasoning_tokens

    def opening(self, choice: int, output: RequestOutput) -> dict[str, Any] | None:
        self._turn.answer(choice, output)
        delta = {"role": "assistant", "content": ""}
        return {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None} | prompt_ids(
            self.body, output
        )

    def delta(self, choice: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any] | str | None:
        answer = self._turn.answer(choice, output)
        new = answer.read(completion)
        logprobs = self._logprobs(completion)
        has_more = completion.finish_reason or logprobs or self.body.return_token_ids
        if not (new or has_more):
            return None
        if new.content and not (has_more or new.reasoning or new.calls):
            return new.content
        delta: dict[str, Any] = {"reasoning_content": new.reasoning} if new.reasoning else {}
        if new.content:
            delta["content"] = new.content
        if new.calls:
            delta["tool_calls"] = new.numbered_calls(answer.num_calls)
        return {"index": choice, "delta": delta, "logprobs": logprobs} | self._end(completion, answer.num_calls > 0)

    def text_delta(self, choice: int, text: str) -> dict[str, Any]:
        end = {"finish_reason": None, "stop_reason": None}
        return {"index": choice, "delta": {"content": text}, "logprobs": None} | end

    def whole(self, choice: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        new = self._turn.answer(choice, output).read(completion, is_whole=True)
        content = new.content or None if new.calls else new.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if new.reasoning:
            message["reasoning_content"] = new.reasoning
        if new.calls:
            message["tool_calls"] = new.calls
        made = {"index": choice, "message": message, "logprobs": self._logprobs(completion)}
        return made | self._end(completion, bool(new.calls)) | prompt_ids(self.body, output)

    async def encoded_fields(self) -> str:
        """`prompt_logprobs`, as vLLM has them; encoded in a thread, since a long prompt has 100,000 of them."""
        if self._prompt_logprobs is None:
            return ""
        text = self._state.token_text
        return f'"prompt_logprobs":{await asyncio.to_thread(encode_prompt_logprobs, text, self._prompt_logprobs)}'

    # ------------------------------------------------------------------------------------------------------- parts

    def _end(self, completion: CompletionOutput, has_calls: bool) -> dict[str, Any]:
        reason, stop_reason = finish_reasons(completion)
        if has_calls and reason == "stop":
            reason = "tool_calls"
        end = {"finish_reason": reason, "stop_reason": stop_reason}
        return end | {"token_ids": completion.token_ids} if self.body.return_token_ids else end

    def _logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        if completion.logprobs is None or not completion.token_ids:
            return None
        num_top = self._turn.num_logprobs or 0
        return format_chat_logprobs(self._state.token_text, completion.token_ids, completion.logprobs, num_top)


@router.post("/v1/chat/completions", responses=ANSWERS, summary="Answer a conversation")
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    return await respond(request, server_state(request), ChatJob, body, CHOICES)
