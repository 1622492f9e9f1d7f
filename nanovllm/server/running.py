"""From options to a server that runs until it is told to stop."""

from __future__ import annotations

from typing import Any

import uvicorn

from nanovllm.async_llm import AsyncLLM
from nanovllm.server.app import create_app
from nanovllm.server.connections import allow_open_files, protocol_class
from nanovllm.server.hosts import log_exposure
from nanovllm.server.lifecycle import LAST_SECONDS, DrainingServer
from nanovllm.server.listening import bind
from nanovllm.server.settings import ServerSettings
from nanovllm.server.sse import with_abort


def serve(model: str, tokenizer: str | None, settings: ServerSettings, engine_options: dict[str, Any]) -> int:
    """Load a model and serve it until a signal; returns the process's exit code: 0, or 1 if the engine died."""
    allow_open_files(settings.max_connections)
    listeners = bind(settings.host, settings.port)
    log_exposure(settings, has_keys=bool(settings.api_keys()))
    try:
        engine = AsyncLLM(model, tokenizer=tokenizer, prepares_when_idle=True, **engine_options)
        app = create_app(engine, settings, model=model)
        server = server_of(app, engine, settings)
        server.run(listeners)
    finally:
        for listener in listeners:
            listener.close()
    return server.exit_code


def server_of(app: Any, engine: AsyncLLM, settings: ServerSettings) -> DrainingServer:
    config = uvicorn.Config(
        with_abort(app),
        host=settings.host,
        port=settings.port,
        http=protocol_class(settings),
        ws="none",  # an upgraded connection would leave the protocol's limits
        log_config=None,
        access_log=settings.access_log,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=int(LAST_SECONDS),
    )
    return DrainingServer(config, engine, app.state.server.admission, settings.drain_timeout)
