"""Who may call, and how much they may send."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm.server.errors import ApiError


class ApiKeys:
    """The keys that are accepted; without any, everybody may call.

    Raises ValueError for a key that no header can bring.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        for number, key in enumerate(keys, 1):  # its value must not show in a log
            if not (key.isascii() and key.isprintable() and key == key.strip()):
                raise ValueError(
                    f"API key {number} holds more than ASCII, or space at an end; no request could bring it."
                )
        self._keys = {hashlib.sha256(key.encode()).digest(): key for key in keys}

    def check(self, authorization: str | None) -> str | None:
        """The key that an Authorization header brings, or None if none is asked for; raises ApiError (401).

        How long it takes tells nothing about the keys: digests of equal length are compared, each of them.
        """
        if not self._keys:
            return None
        scheme, _, given = (authorization or "").partition(" ")
        digest = hashlib.sha256(given.strip().encode("utf-8", "surrogateescape")).digest()
        found = None
        for known, key in self._keys.items():
            if hmac.compare_digest(known, digest):
                found = key
        if found is None or scheme.lower() != "bearer":
            raise ApiError(
                401,
                "this server asks for an API key: send it as 'Authorization: Bearer KEY'."
                if not authorization
                else "the API key is not one of this server's.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return found


def require_api_key(request: Request) -> str | None:
    """A dependency: the key of the request, or None if the server asks for none; raises ApiError (401)."""
    keys: ApiKeys = request.app.state.api_keys
    return keys.check(request.headers.get("authorization"))


class BodyGate:
    """Lets no body in without a key, nor one that is too large; neither is read to its end.

    Args:
        max_bytes: the largest body.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, max_bytes: int) -> None:
        self._app, self._keys, self._max_bytes = app, keys, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._keys.check(headers.get("authorization"))
            length = headers.get("content-length", "0")
            if length.isdecimal() and int(length) > self._max_bytes:
                raise self._too_large()
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, self._counted(receive), send)

    def _counted(self, receive: Receive) -> Receive:
        """For a body that does not say how long it is."""
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise self._too_large()
            return message

        return counted

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"the body has more than {self._max_bytes} bytes, the server's limit.", code="body_too_large"
        )
