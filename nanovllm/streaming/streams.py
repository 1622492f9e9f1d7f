"""Where outputs wait between the engine's thread and its clients' event loops.

Invariant: a stream keeps at most one output of a request, however slowly it is read. A newer cumulative output
replaces the one that waits, and a newer delta is appended to it, so nothing is lost, nobody is waited for, and memory
is bounded.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable

from nanovllm.outputs import OutputKind, RequestOutput


class Stream:
    """The outputs of one request or several, for one reader in the event loop that built it."""

    def __init__(self, kind: OutputKind) -> None:
        self.loop = asyncio.get_running_loop()
        self.is_due = False  # its reader is about to be woken; the router's
        self._kind = kind
        self._lock = threading.Lock()
        self._waiting: dict[str, RequestOutput] = {}  # by request id
        self._refusal: Callable[[], Exception] | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        """From the engine's thread."""
        with self._lock:
            waiting = self._waiting.get(output.request_id)
            if waiting is not None and self._kind is OutputKind.DELTA:
                waiting.extend(output)
            else:
                self._waiting[output.request_id] = output

    def end(self, refusal: Callable[[], Exception]) -> None:
        """From the engine's thread: nothing more will come; once all is read, the reader is told why."""
        with self._lock:
            self._refusal = refusal

    def wake(self) -> None:
        """From the reader's event loop: look again."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def next(self) -> RequestOutput:
        """What has come since the last one; raises what the stream was ended with."""
        while True:
            with self._lock:
                if self._waiting:
                    return self._waiting.pop(next(iter(self._waiting)))
                refusal = self._refusal
            if refusal is not None:
                raise refusal()
            # Whatever is put from here on wakes us later, since waking happens in this very event loop.
            self._reader = self.loop.create_future()
            await self._reader


class OutputStream:
    """An asynchronous iterator over the outputs of requests that were queued together, as they come.

    Who does not read it to its end must close it (`aclose`, `contextlib.aclosing`), which aborts what is unfinished.
    """

    def __init__(self, stream: Stream, request_ids: Iterable[str], abandon: Callable[[set[str], Stream], None]) -> None:
        self._stream, self._abandon = stream, abandon
        self._unfinished = set(request_ids)

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if not self._unfinished:
            raise StopAsyncIteration
        output = await self._stream.next()
        if output.finished:
            self._unfinished.discard(output.request_id)
        return output

    async def aclose(self) -> None:
        """Abort what is unfinished, before the next step, and give no more; again does nothing."""
        left, self._unfinished = self._unfinished, set()
        if left:
            self._abandon(left, self._stream)


class OutputRouter:
    """The open streams of one engine; wakes the readers of a step's outputs with one call for each event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of all below
        self._streams: dict[str, Stream] = {}
        self._due: dict[asyncio.AbstractEventLoop, list[Stream]] = {}

    def open(self, request_id: str, stream: Stream) -> None:
        with self._lock:
            self._streams[request_id] = stream

    def close(self, request_id: str, stream: Stream) -> bool:
        """Forget a stream; returns whether it was open under this id."""
        with self._lock:
            if self._streams.get(request_id) is not stream:
                return False
            del self._streams[request_id]
            return True

    def deliver(self, outputs: list[RequestOutput]) -> list[str]:
        """Leave outputs for their readers; returns the ids of those whose event loop is closed."""
        streams = []
        with self._lock:
            for output in outputs:
                stream = self._streams.get(output.request_id)
                if stream is None:
                    continue  # its reader has left, and the request is about to be aborted
                if output.finished:
                    del self._streams[output.request_id]
                stream.put(output)
                streams.append(stream)
        return self._wake(streams)

    def without_loop(self) -> list[str]:
        """The ids of streams whose event loop is closed."""
        with self._lock:
            return [request_id for request_id, stream in self._streams.items() if stream.loop.is_closed()]

    def end(self, refusal: Callable[[], Exception]) -> None:
        """End every stream; each reader is given an exception of its own."""
        with self._lock:
            streams = list(self._streams.values())
            self._streams.clear()
        for stream in streams:
            stream.end(refusal)
        self._wake(streams)

    def _wake(self, streams: list[Stream]) -> list[str]:
        loops = []
        with self._lock:
            for stream in streams:
                if stream.is_due:
                    continue
                stream.is_due = True
                due = self._due.setdefault(stream.loop, [])
                if not due:
                    loops.append(stream.loop)
                due.append(stream)
        closed = {loop for loop in {stream.loop for stream in streams} if loop.is_closed()}
        for loop in loops:
            try:
                loop.call_soon_threadsafe(self._wake_readers, loop)
            except RuntimeError:  # closed since
                closed.add(loop)
        if not closed:
            return []
        with self._lock:
            for loop in closed:
                self._due.pop(loop, None)
            return [request_id for request_id, stream in self._streams.items() if stream.loop in closed]

    def _wake_readers(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            due = self._due.pop(loop, [])
            for stream in due:
                stream.is_due = False
        for stream in due:
            stream.wake()
