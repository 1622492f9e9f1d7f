"""Server life cycle: admission of requests, draining on SIGTERM and SIGINT, and exit when the engine dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from types import FrameType

import uvicorn

from nanovllm.errors import EngineClosedError, QueueFullError
from nanovllm.features.engine_stats import ReplicaStatus
from nanovllm.serving.async_llm import AsyncLLM
from nanovllm.serving.server import errors
from nanovllm.serving.server.listening import allow_restart, format_address
from nanovllm.serving.server.retry_after import RetryAfter

logger = logging.getLogger("nanovllm")

POLL_SECONDS = 0.05
# Seconds for clients to read their last events, and for probes to see /health at 503.
LAST_SECONDS = 2.0


class Admission:
    """Counts open answers, and refuses new ones while the server drains or the queue is full.

    Args:
        stall_timeout: seconds without the end of a step, while requests run, after which the engine counts as stalled.
    """

    def __init__(self, engine: AsyncLLM, stall_timeout: float) -> None:
        self._engine = engine
        self._stall_timeout = stall_timeout
        self.retry_after = RetryAfter()
        self.is_draining = False
        self.num_open = 0
        config = engine.config
        # Maximum number of samples in the engine, queue included; None: no limit.
        max_running = config.max_num_seqs * config.data_parallel_size
        self.max_unfinished = None if config.max_queue is None else max_running + config.max_queue

    def check(self) -> None:
        """Raise ApiError (503) if the engine is dead or the server drains."""
        if self._engine.is_dead:
            raise errors.engine_dead()
        if self.is_draining:
            raise errors.shutting_down()

    @property
    def is_stalled(self) -> bool:
        return self._engine.heartbeat().age > self._stall_timeout

    def check_progress(self) -> None:
        """Raise ApiError (503) if the engine has stalled."""
        if self.is_stalled:
            raise errors.engine_stalled(self._engine.heartbeat().age, self._stall_timeout)

    def check_replicas(self) -> list[ReplicaStatus]:
        """The replicas' states; raises ApiError (503) if none is up."""
        replicas = self._engine.replicas()
        if replicas and not any(replica.state == "up" for replica in replicas):
            raise errors.no_replica(len(replicas))
        return replicas

    def queue_full(self) -> errors.ApiError:
        """Build the error (429) for a request beyond the queue."""
        return errors.queue_full(self.retry_after.seconds(self._engine.heartbeat().stats.num_waiting))

    def api_error(self, error: Exception, names: Sequence[str]) -> errors.ApiError:
        """Convert an engine's error; `names` are the fields that it may name."""
        if isinstance(error, QueueFullError):
            return self.queue_full()
        if self.is_draining and isinstance(error, EngineClosedError):
            return errors.shutting_down()
        return errors.from_engine(error, names)

    @contextlib.contextmanager
    def open_answer(self) -> Iterator[None]:
        """Hold one answer open, from before it is queued to its last byte; raises as `check`, or ApiError (429)."""
        self.check()
        # The engine limits queued samples; twice the limit leaves room for answers that slow clients still read.
        if self.max_unfinished is not None and self.num_open >= 2 * self.max_unfinished:
            raise self.queue_full()
        if not self.num_open:
            self.retry_after.record_busy()
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1


class DrainingServer(uvicorn.Server):
    """uvicorn server that drains on SIGTERM or SIGINT: new requests get 503, open answers may finish until a deadline.

    Closing the engine then ends the rest with a last event. A second signal closes at once.

    Args:
        drain_timeout: seconds for open answers to finish.

    exit_code: exit code of the process: 1 if the engine died, else 0.
    """

    def __init__(self, config: uvicorn.Config, engine: AsyncLLM, admission: Admission, drain_timeout: float) -> None:
        super().__init__(config)
        self.exit_code = 0
        self._engine = engine
        self._admission = admission
        self._drain_timeout = drain_timeout
        self._is_hurried = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in sockets or ():
            allow_restart(listener)
        await super().startup(sockets)
        if sockets:  # uvicorn logs no address for given sockets
            address = format_address(self.config.host, sockets[0].getsockname()[1])
            scheme = "https" if self.config.is_ssl else "http"
            logger.info("running on %s://%s (press Ctrl+C to stop)", scheme, address)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._admission.is_draining:
            self._is_hurried = True
        self._admission.is_draining = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals without re-raising them at the end, as uvicorn does: a requested stop is no failure."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def main_loop(self) -> None:
        """Run until a signal or the engine's death, then drain."""
        tick = 0
        while not self._admission.is_draining and not self._engine.is_dead:
            if await self.on_tick(tick):  # keeps the Date header
                break
            tick += 1
            await asyncio.sleep(0.1)
        if self._engine.is_dead:
            logger.error("the engine has failed; shutting down")
            await asyncio.sleep(LAST_SECONDS)
        else:
            logger.info("shutting down: %d open answers", self._admission.num_open)
            if not await self._wait_until_idle(self._drain_timeout):
                logger.warning(
                    "%d answers did not finish within drain_timeout and are aborted", self._admission.num_open
                )
        await self._engine.close()
        await self._wait_until_idle(LAST_SECONDS)
        self.exit_code = int(self._engine.is_dead)

    async def _wait_until_idle(self, seconds: float) -> bool:
        clock = asyncio.get_running_loop().time
        end = clock() + seconds
        while self._admission.num_open and clock() < end and not self._is_hurried and not self._engine.is_dead:
            await asyncio.sleep(POLL_SECONDS)
        return not self._admission.num_open
