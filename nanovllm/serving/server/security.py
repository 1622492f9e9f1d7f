"""API keys, and the size limit of bodies."""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Mapping, Sequence

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm.features.intake.intake import CLIENT
from nanovllm.serving.server.errors import ApiError
from nanovllm.serving.server.request_facts import NO_KEY

MAX_CLIENT_CHARS = 256


class ApiKeys:
    """Accepted API keys; without any, no key is required.

    Args:
        names: names of keys, for logs and metrics; further keys are called key-1, key-2 and so on, in their order.

    Raises ValueError for a key that a header cannot hold.
    """

    def __init__(self, keys: Sequence[str], names: Mapping[str, str] | None = None) -> None:
        for number, key in enumerate(keys, 1):  # the value must not appear in a log
            if not (key.isascii() and key.isprintable() and key == key.strip()):
                raise ValueError(
                    f"API key {number} is not printable ASCII without outer spaces, as a header needs. Replace it."
                )
        numbered = {key: f"key-{number}" for number, key in enumerate(dict.fromkeys(keys), 1)}
        self._names = numbered | dict(names or {})
        self._keys = {hashlib.sha256(key.encode()).digest(): key for key in keys}

    def check(self, authorization: str | None) -> str | None:
        """Return the key of an Authorization header, None if no key is required; raises ApiError (401).

        Constant time: compares digests of equal length, against every key.
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
                "an API key is required: send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'."
                if not authorization
                else "invalid API key.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return found

    def name_of(self, authorization: str | None) -> str:
        """Return the name of the key in an Authorization header, NO_KEY for none, "invalid" for a wrong one."""
        try:
            key = self.check(authorization)
        except ApiError:
            return "invalid" if authorization else NO_KEY
        return self.name_of_key(key)

    def name_of_key(self, key: str | None) -> str:
        """Return the name of an accepted key, NO_KEY for none."""
        return NO_KEY if key is None else self._names[key]


def authorization_of(headers: Headers) -> str | None:
    """The Authorization header of a request; x-api-key, which Anthropic's clients send, as Bearer."""
    given = headers.get("x-api-key")
    return headers.get("authorization") or (None if given is None else f"Bearer {given}")


def key_of(request: Request) -> str | None:
    """The key of a request, None if no key is required; raises ApiError (401)."""
    keys: ApiKeys = request.app.state.api_keys
    return keys.check(authorization_of(request.headers))


def client_of(request: Request, header: str | None, key: str | None) -> str:
    """The client of a request with an accepted key: the value of `header`, else the key's name, "" without keys.

    Raises ApiError (400) for a name that is too long.
    """
    keys: ApiKeys = request.app.state.api_keys
    named = None if header is None else request.headers.get(header)
    if named is not None and len(named) > MAX_CLIENT_CHARS:
        raise ApiError(
            400,
            f"the header {header} has {len(named)} characters; a client's name has at most {MAX_CLIENT_CHARS}. Send "
            "a shorter one.",
        )
    return named or ("" if key is None else keys.name_of_key(key))


def client_name(scope: Scope, keys: ApiKeys, header: str | None) -> str:
    """The client of any request: as `client_of`; without a name or an accepted key its address. Raises nothing."""
    headers = Headers(scope=scope)
    try:
        key = keys.check(authorization_of(headers))
    except ApiError:
        return _address(scope)
    named = None if header is None else headers.get(header)
    return (named or "")[:MAX_CLIENT_CHARS] or (_address(scope) if key is None else keys.name_of_key(key))


def _address(scope: Scope) -> str:
    """The address of a peer, in no form that a key's name or a header has by chance."""
    peer = scope.get("client")
    return f"address {peer[0]}" if peer else "address"


async def require_api_key(request: Request) -> None:
    """FastAPI dependency: raises ApiError (401). A coroutine, since FastAPI calls functions in threads."""
    key_of(request)


class BodyGate:
    """Middleware that refuses bodies without a key or above the size limits before reading them to the end.

    Args:
        max_bytes: maximum size of a body.
        max_client_bytes: maximum size of the bodies of a client's open requests.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, max_bytes: int, max_client_bytes: int) -> None:
        self._app = app
        self._keys = keys
        self._max_bytes = max_bytes
        self._max_client_bytes = max_client_bytes
        self._held: Counter[str] = Counter()  # bytes of bodies by client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._keys.check(authorization_of(headers))
            length = headers.get("content-length", "0")
            if length.isdecimal() and int(length) > self._max_bytes:
                raise self._too_large()
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send)
            return
        await self._counted(scope, receive, send)

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Limit the bytes of a body while it is read, and of all bodies of its client."""
        client = CLIENT.get() or ""
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_new = len(message.get("body", b""))
            num_bytes += num_new
            self._held[client] += num_new
            if num_bytes > self._max_bytes:
                raise self._too_large()
            if self._held[client] > self._max_client_bytes:
                raise ApiError(
                    429,
                    f"the bodies of this client's open requests have more than {self._max_client_bytes} bytes "
                    "(max_client_bytes). Send fewer or shorter requests at once, or raise the limit.",
                    code="too_many_bytes",
                )
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._held[client] -= num_bytes
            if not self._held[client]:
                del self._held[client]

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body has more than {self._max_bytes} bytes (max_body_bytes). Send a smaller one.",
            code="body_too_large",
        )
