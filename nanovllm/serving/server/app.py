"""The server: an ASGI application over one engine, and the uvicorn process that runs it."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from nanovllm import __version__
from nanovllm.features.extras import check_extra
from nanovllm.features.infill.infill import infill_of
from nanovllm.models.default_model import DEFAULT_MODEL
from nanovllm.observability.json_lines import write_json
from nanovllm.observability.step_records import OnStep
from nanovllm.serving.async_llm import AsyncLLM
from nanovllm.serving.server import errors, updates
from nanovllm.serving.server.adapters import load_given_adapters
from nanovllm.serving.server.answers.answer_format import answer_format, template_text
from nanovllm.serving.server.answers.template_options import template_variables
from nanovllm.serving.server.anthropic import messages
from nanovllm.serving.server.body_limits import BodyLimits
from nanovllm.serving.server.connections import allow_open_files, protocol_class
from nanovllm.serving.server.engine_process import front_door
from nanovllm.serving.server.hosts import HostGate, RootPath, allowed_names, log_exposure
from nanovllm.serving.server.lifecycle import LAST_SECONDS, Admission, DrainingServer
from nanovllm.serving.server.live import live_view
from nanovllm.serving.server.logs import JsonFormatter, RequestLog
from nanovllm.serving.server.metrics import CountResponses, ServerMetrics
from nanovllm.serving.server.openai import adapters, chat, completions, embeddings, infill, models, responses
from nanovllm.serving.server.openai.description import describe
from nanovllm.serving.server.openai.response_store import ResponseStore
from nanovllm.serving.server.preparing import SPANS_NEED
from nanovllm.serving.server.recorder import Recorder
from nanovllm.serving.server.request_facts import InFlight
from nanovllm.serving.server.security import ApiKeys, BodyGate, client_name
from nanovllm.serving.server.settings import ServerSettings
from nanovllm.serving.server.sse import with_abort
from nanovllm.serving.server.state import ServerState, served_name
from nanovllm.serving.server.token_text import TokenText
from nanovllm.serving.server.turns import Turns

# Seconds for which a thread keeps the GIL while another waits. Each call into torch releases it: with Python's 5 ms, a
# step took hundreds of milliseconds while a thread parsed a body.
SWITCH_SECONDS = 0.0005


def create_app(
    engine: AsyncLLM,
    settings: ServerSettings,
    *,
    model: str | os.PathLike[str] = DEFAULT_MODEL,
) -> FastAPI:
    """Build the application of an engine; the caller closes the engine.

    Args:
        model: folder or id of the model, for its name if `served_model_name` is not set.

    `app.state` holds `server` (a ServerState), `api_keys`, `body_limits` and `recorder` (None without a record), which
    the caller closes after the engine.
    """
    name = served_name(settings, model)
    metrics = ServerMetrics(name)
    in_flight = _in_flight(engine, settings, name)
    _observe(engine, metrics, in_flight)
    recorder = None
    if settings.record is not None:
        recorder = Recorder(settings.record, max_bytes=settings.record_max_bytes)
        engine.on_request_end.append(recorder.record)
    keys = ApiKeys(settings.api_keys(), settings.key_names())
    app = FastAPI(title="nanovllm", version=__version__, docs_url=None, redoc_url=None)
    app.servers = [{"url": settings.root_path}] if settings.root_path else []
    app.state.api_keys = keys
    app.state.recorder = recorder
    app.state.server = ServerState(
        engine=engine,
        settings=settings,
        model_name=name,
        admission=Admission(engine, settings.stall_timeout),
        metrics=metrics,
        in_flight=in_flight,
        token_text=TokenText(engine.tokenizer),
        answer_format=answer_format(engine.tokenizer, settings.tool_format, settings.reasoning_format),
        template_variables=template_variables(template_text(engine.tokenizer)),
        infill=infill_of(engine.tokenizer),
    )
    app.state.body_limits = BodyLimits(settings, engine)
    app.state.responses = ResponseStore(settings.store_responses, settings.store_bytes)
    errors.install(app)
    for endpoints in (models, completions, infill, chat, responses, messages, embeddings):
        app.include_router(endpoints.router)
    app.include_router(adapters.router, include_in_schema=settings.adapter_folder is not None)
    app.include_router(updates.router, include_in_schema=settings.allow_weight_updates)
    app.include_router(models.open_router)
    describe(app, app.state.server)
    if settings.ui:
        live_view.attach(app, app.state.server)
    _attach_ollama(app, model)  # last, since the live view's page has precedence at its path
    _add_middleware(app, settings, keys, metrics)
    return app


def _observe(engine: AsyncLLM, metrics: ServerMetrics, in_flight: InFlight) -> None:
    """Let the metrics follow an engine's steps and requests."""
    in_flight.listeners.append(metrics.record_of_key)
    metrics.describe_cache(engine.config)
    engine.observers.append(OnStep(metrics.on_step))


def _add_middleware(app: FastAPI, settings: ServerSettings, keys: ApiKeys, metrics: ServerMetrics) -> None:
    """Add the middleware, innermost first: a request passes it in reverse order."""
    limits = {"max_bytes": settings.max_body_bytes, "max_client_bytes": settings.max_client_bytes}
    app.add_middleware(BodyGate, keys=keys, **limits)
    if settings.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origin),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # client libraries send custom headers; the API key still protects the endpoints
            expose_headers=["Retry-After", "X-Request-Id"],
        )
    if (allowed := allowed_names(settings)) is not None:
        app.add_middleware(HostGate, allowed=allowed)
    app.add_middleware(CountResponses, metrics=metrics)
    app.add_middleware(RequestLog, keys=keys, is_logged=settings.access_log)
    app.add_middleware(Turns, client_of=partial(client_name, keys=keys, header=settings.client_header))
    if settings.root_path:
        app.add_middleware(RootPath, root_path=settings.root_path)


def _attach_ollama(app: FastAPI, model: str | os.PathLike[str]) -> None:
    """Serve Ollama's API, or name the missing folder below /api where an installation lacks it."""
    try:
        from nanovllm.serving.server.ollama import catalogue
    except ModuleNotFoundError as error:
        if error.name is None or not f"{error.name}.".startswith("nanovllm.serving.server.ollama."):
            raise

        @app.api_route("/api/{path:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
        async def missing(path: str) -> None:
            raise errors.ApiError(
                404, "this installation lacks Ollama's API, the folder nanovllm.serving.server.ollama."
            )

        return
    catalogue.attach(app, app.state.server, model)


def _in_flight(engine: AsyncLLM, settings: ServerSettings, model_name: str) -> InFlight:
    """Track the engine's requests; raises MissingLibraryError if spans are enabled and their packages missing."""
    in_flight = InFlight()
    if settings.otlp_traces_endpoint is not None:
        check_extra("otlp_traces_endpoint", "otel", *SPANS_NEED)
        from nanovllm.serving.server.spans import SpanWriter, exporting  # imports opentelemetry

        in_flight.listeners.append(SpanWriter(exporting(settings.otlp_traces_endpoint), model_name).write)
    engine.on_request_end.append(in_flight.end)
    return in_flight


def serve(
    model: str,
    tokenizer: str | None,
    settings: ServerSettings,
    engine_options: dict[str, Any],
    listeners: Sequence[socket.socket],
) -> int:
    """Load a model and serve it until SIGTERM or SIGINT; returns the exit code: 0, or 1 if the engine died.

    Args:
        listeners: sockets that `prepare` bound; the caller closes them.
    """
    if settings.log_format == "json":
        write_json(JsonFormatter())
    allow_open_files(settings.max_connections)
    log_exposure(settings, has_keys=bool(settings.api_keys()))
    open_front = front_door(
        engine_options, engine_process=settings.engine_process, updates_weights=settings.allow_weight_updates
    )
    engine = open_front(model, tokenizer=tokenizer, prepares_when_idle=True, **engine_options)
    if settings.log_format == "json":
        write_json(JsonFormatter())
    app = create_app(engine, settings, model=model)
    try:
        asyncio.run(load_given_adapters(app.state.server))
        server = build_server(app, engine, settings)
        sys.setswitchinterval(SWITCH_SECONDS)
        gc.freeze()  # a collection would block the event loop for 0.3 seconds
        server.run(list(listeners))
    finally:
        if app.state.recorder is not None:
            app.state.recorder.close()
    return server.exit_code


def build_server(app: Any, engine: AsyncLLM, settings: ServerSettings) -> DrainingServer:
    """Configure uvicorn for an application, within the limits of `settings`."""
    config = uvicorn.Config(
        with_abort(app),
        host=settings.host,
        port=settings.port,
        http=protocol_class(settings),
        ws="none",  # an upgraded connection would bypass the limits of `protocol_class`
        log_config=None,
        access_log=False,  # `RequestLog` has more to say
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=int(LAST_SECONDS),
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
    )
    return DrainingServer(config, engine, app.state.server.admission, settings.drain_timeout)
