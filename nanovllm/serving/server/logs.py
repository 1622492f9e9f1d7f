"""Logs of a server: a line for each request, and JSON for machines that read them."""

from __future__ import annotations

import logging
import time
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm.observability.json_lines import JsonLines, iso
from nanovllm.serving.server.request_facts import CURRENT, REQUEST_ID, RequestFacts, given_id
from nanovllm.serving.server.security import ApiKeys, authorization_of
from nanovllm.serving.server.sse import CLIENT_GONE

logger = logging.getLogger("nanovllm.access")

SCOPE_KEY = "nanovllm.request_id"  # key of the request id in the ASGI scope


class RequestLog:
    """Middleware that sets the x-request-id of each request and its response, and logs a line at its end.

    Args:
        is_logged: True to log a line per request.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, *, is_logged: bool) -> None:
        self._app = app
        self._keys = keys
        self._is_logged = is_logged

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        facts = RequestFacts(given_id(headers), self._keys.name_of(authorization_of(headers)), scope["path"])
        facts.headers = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        scope[SCOPE_KEY] = facts.request_id
        status, begin = CLIENT_GONE, time.monotonic()

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = facts.request_id
            await send(message)

        token = CURRENT.set(facts)
        try:
            await self._app(scope, receive, tagged)
        except Exception:
            status = 500  # the handler of this error is outside this middleware
            raise
        finally:
            if self._is_logged:
                _log(scope, facts, status, time.monotonic() - begin)
            CURRENT.reset(token)


def _log(scope: Scope, facts: RequestFacts, status: int, seconds: float) -> None:
    client = scope.get("client")
    values: dict[str, Any] = {
        "client": f"{client[0]}:{client[1]}" if client else "-",
        "method": scope["method"],
        "path": scope["path"],  # the query is left out: it may hold a secret
        "status": status,
        "seconds": round(seconds, 4),
        "key": facts.key,
        "answer": facts.answer_id,
    }
    logger.info(
        "%s %s %s %s %d %.3fs key=%s request=%s%s", iso(time.time()), values["client"], values["method"],
        values["path"].encode("unicode_escape").decode(), status, seconds, facts.key, facts.request_id,
        f" answer={facts.answer_id}" if facts.answer_id else "",
        extra={"access": values},
    )  # fmt: skip


class JsonFormatter(JsonLines):
    """JSON lines with the request_id of their request, and the fields of an access."""

    def values(self, record: logging.LogRecord) -> dict[str, Any]:
        line = super().values(record)
        if (facts := CURRENT.get()) is not None:
            line["request_id"] = facts.request_id
        if access := getattr(record, "access", None):
            line |= {"message": "access"} | access
        return line
