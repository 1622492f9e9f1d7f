"""The thread that owns an engine and runs its add, step and abort, for callers in other threads."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from nanovllm.errors import DeviceError, EngineClosedError, EngineDeadError, ForkedChildError, StepError
from nanovllm.features.engine_stats import ReplicaStatus
from nanovllm.features.updates.pausing import rest_seconds
from nanovllm.outputs import RequestOutput
from nanovllm.serving.streaming.engines import EngineInterface
from nanovllm.serving.streaming.heartbeat import Heartbeat

logger = logging.getLogger("nanovllm")
Result = TypeVar("Result")

# Consecutive failed steps after which their requests end with an error. Earlier ones are retried: memory may have been
# short for a moment.
MAX_FAILED_STEPS = 3
# Seconds between searches for streams with a closed event loop.
CLIENT_CHECK_SECONDS = 1.0
# Seconds after the last request at which idle work begins.
IDLE_SECONDS = 0.5
# Maximum wait for an engine that ends, at the interpreter's exit too: for a running step, and 30 s for replicas that
# have prefixes or block events to write.
CLOSE_SECONDS = 40.0
_LONGEST_WAIT_SECONDS = 3600.0


class OutputSink(Protocol):
    """Destination of an engine's outputs; `OutputRouter` documents the methods."""

    def deliver(self, outputs: list[RequestOutput]) -> list[str]: ...

    def without_loop(self) -> list[str]: ...

    def end(self, refusal: Callable[[], Exception]) -> None: ...


class EngineThread:
    """Steps an engine in its own thread while there is work; uses idle time or sleeps without.

    It runs submitted calls in order between two steps, and hands each step's outputs to the router. It ends when it is
    stopped or when anything except a step fails; later calls are refused, and all streams are ended.

    A second thread does the same once a step, or a call between two, lasts longer than step_timeout: nothing can end
    the step itself, so `join` waits for it no more. If it ends after all, the engine is closed then.
    """

    def __init__(self, engine: EngineInterface, router: OutputSink, *, prepares_when_idle: bool = False) -> None:
        self._engine = engine
        self._router = router
        self._calls: deque[tuple[Future[Any], Callable[[EngineInterface], Any]]] = deque()
        self._answered: Future[Any] | None = None  # future of the call that runs
        self._changes = threading.Condition()  # guards _calls, _is_stopping and _has_ended
        self._is_stopping = False
        self._has_ended = False
        self._hangs = False  # a step lasts longer than step_timeout
        self._cause: BaseException | None = None
        self._last_look = time.monotonic()
        self._stats = engine.stats()  # statistics after the last step
        self._busy_since: float | None = None  # end of the last step, or arrival of work after it; None while idle
        self._wake = engine.wake
        self._captures = prepares_when_idle
        self._has_idle_work = True  # False once it failed
        self._process_id = os.getpid()
        self._may_join = threading.Event()  # the thread is about to end, or nobody knows when it will
        self._thread = threading.Thread(target=self._run, name="nanovllm-engine", daemon=True)
        atexit.register(self._stop_at_exit)  # C++ code of a daemon thread must not run during interpreter shutdown
        self._thread.start()
        threading.Thread(target=self._watch, name="nanovllm-watchdog", daemon=True).start()
        if engine.when_failed is not None:
            engine.when_failed(self._fail)

    # ---------------------------------------------------------------------------------------------- from any thread

    def submit(self, call: Callable[[EngineInterface], Result]) -> Future[Result]:
        """Run `call(engine)` before the next step; raises EngineDeadError or EngineClosedError after the last one."""
        if self.is_elsewhere:
            raise self.refusal()
        future: Future[Result] = Future()
        with self._changes:
            if self._is_stopping or self._has_ended:
                raise self.refusal()
            self._calls.append((future, call))
            if self._busy_since is None:
                self._busy_since = time.monotonic()
            self._changes.notify()
            if self._wake is not None:
                self._wake()
        return future

    def heartbeat(self) -> Heartbeat:
        """Return the statistics of the last step; never waits for the running one.

        With replicas the age is the least of any replica: while one of them reports, the engine is alive.
        """
        if silences := [replica.silence for replica in self._engine.statuses if replica.state == "up"]:
            return Heartbeat(self._stats, min(silences))
        stats = self._stats
        busy_since = self._busy_since
        return Heartbeat(stats, 0.0 if busy_since is None else time.monotonic() - busy_since)

    def statuses(self) -> list[ReplicaStatus]:
        """Return the current state of each replica; never waits."""
        return list(self._engine.statuses)

    @property
    def is_elsewhere(self) -> bool:
        """Whether this process is a forked child, which has no such thread."""
        return os.getpid() != self._process_id

    def refusal(self) -> Exception:
        """Build the exception for a call to a dead or closed engine or in a forked child, a new one per caller."""
        if self.is_elsewhere:
            return ForkedChildError("AsyncLLM", self._process_id)
        if self._cause is None:
            return EngineClosedError("this AsyncLLM is closed; build a new one.")
        error = EngineDeadError(f"the engine died ({type(self._cause).__name__}: {self._cause}); build a new one.")
        error.__cause__ = self._cause
        return error

    @property
    def is_dead(self) -> bool:
        return self._cause is not None

    @property
    def is_asleep(self) -> bool:
        """Whether the engine has given memory back, and takes no steps."""
        return getattr(self._engine, "asleep", None) is not None

    def stop(self) -> None:
        """Abort every request and end the thread after the running step; does nothing in a forked child."""
        if self.is_elsewhere:
            return
        with self._changes:
            self._is_stopping = True
            self._changes.notify()
            if self._wake is not None and not self._has_ended:
                self._wake()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread's end, unless its step hangs, or this is a forked child, which has no such thread."""
        if self.is_elsewhere:
            return
        self._may_join.wait(timeout)
        if not self._hangs:
            self._thread.join(timeout)

    def _stop_at_exit(self) -> None:
        self.stop()
        self.join(CLOSE_SECONDS)

    def _fail(self, error: DeviceError) -> None:
        """Let the engine die of an error between two steps."""

        def fail(_: EngineInterface) -> None:
            raise error

        with suppress(RuntimeError):  # a step has raised it, or the engine was closed
            self.submit(fail)

    # -------------------------------------------------------------------------------------------------- its thread

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                while (self._calls or self._has_steps) and not self._is_stopping:
                    self._answer()
                    if self._has_steps:
                        self._step()
                        self._rest()
                    self._look_for_clients()
            self._answer()
            self._abort([*self._engine.requests])  # clients of a closed engine still wait
        except BaseException as error:
            # The engine wraps a device error; report the original.
            cause = error.__cause__ if isinstance(error, EngineDeadError) and error.__cause__ else error
            self._cause = self._cause or cause
            logger.exception("the engine died")
        self._end()

    @property
    def _has_steps(self) -> bool:
        return self._engine.has_unfinished and not (self.is_asleep and self._wake is None)  # a pool's replicas may die

    def _wait_for_work(self) -> bool:
        with self._changes:
            if not self._calls:
                self._busy_since = None
        self._use_idle_time()
        with self._changes:
            while not self._calls and not self._is_stopping:
                self._changes.wait()
            return not self._is_stopping

    def _use_idle_time(self) -> None:
        """Touch a CPU's KV memory, or prepare steps, in small pieces, while there is no work.

        Starts after IDLE_SECONDS: a client that sends one request after another would wait for a capture each time.
        """
        if not self._has_idle_work:
            return
        with self._changes:
            if self._changes.wait_for(lambda: self._calls or self._is_stopping, IDLE_SECONDS):
                return
        try:
            # Each idle time asks again: steps in between may have missed other shapes.
            while not self._calls and not self._is_stopping and self._engine.use_idle_time(captures=self._captures):
                pass
        except (DeviceError, EngineDeadError):
            raise
        except Exception:  # a step that needs this graph reports the error to its requests
            self._has_idle_work = False
            logger.warning("preparing steps while idle failed and is disabled", exc_info=True)

    def _answer(self) -> None:
        for _ in range(len(self._calls)):  # later calls wait for the next step
            with self._changes:
                if not self._calls:  # the watchdog has refused them
                    return
                future, call = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            self._answered = future
            try:
                result = call(self._engine)
            except BaseException as error:
                with suppress(InvalidStateError):  # it was given up
                    future.set_exception(error)
                if isinstance(error, DeviceError) or not isinstance(error, Exception):
                    raise  # the caller's error, and the engine is intact
            else:
                self._beat()  # the caller may read the statistics once it has the result
                with suppress(InvalidStateError):
                    future.set_result(result)
            self._answered = None

    def _beat(self) -> None:
        self._stats = self._engine.stats()
        self._busy_since = time.monotonic()

    def _step(self) -> None:
        try:
            self._engine.step()
        except StepError as error:
            self._engine.check_alive()
            logger.warning("%s", error)
            self._engine.fail(error, MAX_FAILED_STEPS)
        self._beat()
        if self._engine.outputs:
            outputs = list(self._engine.outputs)
            self._engine.outputs.clear()
            self._abort(self._router.deliver(outputs))

    def _rest(self) -> None:
        """Sleep until the next call while a paused engine has nothing to read."""
        if seconds := rest_seconds(self._engine):
            with self._changes:
                self._changes.wait_for(lambda: self._calls or self._is_stopping, seconds)

    def _look_for_clients(self) -> None:
        now = time.monotonic()
        if now - self._last_look > CLIENT_CHECK_SECONDS:
            self._last_look = now
            self._abort(self._router.without_loop())

    def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            output = self._engine.abort(request_id)
            if output is not None:
                self._beat()
                self._router.deliver([output])

    def _end(self) -> None:
        self._end_all()
        try:
            self._engine.close()
        except Exception:
            logger.exception("the engine could not be closed")
        atexit.unregister(self._stop_at_exit)
        self._may_join.set()

    def _end_all(self) -> None:
        """Refuse waiting calls and end every stream."""
        with self._changes:
            self._has_ended = True
            self._busy_since = None
            calls = self._calls
            self._calls = deque()
        for future, _ in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(self.refusal())
        self._router.end(self.refusal)

    # ---------------------------------------------------------------------------------------------- in the watchdog

    def _watch(self) -> None:
        """Wait until the thread ends, or until a step lasts too long."""
        limit = self._engine.config.step_timeout
        left = limit
        while not self._may_join.wait(min(left, _LONGEST_WAIT_SECONDS)):
            busy_since = self._busy_since
            left = limit if busy_since is None else busy_since + limit - time.monotonic()
            if left <= 0 and self._give_up(limit):
                return

    def _give_up(self, limit: float) -> bool:
        """Let the engine die of a step that does not end; False if it has ended."""
        ids = list(self._engine.requests)
        named = ", ".join(ids[:8]) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "") or "none"
        with self._changes:
            busy_since = self._busy_since
            if self._has_ended or busy_since is None or time.monotonic() < busy_since + limit:
                return False
            self._is_stopping = True  # no step begins any more
            self._cause = TimeoutError(f"a step has not ended after {limit:g} s (step_timeout); its requests: {named}")
        logger.error("the engine died: %s", self._cause)
        self._hangs = True
        self._end_all()
        if (answered := self._answered) is not None:
            with suppress(InvalidStateError):  # it has ended meanwhile
                answered.set_exception(self.refusal())
        self._may_join.set()
        return True
