"""The ASGI application: its endpoints over one engine."""

from __future__ import annotations

import os

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from nanovllm import __version__
from nanovllm.async_llm import AsyncLLM
from nanovllm.model.default_model import DEFAULT_MODEL
from nanovllm.observability.step_records import OnStep
from nanovllm.server import errors
from nanovllm.server.body_limits import BodyLimits
from nanovllm.server.hosts import HostGate, allowed_names
from nanovllm.server.lifecycle import Admission
from nanovllm.server.live import live_view
from nanovllm.server.metrics import CountResponses, ServerMetrics
from nanovllm.server.openai import chat, completions, models
from nanovllm.server.openai.description import describe
from nanovllm.server.openai.token_text import TokenText
from nanovllm.server.openai.tool_calls import format_of
from nanovllm.server.security import ApiKeys, BodyGate
from nanovllm.server.settings import ServerSettings
from nanovllm.server.state import ServerState, served_name


def create_app(
    engine: AsyncLLM,
    settings: ServerSettings,
    *,
    model: str | os.PathLike[str] = DEFAULT_MODEL,
) -> FastAPI:
    """An app that serves an engine; whoever runs it closes the engine.

    Args:
        model: what the engine was built from, for its name unless the settings have one.

    `app.state` holds `server` (a ServerState) and `api_keys`.
    """
    name = served_name(settings, model)
    metrics = ServerMetrics(name)
    engine.observers.append(OnStep(metrics.on_step))
    keys = ApiKeys(settings.api_keys())
    app = FastAPI(title="nanovllm", version=__version__, docs_url=None, redoc_url=None)
    app.state.api_keys = keys
    app.state.server = ServerState(
        engine=engine,
        settings=settings,
        model_name=name,
        admission=Admission(engine, settings.stall_timeout),
        metrics=metrics,
        token_text=TokenText(engine.tokenizer),
        tool_format=format_of(engine.tokenizer) if settings.tool_format == "auto" else settings.tool_format,
    )
    app.state.body_limits = BodyLimits(settings, engine)
    errors.install(app)
    for router in (models.open_router, models.router, completions.router, chat.router):
        app.include_router(router)
    describe(app, app.state.server)
    if settings.ui:
        live_view.attach(app, app.state.server)
    app.add_middleware(BodyGate, keys=keys, max_bytes=settings.max_body_bytes)
    if settings.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origin),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # clients' libraries send some of their own, and a key is asked for all the same
            expose_headers=["Retry-After"],
        )
    if (allowed := allowed_names(settings)) is not None:
        app.add_middleware(HostGate, allowed=allowed)
    app.add_middleware(CountResponses, metrics=metrics)
    return app
