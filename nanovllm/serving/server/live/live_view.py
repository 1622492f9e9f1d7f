"""Live view at /: a page with a prompt for the model and the state of the running engine.

The page is public and holds no server data; its data comes from endpoints that require the API key.
"""

from __future__ import annotations

import base64
import hashlib
import re
import uuid
from functools import cache

from fastapi import APIRouter, Depends, FastAPI
from starlette.responses import HTMLResponse, Response

from nanovllm import __version__
from nanovllm.observability.pages import read_page
from nanovllm.observability.step_records import RECENT_STEPS, OnStep
from nanovllm.serving.server.errors import ApiError
from nanovllm.serving.server.live.engine_snapshot import REQUEST_VALUES, STEP_VALUES
from nanovllm.serving.server.live.live_feed import MAX_WATCHERS, LiveFeed
from nanovllm.serving.server.security import require_api_key
from nanovllm.serving.server.state import ServerState


def attach(app: FastAPI, state: ServerState) -> LiveFeed:
    """Serve the page at / and its feed at /ui/events."""
    config = state.engine.config
    feed = LiveFeed(
        state.engine,
        {
            "instance": uuid.uuid4().hex,  # changes when the server restarts
            "model": state.model_name,
            "takes_pictures": state.engine.takes_pictures,
            "version": __version__,
            "budget": config.max_num_batched_tokens,
            "block_size": config.block_size,
            "num_blocks": (config.num_kv_blocks - 1) * config.data_parallel_size,
            "max_queue": config.max_queue,
            "max_model_len": config.max_model_len,
            "backend": config.attention_backend,
            "replicas": config.data_parallel_size,
            "host_bytes": (config.prefix_cache_host_bytes or 0) * config.data_parallel_size,
            # Bytes of the first rank's files, which its statistics describe.
            "dir_bytes": config.prefix_cache_dir_bytes // config.tensor_parallel_size if config.prefix_cache_dir else 0,
            "num_steps": RECENT_STEPS,
            "step_values": STEP_VALUES,
            "request_values": REQUEST_VALUES,
        },
        state.in_flight.questions,
    )
    state.engine.observers.append(OnStep(feed.on_step))
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def page() -> Response:
        text, policy = live_page()
        headers = {
            "Content-Security-Policy": policy,
            "Cache-Control": "no-cache",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        return HTMLResponse(text, headers=headers)

    @router.get("/ui/events", dependencies=[Depends(require_api_key)])
    async def events() -> Response:
        if feed.is_full:
            raise ApiError(
                503, f"{MAX_WATCHERS} pages already watch the engine, the limit; close one.", code="too_many_watchers"
            )
        return state.event_stream(feed.watch())

    app.include_router(router)
    return feed


@cache
def live_page() -> tuple[str, str]:
    """Return the page and its content security policy, which allows only its scripts, its style and its server.

    "trusted-types 'none'": no script may hand a string to the HTML parser or to eval, so that text stays text.
    """
    page = read_page("live.html")
    scripts, styles = (
        " ".join(f"'{_digest(text)}'" for text in re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL))
        for tag in ("script", "style")
    )
    sources = {"script-src": scripts, "style-src": styles, "connect-src": "'self'"}
    sources |= dict.fromkeys(("default-src", "base-uri", "form-action", "frame-ancestors", "trusted-types"), "'none'")
    sources["require-trusted-types-for"] = "'script'"
    sources["img-src"] = "data:"  # its icon, and thumbnails
    return page, "; ".join(f"{name} {value}" for name, value in sources.items())


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
