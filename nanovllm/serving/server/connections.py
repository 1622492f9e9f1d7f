"""Connection limits: number of sockets, size of headers, and timeouts of headers and bodies; malformed requests.

uvicorn reads headers of any size (under httptools) and waits for them without a timeout before it calls the app, so
the limits are in subclasses of its protocol classes.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import resource
import time
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanovllm.serving.server.errors import ApiError
from nanovllm.serving.server.places import Places
from nanovllm.serving.server.settings import ServerSettings
from nanovllm.serving.server.turns import AT_ONCE

logger = logging.getLogger("nanovllm")
# uvicorn logs a warning per malformed request and per upgrade, and any client can send these.
errors_only = logging.getLogger("uvicorn.error.connections")
errors_only.setLevel(logging.ERROR)

# part of the request that the next bytes belong to
HEAD = "headers"
BODY = "body"
NOTHING = "nothing"
LINE_BYTES = 4  # bytes of a header line that are neither name nor value: colon, space, line end
# After a refusal the socket still reads for this long: closing it at once would reset TCP before the client reads.
LINGER_SECONDS = 1.0
# Limits of pipelined requests per connection, by number (httptools) or bytes (h11).
MAX_PIPELINED = 256
MAX_PIPELINED_BYTES = 2**20
OTHER_FILES = 256  # open files besides connections; those in spare places included
REFUSAL_LOG_SECONDS = 10.0  # least seconds between two log lines about refused connections of the same status


def protocol_class(settings: ServerSettings, name: str = "auto") -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP protocol class with the limits of `settings`.

    Args:
        name: "httptools", "h11", or "auto" for httptools if installed.
    """
    if name == "auto":
        name = "h11" if importlib.util.find_spec("httptools") is None else "httptools"
    shared = {"settings": settings, "refusals": RefusalLog(), "places": Places(settings.max_connections)}
    if name == "h11":
        return type("Connection", (_H11Connection,), shared)
    from nanovllm.serving.server.httptools_connection import HttpToolsConnection

    return type("Connection", (HttpToolsConnection,), shared)


def allow_open_files(max_connections: int) -> None:
    """Raise the soft limit of open files for `max_connections`; logs a warning if the hard limit is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max_connections + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        logger.warning(
            "max_connections is %d, but the process can open only %d files. Raise the hard limit (ulimit -Hn, "
            "LimitNOFILE= of systemd) to %d, or lower max_connections.", max_connections, allowed, needed,
        )  # fmt: skip


class RefusalLog:
    """Logs refused connections, at most one in REFUSAL_LOG_SECONDS for each status: clients can cause any number."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next: dict[int, float] = {}  # time of the next line, by status
        self._num_silent: Counter[int] = Counter()

    def add(self, status: int, message: str) -> None:
        if (now := self._clock()) < self._next.get(status, now):
            self._num_silent[status] += 1
            return
        self._next[status] = now + REFUSAL_LOG_SECONDS
        more = self._num_silent.pop(status, 0)
        since = f" ({more} more with {status} since the last such line)" if more else ""
        logger.info("connection refused with %d: %s%s", status, message, since)


class BoundedConnection(asyncio.Protocol):
    """Mixin for uvicorn's protocol classes: limits open sockets, and the time for headers and bodies.

    A refusal (400, 408, 431, 503) closes the connection. Subclasses set `_part` and `_number` from their parser.
    """

    settings: ClassVar[ServerSettings]
    refusals: ClassVar[RefusalLog]
    places: ClassVar[Places]
    # Attributes of uvicorn's protocol classes
    logger: logging.Logger
    loop: asyncio.AbstractEventLoop
    transport: Any
    cycle: Any
    flow: Any
    server_state: Any

    _part = HEAD
    _number = 0  # index of the request being read
    _has_data = _is_refused = False
    _timed: tuple[int, str] | None = None  # request and part of the running timer
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.logger = errors_only
        self.places.enter(self)
        self._time_part()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._has_data = True
        self._feed_parser(data)
        self._time_part()

    def _feed_parser(self, data: bytes) -> None:
        """Pass data to the parser."""
        super().data_received(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_timer()
        self.places.leave(self)
        super().connection_lost(error)

    def on_response_complete(self) -> None:
        super().on_response_complete()  # type: ignore[misc]  # may start a pipelined request
        if self._part is not NOTHING or not self._is_answering:
            self.places.wait(self)

    def yield_place(self) -> None:
        """Close this connection, which waits for its request or has a spare place, for another one."""
        self.places.leave(self)
        if self._is_refused or self._part is NOTHING:  # a 503 would be read as the answer to a request that begins now
            self.transport.abort()
        else:
            self._refuse_place("this one waited longest for its request")

    # ------------------------------------------------------------------------------------------------------- time

    def _time_part(self) -> None:
        """Start the timer of the current part, unless it runs."""
        part = (self._number, self._part)
        if part == self._timed or self._is_refused:
            return
        self._stop_timer()
        if (self._timed is None or self._timed[0] != self._number) and not self.flow.read_paused:
            self.places.wait(self)  # an earlier request is being answered while reading is paused
        self._timed = part
        if self._is_answering and not self._has_place():
            self._refuse_place("they have answers to send")
            return
        if self._part is not NOTHING:
            self._timer = self.loop.call_later(self._seconds(), self._on_timeout)

    def _has_place(self) -> bool:
        """Whether the request may be answered; notes its end in `places`."""
        path = self.cycle.scope["path"].removeprefix(self.settings.root_path)
        has_place = path in AT_ONCE or self.places.take(self)
        if self._part is NOTHING:
            self.places.serve(self)
        return has_place

    def _seconds(self) -> float:
        return self.settings.header_timeout if self._part is HEAD else self.settings.body_timeout

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        if self.transport.is_closing():
            return
        # Not the client's delay: reading is paused, or the previous answer is unfinished.
        if self.flow.read_paused or (self._part is HEAD and self._is_answering):
            self._timer = self.loop.call_later(self._seconds(), self._on_timeout)
        elif not self._has_data:
            self.transport.close()  # no byte received
        else:
            option = "header_timeout" if self._part is HEAD else "body_timeout"
            self.refuse(
                408,
                f"the request's {self._part} took more than {self._seconds():g} seconds ({option}). Send faster, or "
                "raise the limit.",
                "request_timeout",
            )

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    # ---------------------------------------------------------------------------------------------------- refusals

    def refuse_headers(self) -> None:
        settings = self.settings
        self.refuse(
            431,
            f"the request's line and headers have more than {settings.max_header_bytes} bytes (max_header_bytes) or "
            f"{settings.max_headers} headers (max_headers). Send fewer or shorter ones, or raise the limit.",
            "headers_too_large",
        )

    def _refuse_place(self, why: str) -> None:
        self.refuse(
            503,
            f"all of the server's {self.settings.max_connections} connections (max_connections) are in use, and {why}. "
            "Try again later, or raise it.",
            "too_many_connections",
        )

    def send_400_response(self, msg: str) -> None:
        """Refuse malformed HTTP with JSON; uvicorn would write text, even into the middle of an answer."""
        self.refuse(
            400,
            "the request is not valid HTTP/1.1, or has more than one length of its body. Send well-formed requests.",
            "invalid_http",
        )

    def refuse(self, status: int, message: str, code: str) -> None:
        """Send an error unless an answer has begun, and close the connection."""
        self._is_refused = True
        self._stop_timer()
        if self._is_answering:
            if self.cycle.response_started or self._part is HEAD:  # an error would read as part of the answer
                self.transport.abort()
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        elif self._part is BODY:  # the answer is complete before the request's body is
            self.transport.abort()
            return
        self.refusals.add(status, message)
        body = json.dumps(ApiError(status, message, code=code).body()).encode()
        lines = [b"HTTP/1.1 %d %s" % (status, HTTPStatus(status).phrase.encode())]
        lines += [name + b": " + value for name, value in self.server_state.default_headers]
        lines += [b"content-type: application/json", b"content-length: %d" % len(body), b"connection: close", b"", b""]
        self.transport.write(b"\r\n".join(lines) + body)
        if status == 503:  # sockets that linger would block other connections
            self.places.leave(self)
            self.transport.close()
            if self.transport.get_write_buffer_size():
                self.transport.abort()
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_SECONDS, self.transport.abort)


class BoundedH11Parser(h11.Connection):
    """h11 parser that also limits complete headers and trailers; h11 limits incomplete ones only."""

    def __init__(self, settings: ServerSettings) -> None:
        super().__init__(h11.SERVER, settings.max_header_bytes)
        self._settings = settings
        self.num_requests = 0
        self.part = HEAD  # part that the next bytes belong to
        self.is_too_large = False

    def next_event(self) -> Any:
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            self.is_too_large = error.error_status_hint == 431
            raise
        if isinstance(event, h11.Request):
            self.num_requests += 1
            self.part = HEAD
            self._check(event.headers, len(event.target))
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
                # A gateway may believe the length, and take the bytes after it for another request (RFC 9112, 6.1).
                raise h11.RemoteProtocolError("the body has a length and is in chunks")
            self.part = BODY
        elif isinstance(event, h11.EndOfMessage):
            self._check(event.headers, 0)
            self.part = HEAD
        elif event is h11.PAUSED and len(self.trailing_data[0]) > MAX_PIPELINED_BYTES:
            self._refuse()
        return event

    def _check(self, headers: Any, num_bytes: int) -> None:
        num_bytes += sum(len(name) + len(value) + LINE_BYTES for name, value in headers)
        if num_bytes > self._settings.max_header_bytes or len(headers) > self._settings.max_headers:
            self._refuse()

    def _refuse(self) -> None:
        self.is_too_large = True
        raise h11.RemoteProtocolError("the headers are too large", error_status_hint=431)


class _H11Connection(BoundedConnection, H11Protocol):
    conn: BoundedH11Parser

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = BoundedH11Parser(self.settings)

    def _feed_parser(self, data: bytes) -> None:
        super()._feed_parser(data)
        self._update_part()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # may start a pipelined request
        if self.conn.their_state is h11.SEND_BODY:
            self._update_part()
            self._time_part()

    def _update_part(self) -> None:
        parts = {h11.IDLE: HEAD, h11.SEND_BODY: BODY}
        self._number, self._part = self.conn.num_requests, parts.get(self.conn.their_state, NOTHING)

    def send_400_response(self, msg: str) -> None:
        self._part = self.conn.part
        if self.conn.is_too_large:
            self.refuse_headers()
        else:
            super().send_400_response(msg)

    def shutdown(self) -> None:
        if not self._is_refused:  # `refuse` closes it
            super().shutdown()
