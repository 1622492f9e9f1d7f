"""OpenAI's batch files: each line of the input is a request to an endpoint, each line of the output its response.

The requests go through the server's application within the process, many at a time, without a socket.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message

from nanovllm.config import MAX_PRIORITY
from nanovllm.errors import EngineDeadError
from nanovllm.serving.async_llm import AsyncLLM
from nanovllm.serving.server.adapters import load_given_adapters
from nanovllm.serving.server.app import create_app
from nanovllm.serving.server.batch_files import BatchRequest
from nanovllm.serving.server.errors import ApiError
from nanovllm.serving.server.settings import ServerSettings

logger = logging.getLogger("nanovllm")

MANY = 2**24
# The file is its owner's: no limit but the engine's.
UNLIMITED: dict[str, Any] = {
    "max_body_bytes": 2**31, "max_body_items": MANY, "max_messages": MANY, "max_tools": MANY, "max_word_chars": MANY,
    "max_prompts": MANY, "max_samples": MANY, "max_logprobs": MANY, "min_priority": -MAX_PRIORITY, "ui": False,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """One line of the output; `status` is the response's HTTP status."""

    custom_id: str
    status: int
    line: str


def batch_settings(served_model_name: str | None, adapter: dict[str, str] | None = None) -> ServerSettings:
    """The settings for the owner of a batch file; `adapter` has the path of each adapter by its name."""
    names = () if served_model_name is None else (served_model_name,)
    return ServerSettings(served_model_name=names, adapter=adapter, **UNLIMITED)


async def run_batch(
    engine: AsyncLLM,
    settings: ServerSettings,
    requests: Sequence[BatchRequest],
    write: Callable[[BatchAnswer], None],
    *,
    model: str,
) -> None:
    """Answer the requests, and write each answer when it is complete; closes the engine.

    Raises EngineDeadError: requests without a written answer were not answered.
    """
    config = engine.config
    num_open = 2 * config.max_num_seqs * config.data_parallel_size  # keeps the engine busy, and memory bounded
    async with engine:
        app = create_app(engine, settings, model=model)
        await load_given_adapters(app.state.server)
        pending = iter(requests)

        async def work() -> None:
            for request in pending:
                write(await _answer(app, engine, request))

        async with asyncio.TaskGroup() as group:
            for _ in range(min(num_open, len(requests))):
                group.create_task(work())


async def _answer(app: ASGIApp, engine: AsyncLLM, request: BatchRequest) -> BatchAnswer:
    if request.streams:
        headers: dict[str, str] = {}
        error = ApiError(400, "stream is true; a line of a batch has one response. Leave stream out.", param="stream")
        status = 400
        body = error.body()
    else:
        status, headers, body = await _post(app, request.url, request.body)
    if engine.is_dead:
        raise EngineDeadError("the engine failed, and the batch with it; --resume goes on with what is not answered.")
    response = {
        "status_code": status,
        "request_id": headers.get("x-request-id") or f"req_{uuid.uuid4().hex}",
        "body": body,
    }
    line = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": request.custom_id, "response": response, "error": None}
    return BatchAnswer(request.custom_id, status, json.dumps(line, ensure_ascii=True))


async def _post(app: ASGIApp, path: str, body: bytes) -> tuple[int, dict[str, str], Any]:
    """Post a body to the application; returns status, headers and JSON of the response."""
    received: Iterator[Message] = iter([{"type": "http.request", "body": body, "more_body": False}])
    sent: list[Message] = []

    async def receive() -> Message:
        if (message := next(received, None)) is not None:
            return message
        await asyncio.Event().wait()  # nobody disconnects
        raise RuntimeError("the application read on after the end of the body.")

    async def send(message: Message) -> None:
        sent.append(message)

    headers = {"host": "localhost", "content-type": "application/json", "content-length": str(len(body))}
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 0), "server": ("127.0.0.1", 0),
    }  # fmt: skip
    try:
        await app(scope, receive, send)
    except Exception:  # a defect: the application has answered with 500, and raises it for the log
        if not sent:
            raise
        logger.exception("the server failed to answer a line")
    start = sent[0]
    data = b"".join(message.get("body", b"") for message in sent[1:])
    return start["status"], {name.decode(): value.decode() for name, value in start["headers"]}, json.loads(data)
