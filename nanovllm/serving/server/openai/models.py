"""Endpoints for models, tokenization, health, version and metrics."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from nanovllm import __version__
from nanovllm.features.chat.chat import NOT_FOR_TEMPLATES
from nanovllm.serving.server.answers.template_options import known_options
from nanovllm.serving.server.body_limits import BodyLimits, LimitedRoute
from nanovllm.serving.server.errors import ANSWERS, ApiError, from_engine
from nanovllm.serving.server.openai.messages import as_conversation
from nanovllm.serving.server.openai.protocol import DetokenizeRequest, TokenizeRequest
from nanovllm.serving.server.security import require_api_key
from nanovllm.serving.server.sse import while_connected
from nanovllm.serving.server.state import ServerState, server_state

open_router = APIRouter()
router = APIRouter(dependencies=[Depends(require_api_key)], route_class=LimitedRoute)
_STARTED = int(time.time())


@open_router.head("/health", include_in_schema=False)  # load balancers probe with HEAD
@open_router.get("/health", responses=ANSWERS, summary="Health: 200 while requests are served, else 503")
async def health(request: Request) -> dict[str, Any]:
    admission = server_state(request).admission
    admission.check()
    replicas = admission.check_replicas()
    admission.check_progress()
    shown = [{"index": r.index, "state": r.state, "restarts": r.num_restarts} for r in replicas]
    return {"status": "ok"} | ({"replicas": shown} if replicas else {})


@router.get("/version", responses=ANSWERS, summary="The version of nanovllm")
async def version() -> dict[str, str]:
    return {"version": __version__}


def _model(state: ServerState, name: str, *, is_adapter: bool = False) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "nanovllm",
        "parent": state.model_name if is_adapter else None,
        "max_model_len": state.engine.config.max_model_len,
        "capabilities": state.capabilities,
    }


@router.get("/v1/models", responses=ANSWERS, summary="The model that is served and its adapters, as a list")
async def list_models(request: Request) -> dict[str, Any]:
    state = server_state(request)
    models = [_model(state, name) for name in state.model_names]
    return {"object": "list", "data": models + [_model(state, name, is_adapter=True) for name in state.engine.adapters]}


@router.get("/v1/models/{name:path}", responses=ANSWERS, summary="The model that is served, or an adapter")
async def retrieve_model(name: str, request: Request) -> dict[str, Any]:
    state = server_state(request)
    return _model(state, name, is_adapter=state.resolve(name) != state.model_name)


async def _tokens(state: ServerState, request: Request, body: TokenizeRequest) -> list[int]:
    if body.prompt is not None:
        state.check_length(body.prompt, "prompt")
        return await state.engine.tokenize(body.prompt, add_special_tokens=body.add_special_tokens is not False)

    def conversation() -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        messages = as_conversation(body.messages or ())
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools] if body.tools else None
        state.check_conversation(messages, tools, body.chat_template_kwargs)
        return messages, tools

    limits: BodyLimits = request.app.state.body_limits
    messages, tools = await limits.off_loop(request, conversation)
    given = body.chat_template_kwargs or {}
    can_think = state.answer_format.reasoning is not None
    options = known_options(given, state.template_variables, NOT_FOR_TEMPLATES, can_think=can_think) | body.prompt_end
    return await state.engine.apply_chat_template(messages, tools=tools, **options)


@router.post("/tokenize", responses=ANSWERS, summary="Token ids of a text or a conversation")
async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
    state = server_state(request)
    state.resolve(body.model)
    engine = state.engine
    try:
        with state.admission.open_answer():
            token_ids = await while_connected(request.receive, _tokens(state, request, body))
    except Exception as error:
        raise from_engine(error, body.names()) from error
    answer = {"count": len(token_ids), "max_model_len": engine.config.max_model_len, "tokens": token_ids}
    if body.return_token_strs:
        answer["token_strs"] = [state.token_text.text(token_id) for token_id in token_ids]
    return answer


@router.post("/detokenize", responses=ANSWERS, summary="The text of token ids")
async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, str]:
    state = server_state(request)
    state.resolve(body.model)
    tokenizer = state.engine.tokenizer
    if tokenizer is None:
        raise ApiError(400, "the model is served without a tokenizer; start the server with --tokenizer.")
    limit = state.engine.config.max_model_len
    if len(body.tokens) > limit:
        raise ApiError(
            400, f"tokens: {len(body.tokens)} are too many for one request; at most {limit}.", param="tokens"
        )
    unknown = [token_id for token_id in body.tokens if token_id >= len(tokenizer)]
    if unknown:
        raise ApiError(
            400, f"tokens: {unknown[0]} is not a token id; ids are 0 to {len(tokenizer) - 1}.", param="tokens"
        )
    try:
        with state.admission.open_answer():
            work = state.engine.detokenize(body.tokens, skip_special_tokens=body.skip_special_tokens)
            text = await while_connected(request.receive, work)
    except Exception as error:
        raise from_engine(error) from error
    return {"prompt": text}


@router.get("/metrics", responses=ANSWERS, response_class=Response, summary="Metrics for Prometheus")
async def metrics(request: Request) -> Response:
    state = server_state(request)
    engine = state.engine
    is_stalled = state.admission.is_stalled
    text = state.metrics.text(engine.heartbeat(), engine.replicas(), is_stalled=is_stalled)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
