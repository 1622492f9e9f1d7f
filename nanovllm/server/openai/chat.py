"""/v1/chat/completions: answers a conversation through the model's chat template."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from nanovllm.outputs import CompletionOutput, OutputKind, RequestOutput
from nanovllm.server.body_limits import LimitedRoute
from nanovllm.server.errors import ANSWERS
from nanovllm.server.openai.generation import finish_reasons, new_id, prompt_ids, respond
from nanovllm.server.openai.limits import check_size, engine_options
from nanovllm.server.openai.logprobs import format_chat_logprobs
from nanovllm.server.openai.protocol import ChatRequest
from nanovllm.server.openai.tool_calls import FORMATS, ToolFormat, ToolStream
from nanovllm.server.security import require_api_key
from nanovllm.server.state import ServerState, server_state
from nanovllm.streaming.streams import OutputStream

router = APIRouter(dependencies=[Depends(require_api_key)], route_class=LimitedRoute)


class ChatJob:
    """A chat request and its choices; see `generation.Job`."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, state: ServerState, request: Request, body: ChatRequest) -> None:
        self.body, self._state, self.id = body, state, new_id("chatcmpl")
        self.request_ids = [self.id]
        state.check_model(body.model)
        num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        check_size(state, body, 1, num_logprobs)
        self._conversation = body.conversation()
        self._tools = body.callable_tools
        state.check_conversation(self._conversation, self._tools, body.chat_template_kwargs)
        self._num_top = num_logprobs or 0
        self._format = FORMATS[state.tool_format] if self._tools else None
        options: dict[str, Any] = {"max_tokens": body.output_limit, "logprobs": num_logprobs}
        if self._format is not None and self._format.has_special_tokens:
            options["skip_special_tokens"] = False
        self._params = body.sampling_params(**options)
        self._options = engine_options(state, request, body)
        self._tool_streams: dict[int, ToolStream] = {}  # by choice

    async def start(self, kind: OutputKind) -> OutputStream:
        return await self._state.engine.submit_chat(
            self._conversation,
            self._params,
            tools=self._tools,
            template_options=self.body.template_options,
            request_id=self.id,
            output_kind=kind,
            **self._options,
        )

    def read(self, output: RequestOutput) -> None:
        """Do nothing: every output is the client's."""

    def opening(self, choice: int, output: RequestOutput) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None} | prompt_ids(
            self.body, output
        )

    def delta(self, choice: int, completion: CompletionOutput) -> dict[str, Any] | None:
        content, num_calls = completion.text, 0
        calls: list[dict[str, Any]] = []
        if self._format is not None:
            if choice not in self._tool_streams:
                self._tool_streams[choice] = self._tool_stream(self._format)
            stream = self._tool_streams[choice]
            content, calls = stream.add(completion.text, is_last=completion.finish_reason is not None)
            num_calls = stream.num_calls
        logprobs = self._logprobs(completion)
        if not (content or calls or completion.finish_reason or logprobs or self.body.return_token_ids):
            return None
        delta: dict[str, Any] = {"content": content} if content else {}
        if calls:
            first = num_calls - len(calls)
            delta["tool_calls"] = [{"index": number} | call for number, call in enumerate(calls, first)]
        return {"index": choice, "delta": delta, "logprobs": logprobs} | self._end(completion, num_calls > 0)

    def whole(self, choice: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        content: str | None = completion.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        calls: list[dict[str, Any]] = []
        if self._format is not None:
            content, calls = self._tool_stream(self._format).add(completion.text, is_last=True)
            message["content"] = content or None if calls else content
            if calls:
                message["tool_calls"] = calls
        made = {"index": choice, "message": message, "logprobs": self._logprobs(completion)}
        return made | self._end(completion, bool(calls)) | prompt_ids(self.body, output)

    # ------------------------------------------------------------------------------------------------------- parts

    def _tool_stream(self, form: ToolFormat) -> ToolStream:
        names = {tool["function"]["name"] for tool in self._tools or ()}
        return ToolStream(form, names, self._state.engine.tokenizer.all_special_tokens)

    def _end(self, completion: CompletionOutput, has_calls: bool) -> dict[str, Any]:
        reason, stop_reason = finish_reasons(completion)
        if has_calls and reason == "stop":
            reason = "tool_calls"
        end = {"finish_reason": reason, "stop_reason": stop_reason}
        return end | {"token_ids": completion.token_ids} if self.body.return_token_ids else end

    def _logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        if completion.logprobs is None or not completion.token_ids:
            return None
        return format_chat_logprobs(self._state.token_text, completion.token_ids, completion.logprobs, self._num_top)


@router.post("/v1/chat/completions", responses=ANSWERS, summary="Answer a conversation")
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    return await respond(request, server_state(request), ChatJob, body)
