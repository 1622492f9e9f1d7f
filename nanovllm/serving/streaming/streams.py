"""Output streams between the engine thread and the event loops of its clients.

Invariant: a stream holds at most one output per request, however slowly it is read. A newer cumulative output
replaces the pending one and a newer delta is merged into it, so no token is lost, the engine never waits, and memory
is bounded.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing, suppress

from nanovllm.outputs import CompletionOutput, OutputKind, RequestMetrics, RequestOutput
from nanovllm.sequence import NewRequest

logger = logging.getLogger("nanovllm")

# Callback of the engine thread for a request and its last output; None if the engine ended without one.
OnEnd = Callable[[NewRequest, RequestOutput | None], None]


class Stream:
    """Pending outputs of one or several requests, for one reader in the event loop that built it.

    is_abandoned: its reader has left, so its requests need not be queued any more.
    """

    def __init__(self, kind: OutputKind) -> None:
        self.loop = asyncio.get_running_loop()
        self.is_abandoned = False
        self.is_due = False  # the router is about to wake the reader
        self._kind = kind
        self._lock = threading.Lock()
        self._waiting: dict[str, RequestOutput] = {}  # outputs that the reader has not taken, by request id
        self._refusal: Callable[[], Exception] | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        """Add an output; called in the engine thread."""
        with self._lock:
            waiting = self._waiting.get(output.request_id)
            if waiting is not None and self._kind is OutputKind.DELTA:
                waiting.extend(output)
            else:
                self._waiting[output.request_id] = output

    def end(self, refusal: Callable[[], Exception]) -> None:
        """End the stream; the reader gets `refusal()` after the pending outputs. Called in the engine thread."""
        with self._lock:
            self._refusal = refusal

    def wake(self) -> None:
        """Wake the reader; called in its event loop."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def take(self) -> RequestOutput | None:
        """Return the next pending output, if any; raises the exception that ended the stream."""
        if not self._waiting and self._refusal is None:  # an output put from here on wakes the reader
            return None
        with self._lock:
            if self._waiting:
                return self._waiting.pop(next(iter(self._waiting)))
            refusal = self._refusal
        if refusal is not None:
            raise refusal()
        return None

    def woken(self) -> asyncio.Future[None]:
        """A future of the next wake-up; to be awaited at once."""
        # An output put from here on wakes this reader: `wake` runs in this event loop, so not before the await.
        self._reader = self.loop.create_future()
        return self._reader


class Preparation:
    """Requests of one call until they are queued; its work is cancelled once all of them are aborted.

    work: Task that prepares and queues them.
    aborted: Ids of requests that end as soon as they are queued.
    is_queued: Whether the engine has them; used in its thread.
    """

    def __init__(self, stream: Stream, request_ids: Iterable[str], num_samples: int, arrival_time: float) -> None:
        self.work: asyncio.Future[None]
        self.aborted: set[str] = set()
        self.is_queued = False
        self._stream = stream
        self._ids = set(request_ids)
        self._num_samples = num_samples  # Number of each request
        self._arrival_time = arrival_time

    @property
    def is_dropped(self) -> bool:
        return self.aborted == self._ids

    def abort(self, request_id: str) -> None:
        """Abort one request before it is queued; called in any thread."""
        self.aborted.add(request_id)
        if self.is_dropped:
            with suppress(RuntimeError):  # The event loop is closed, and the work with it
                self._stream.loop.call_soon_threadsafe(self.work.cancel)

    def end(self, now: float) -> None:
        """Put the outputs of requests that will not be queued; called in the engine's thread."""
        if self.is_queued:
            return
        self._stream.is_abandoned = True
        for request_id in self._ids:
            samples = [CompletionOutput(index, "", [], "abort", None) for index in range(self._num_samples)]
            metrics = RequestMetrics(self._arrival_time, finished_time=now)
            self._stream.put(RequestOutput(request_id, None, [], samples, True, 0, metrics))


class OutputStream:
    """Asynchronous iterator over the outputs of requests that were submitted together.

    A reader that stops early must close it (`aclose`, `contextlib.aclosing`), which aborts the unfinished requests.
    """

    def __init__(self, stream: Stream, request_ids: Iterable[str], abandon: Callable[[set[str], Stream], None]) -> None:
        self._stream = stream
        self._abandon = abandon
        self._unfinished = set(request_ids)

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if not self._unfinished:
            raise StopAsyncIteration
        while (output := self._stream.take()) is None:
            await self._stream.woken()
        if output.finished:
            self._unfinished.discard(output.request_id)
        return output

    async def aclose(self) -> None:
        """End the iteration and abort unfinished requests before the next step; idempotent."""
        left = self._unfinished
        self._unfinished = set()
        if left:
            self._abandon(left, self._stream)


async def relay(submit: Callable[[], Awaitable[OutputStream]]) -> AsyncGenerator[RequestOutput, None]:
    """Submit when first read; closing the generator closes the stream."""
    async with aclosing(await submit()) as outputs:
        async for output in outputs:
            yield output


class OutputRouter:
    """Routes outputs to the open streams of one engine, with one wake-up per event loop and step.

    on_end: callbacks for every request that ends, read or abandoned.
    """

    def __init__(self) -> None:
        self.on_end: list[OnEnd] = []
        self._requests: dict[str, NewRequest] = {}  # requests that have not ended; the engine thread alone uses them
        self._lock = threading.Lock()  # guards the two below
        self._streams: dict[str, Stream] = {}
        self._due: dict[asyncio.AbstractEventLoop, list[Stream]] = {}

    def open(self, request: NewRequest, stream: Stream) -> None:
        self._requests[request.request_id] = request
        with self._lock:
            self._streams[request.request_id] = stream

    def close(self, request_id: str, stream: Stream) -> bool:
        """Unregister a stream; returns whether it was open under this id."""
        with self._lock:
            if self._streams.get(request_id) is not stream:
                return False
            del self._streams[request_id]
            return True

    def record_end(self, request_id: str, output: RequestOutput | None) -> None:
        """Call `on_end` once per ended request; called in the engine thread."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        for tell in tuple(self.on_end):
            try:
                tell(request, output)
            except Exception:
                self.on_end.remove(tell)
                logger.exception("%s raised at the end of a request; it is not called again", tell)

    def deliver(self, outputs: list[RequestOutput]) -> list[str]:
        """Put outputs into their streams; returns the request ids of streams with a closed event loop."""
        streams = []
        for output in outputs:
            if output.finished:
                self.record_end(output.request_id, output)
        with self._lock:
            for output in outputs:
                stream = self._streams.get(output.request_id)
                if stream is None:
                    continue  # its reader has closed it; the abort is queued
                if output.finished:
                    del self._streams[output.request_id]
                stream.put(output)
                streams.append(stream)
        return self._wake(streams)

    def without_loop(self) -> list[str]:
        """Return the request ids of streams with a closed event loop."""
        with self._lock:
            return [request_id for request_id, stream in self._streams.items() if stream.loop.is_closed()]

    def end(self, refusal: Callable[[], Exception]) -> None:
        """End every stream, with a separate exception for each reader."""
        for request_id in list(self._requests):
            self.record_end(request_id, None)
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
            except RuntimeError:  # the loop was closed in the meantime
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
