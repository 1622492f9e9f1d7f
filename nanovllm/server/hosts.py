"""Which names a server answers to, against pages that reach a loopback server through a name of their own (DNS
rebinding), and what is logged of a server that others can reach."""

from __future__ import annotations

import ipaddress
import logging

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from nanovllm.server.errors import ApiError
from nanovllm.server.listening import shown
from nanovllm.server.settings import ServerSettings

logger = logging.getLogger("nanovllm")

LOOPBACK_NAMES = frozenset(("localhost", "127.0.0.1", "::1"))
ANY = "*"
POLICY_VIOLATION = 1008  # of a websocket


def host_name(header: str) -> str:
    """The name in a Host header, in lower case, without port, brackets and a final dot."""
    name = header.strip().lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    return name.removesuffix(".")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on this host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def allowed_names(settings: ServerSettings) -> frozenset[str] | None:
    """The names that requests may use; None allows any."""
    given = frozenset(name if ":" in name and "[" not in name else host_name(name) for name in settings.allowed_hosts)
    if ANY in given or not (given or is_loopback(settings.host)):
        return None
    return LOOPBACK_NAMES | given | {settings.host.lower()}


def log_exposure(settings: ServerSettings, *, has_keys: bool) -> None:
    """Log what a server that others can reach leaves open."""
    if is_loopback(settings.host):
        return
    address = shown(settings.host, settings.port)
    if not has_keys:
        logger.warning(
            "listening on %s without an API key: whoever reaches this address may use the model and read /metrics. "
            "Set NANOVLLM_API_KEY or --api-key-file, or listen on 127.0.0.1.",
            address,
        )
    if allowed_names(settings) is None:
        logger.info("listening on %s for requests with any Host header; --allowed-hosts narrows them", address)


class HostGate:
    """Refuses a request whose Host header names none of the allowed hosts, whatever its path, before anything else.

    Without the header no browser asks, so such a request passes.

    Args:
        allowed: lower-case names without ports, see `allowed_names`.
    """

    def __init__(self, app: ASGIApp, allowed: frozenset[str]) -> None:
        self._app, self._allowed = app, allowed

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
            f"this server does not answer to the host {header[:128]!r}; start it with --allowed-hosts and this name.",
            code="unknown_host",
        )
        await error.response()(scope, receive, send)
