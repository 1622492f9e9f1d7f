"""Allowed Host headers, against DNS rebinding to a loopback server, warnings for an exposed one, and a proxy's path."""

from __future__ import annotations

import ipaddress
import logging

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from nanovllm.serving.server.errors import ApiError
from nanovllm.serving.server.listening import format_address
from nanovllm.serving.server.settings import ServerSettings

logger = logging.getLogger("nanovllm")

LOOPBACK_NAMES = frozenset(("localhost", "127.0.0.1", "::1"))
ANY = "*"
POLICY_VIOLATION = 1008  # websocket close code


def host_name(header: str) -> str:
    """Return the lower-case name of a Host header, without port, brackets and trailing dot."""
    name = header.strip().lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    return name.removesuffix(".")


def is_loopback(host: str) -> bool:
    """Whether a host is a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def allowed_names(settings: ServerSettings) -> frozenset[str] | None:
    """Return the allowed names; None allows any."""
    given = frozenset(name if ":" in name and "[" not in name else host_name(name) for name in settings.allowed_hosts)
    if ANY in given or not (given or is_loopback(settings.host)):
        return None
    return LOOPBACK_NAMES | given | {settings.host.lower()}


def log_exposure(settings: ServerSettings, *, has_keys: bool) -> None:
    """Log a server that is reachable from other machines without an API key or Host check."""
    if is_loopback(settings.host):
        return
    address = format_address(settings.host, settings.port)
    if not has_keys:
        logger.warning(
            "listening on %s without an API key: anyone who reaches this address can use the model and read /metrics. "
            "Set NANOVLLM_API_KEY or --api-key-file, or listen on 127.0.0.1.",
            address,
        )
    if allowed_names(settings) is None:
        logger.info("listening on %s for any Host header; --allowed-hosts restricts it", address)


class RootPath:
    """Middleware that removes the path prefix under which a proxy serves this server, if the proxy does not.

    Args:
        root_path: URL path without a trailing slash.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(f"{self._root_path}/"):
            scope = {**scope, "path": scope["path"].removeprefix(self._root_path)}
        await self._app(scope, receive, send)


class HostGate:
    """Middleware that refuses requests with a foreign Host header (421).

    A request without the header passes: browsers always send it.

    Args:
        allowed: lower-case names without ports, see `allowed_names`.
    """

    def __init__(self, app: ASGIApp, allowed: frozenset[str]) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            for header in Headers(scope=scope).getlist("host"):
                if host_name(header) not in self._allowed:
                    await self._refuse(header, scope, receive, send)
                    return
        await self._app(scope, receive, send)

    async def _refuse(self, header: str, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": "unknown host"})
            return
        error = ApiError(
            421,
            f"the host {header[:128]!r} is not allowed; add it with --allowed-hosts.",
            code="unknown_host",
        )
        await error.response()(scope, receive, send)
