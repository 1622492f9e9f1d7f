"""Server-sent events, and cancellation when the client disconnects."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from nanovllm.serving.server.errors import ApiError

logger = logging.getLogger("nanovllm")

Result = TypeVar("Result")

CLIENT_GONE = 499  # nginx's status of a disconnected client, for the log
ABORT = "nanovllm.abort"  # key in the ASGI scope: function that aborts the connection
SEND = "nanovllm.send"  # likewise: the server's own `send`, for parts of a body that no middleware reads
EVENTS = "text/event-stream"
COMMENT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
compact = json.JSONEncoder(separators=(",", ":")).encode


class ClientGone(Exception):
    """The client disconnected."""


def event(data: str) -> bytes:
    """Encode one line of text as an event."""
    return f"data: {data}\n\n".encode()


def named_event(name: str, data: Any) -> bytes:
    """Encode a JSON value as an event with a name."""
    return f"event: {name}\ndata: {compact(data)}\n\n".encode()


def data_error(error: ApiError) -> bytes:
    """Encode an error as an event in OpenAI's form."""
    return event(compact(error.body()))


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work`; cancels it and raises ClientGone when the client disconnects."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for future in (task, watcher):
            future.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """`until_disconnect` with an ApiError (499) when the client disconnects."""
    try:
        return await until_disconnect(receive, work)
    except ClientGone:
        raise ApiError(CLIENT_GONE, "the client has closed its connection.") from None


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def with_abort(app: ASGIApp) -> ASGIApp:
    """Add the keys ABORT, under uvicorn, and SEND: ASGI has no message to abort a connection with unread data."""

    async def called(scope: Scope, receive: Receive, send: Send) -> None:
        scope[SEND] = send
        transport = getattr(getattr(send, "__self__", None), "transport", None)
        if transport is not None:
            scope[ABORT] = transport.abort
        await app(scope, receive, send)

    return called


class EventStream(Response):
    """Response that streams events, and closes their generator when the client disconnects.

    Sending waits for a slow client while the engine's stream merges deltas, so memory stays bounded. The first event or
    comment sends the status. An ApiError before it becomes the response, one after it the last event.

    Args:
        events: bytes of an event each; an empty item marks the request as admitted: comments may follow.
        error_event: encodes an error in mid-stream.
        send_timeout: seconds after which a client that does not read is disconnected.
        keep_alive: seconds without an event after which a comment is sent, since proxies close silent connections.
        comment: makes the comment.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        error_event: Callable[[ApiError], bytes],
        *,
        send_timeout: float,
        keep_alive: float,
        media_type: str = EVENTS,
        comment: Callable[[], bytes] = lambda: COMMENT,
    ) -> None:
        # X-Accel-Buffering: no makes nginx forward each event at once.
        super().__init__(media_type=media_type, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._error_event = error_event
        self._send_timeout = send_timeout
        self._keep_alive = keep_alive
        self._make_comment = comment
        self._may_begin = self._has_begun = self._is_stalled = False
        self._loop = asyncio.get_running_loop()
        self._busy_since: float | None = None  # start of the pending send
        self._idle_since = self._loop.time()
        self._comment: asyncio.Task[None] | None = None  # comment being sent
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send, self._abort = send, scope.get(ABORT)
        self._send_more = scope.get(SEND, send)  # every token passes here, and middleware reads how a response starts
        try:
            await until_disconnect(receive, self._send_all())
        except (ClientGone, OSError):
            if not self._has_begun:
                await Response(status_code=CLIENT_GONE)(scope, receive, send)
        finally:
            if self._timer is not None:
                self._timer.cancel()
            if self._comment is not None:
                self._comment.cancel()
            await self._events.aclose()

    async def _send_all(self) -> None:
        self._sender = asyncio.current_task()
        self._check_times()
        try:
            async for data in self._events:
                if not data:
                    self._may_begin = True
                elif self._comment is None:
                    await self._write(data, True)
                else:
                    await self._pass_on(data)
        except ApiError as error:
            if not self._has_begun:
                raise
            await self._pass_on(self._error_event(error))
        except asyncio.CancelledError:
            if self._is_stalled:
                raise ClientGone from None
            raise
        await self._pass_on(b"", more_body=False)

    async def _pass_on(self, data: bytes, *, more_body: bool = True) -> None:
        if self._comment is not None:
            await self._comment
        await self._write(data, more_body)

    async def _write(self, data: bytes, more_body: bool) -> None:
        self._busy_since = self._loop.time()
        if not self._has_begun:
            self._has_begun = True
            await self._send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await self._send_more({"type": "http.response.body", "body": data, "more_body": more_body})
        self._busy_since, self._idle_since = None, self._loop.time()

    async def _write_comment(self) -> None:
        try:
            await self._write(self._make_comment(), True)
        finally:
            self._comment = None

    def _check_times(self) -> None:
        """Send a due comment or disconnect a stalled client, and reschedule: one timer per stream, not per event."""
        now = self._loop.time()
        if self._busy_since is not None:
            rest = self._busy_since + self._send_timeout - now
            if rest <= 0:
                self._fail()
                return
        else:
            rest = self._idle_since + self._keep_alive - now
            if rest <= 0:
                rest = self._keep_alive
                if self._may_begin or self._has_begun:
                    self._comment = self._loop.create_task(self._write_comment())
        self._timer = self._loop.call_later(min(rest, self._keep_alive, self._send_timeout), self._check_times)

    def _fail(self) -> None:
        logger.info(
            "a client has not read its stream for %g seconds (send_timeout) and is disconnected", self._send_timeout
        )
        if self._abort is not None:
            self._abort()
        self._is_stalled = True
        if self._sender is not None:
            self._sender.cancel()
