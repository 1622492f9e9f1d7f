"""Runs requests: schedule, execute, update, deliver.

With overlap, a step is read while the next one runs::

    host     schedule 1  launch 1  schedule 2  launch 2  read 1  update 1  schedule 3  launch 3  read 2  update 2  ...
    device               [====== step 1 ======][======= step 2 =========][======= step 3 =========]

A draw that needs the tokens of the step before on the host (structured output, logits processors) comes later::

    host     launch 2 (forward)   read 1   update 1   draw 2   schedule 3   launch 3 (forward)   read 2 ...
    device   [ forward 2 .............................][draw 2][ forward 3 ..............
"""

from __future__ import annotations

import itertools
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from sortedcontainers import SortedList

from nanovllm.batch import ScheduledBatch
from nanovllm.errors import DeviceError, EngineDeadError, ForkedChildError, QueueFullError, StepError
from nanovllm.model_runner import ModelRunner, PendingTokens
from nanovllm.outputs import ErrorKind, FinishReason, RequestOutput, SchedulerStats
from nanovllm.requests import InputProcessor
from nanovllm.responses import Request, StepTimes, deliver
from nanovllm.sampler import StepReport
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import NewRequest, Sequence


class EngineObservers(Protocol):
    """Observers of an engine's requests and steps, called in its thread. Only `append` may raise."""

    def append(self, observer: Any) -> None:
        """Add an observer; any thread may call this."""

    def notify(self, event: str, *arguments: Any) -> None:
        """Report "request_added" (its sequences), "request_ended" (a sequence, the time) or "engine_closed"."""

    def step_ended(
        self, scheduler: Scheduler, batch: ScheduledBatch, times: StepTimes, time: float, advanced: list[Sequence]
    ) -> None:
        """Report a step that was read at `time`; `advanced` are the sequences that got a token or an error from it."""

    def engine_stats(self, engine: Any) -> Any:
        """A snapshot of the engine's state, with figures of recent steps."""


class NoObservers:
    """The default: nobody observes, and the scheduler's counters are the statistics."""

    def append(self, observer: Any) -> None:
        raise ValueError(f"{observer} cannot follow this engine, which was built without `nanovllm.observability`.")

    def notify(self, event: str, *arguments: Any) -> None:
        pass

    def step_ended(self, *arguments: Any) -> None:
        pass

    def engine_stats(self, engine: Engine) -> SchedulerStats:
        return engine.scheduler.stats


@dataclass(slots=True)
class LaunchedStep:
    """A step in flight, and the seconds that the host has spent on it."""

    batch: ScheduledBatch
    times: StepTimes
    clock: Callable[[], float]
    _pending: PendingTokens | None = None  # None until the draw is launched
    _draw: Callable[[], PendingTokens] | None = None
    report: StepReport | None = None  # results besides tokens, set by `wait`

    @classmethod
    def launch(
        cls, model_runner: ModelRunner, batch: ScheduledBatch, start: float, clock: Callable[[], float], *, alone: bool
    ) -> LaunchedStep:
        """Launch a batch; its scheduling began at time `start`.

        If its draw needs tokens that are in flight (never if it is `alone` there), only the forward pass is launched,
        and the caller calls `draw` once the step before is read.
        """
        scheduled = clock()
        step = cls(batch, StepTimes(start, scheduled - start), clock)
        if alone or not batch.draws_late:
            step._pending = model_runner.execute(batch)
        else:
            step._draw = model_runner.launch(batch)
        step.times.launch_time = clock() - scheduled
        for entry in batch.prefills:
            if entry.sequence.scheduled_time is None:
                entry.sequence.scheduled_time = start
        return step

    def draw(self) -> None:
        """Launch the draw, if `launch` did not; call this before another step is launched."""
        if self._draw is not None:
            begin = self.clock()
            draw = self._draw
            self._draw = None  # first, so that a draw that fails is not repeated
            self._pending = draw()
            self.times.launch_time += self.clock() - begin

    def wait(self) -> list[int]:
        """Wait for the step; sets `report` and returns its tokens in the order of `batch.sampling`."""
        assert self._pending is not None
        begin = self.clock()
        token_ids = self._pending.result()
        self.report = self._pending.report
        self.times.read_time = self.clock()
        self.times.wait_time = self.times.read_time - begin
        return token_ids


class Engine:
    """One model, one KV cache, many requests. Not thread-safe: one thread adds, steps and aborts.

    A step that fails in the model is undone, and its requests stay queued. An error of the device, or any exception in
    the middle of a change of state, makes the engine dead.

    Args:
        model_runner: runner that is ready to execute; its config is fully resolved.
        scheduler: scheduler with the same config, and no sequences yet.
        input_processor: processor that makes the requests for `add`; its clock is the engine's.
        observers: observers of every request and step.
    """

    wake = None  # a pool of replicas sets them
    statuses = ()
    tiers: Any = None  # tiers of the prefix cache, which store while the engine is idle

    def __init__(
        self,
        model_runner: ModelRunner,
        scheduler: Scheduler,
        input_processor: InputProcessor,
        observers: EngineObservers,
    ) -> None:
        self.config = model_runner.config
        self.model_runner = model_runner
        self.input_processor = input_processor
        self.tokenizer = input_processor.tokenizer
        self.clock = input_processor.clock
        self.observers = observers
        self.outputs: deque[RequestOutput] = deque()  # outputs of steps; the caller pops them
        self.scheduler = scheduler
        self.when_failed = None if (workers := model_runner.workers) is None else workers.when_failed
        self.block_manager = scheduler.block_manager
        self.requests: dict[str, Request] = {}  # id -> running or waiting request
        self._deadlines: SortedList = SortedList()  # (deadline, request id) of the requests that have one
        self._numbers, self._arrivals = itertools.count(), itertools.count()  # counters of requests and sequences
        self._in_flight: deque[LaunchedStep] = deque()  # steps that are not read yet, oldest first
        self._failed_steps: Counter[Sequence] = Counter()  # sequence -> failures in a row
        self._process_id = os.getpid()
        self._death: BaseException | None = None

    # ------------------------------------------------------------------------------------------------- requests

    def check_queue(self, count: int) -> None:
        """Raise QueueFullError if there is no room for `count` more samples; any thread may call this."""
        limit = self.config.max_queue
        num_slots = self.config.max_num_seqs
        if limit is None:
            return
        num_unfinished = len(self.scheduler.running) + len(self.scheduler.waiting)
        if num_unfinished + count > num_slots + limit:
            raise QueueFullError(
                f"{num_unfinished} requests (each sample counted) are unfinished; with {count} more there "
                f"would be more than max_num_seqs ({num_slots}) to run and max_queue ({limit}) to wait. Try again "
                "later, or raise max_queue."
            )

    def add(self, *requests: NewRequest) -> None:
        """Queue requests, all of them or none.

        Raises ValueError for an id in use, QueueFullError and EngineDeadError. An output kind other than FINAL gives an
        output each time the request advances.
        """
        self.check_queue(sum(request.params.n for request in requests))
        ids = Counter(request.request_id for request in requests)
        for request_id, count in ids.items():
            if count > 1 or request_id in self.requests:
                raise ValueError(f"a request with id {request_id!r} is running already; ids must be unique.")
        with self._changing():
            for new in requests:
                request = Request(new, self.input_processor, number=next(self._numbers), arrivals=self._arrivals)
                self.requests[new.request_id] = request
                if request.deadline is not None:
                    self._deadlines.add((request.deadline, new.request_id))
                for sequence in request.sequences:
                    if not sequence.is_finished:  # a resumed request may bring ended samples
                        self.scheduler.add(sequence)
                self.observers.notify("request_added", request.sequences)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now, its blocks free at once; returns its output so far, or None if no such request runs."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        with self._changing():
            return self._end(request, "abort", self.clock())

    def fail(self, failure: StepError, num_failed_steps: int) -> None:
        """End requests of a failed step that failed `num_failed_steps` times in a row, with finish_reason "error".

        Requests without a token are the likelier cause: while there are any, only they end.
        """
        with self._changing():
            requests = [self.requests[request_id] for request_id in failure.request_ids]
            hopeless = [
                r for r in requests if any(self._failed_steps[sequence] >= num_failed_steps for sequence in r.sequences)
            ]
            suspects = [r for r in hopeless if not r.has_token]
            for request in suspects or hopeless:
                self.outputs.append(self._end(request, "error", self.clock(), str(failure)))

    def _end(self, request: Request, reason: FinishReason, now: float, error: str | None = None) -> RequestOutput:
        for sequence in request.sequences:
            if not sequence.is_finished:
                self.scheduler.finish(sequence, reason)
                sequence.error = error
                sequence.error_kind = None if error is None else ErrorKind.INTERNAL
                self.observers.notify("request_ended", sequence, now)
        self._forget(request.request_id)
        return request.output(now)

    def _end_overdue(self) -> float:
        """End requests past their deadlines; returns the time."""
        now = self.clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            overdue = self.requests[self._deadlines[0][1]]
            self.outputs.append(self._end(overdue, "timeout", now))
        return now

    def _forget(self, request_id: str) -> None:
        request = self.requests.pop(request_id)
        if request.deadline is not None:
            self._deadlines.remove((request.deadline, request_id))
        for sequence in request.sequences:
            sequence.samples = ()  # ends a reference cycle
            self._failed_steps.pop(sequence, None)
        if self._in_flight and not self.requests:
            self._drop_in_flight(has_failed=False)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    # ----------------------------------------------------------------------------------------------------- step

    def step(self) -> None:
        """Launch the next batch and read the oldest one in flight; with overlap, the new batch runs meanwhile.

        Appends outputs of requests that ended, and of streamed requests that advanced. Raises StepError for a step
        that failed and was undone, with all steps launched after it; its requests stay queued.
        """
        try:
            with self._changing():
                if self.model_runner.model_changed(was_idle=not (self.scheduler.running or self._in_flight)):
                    self._drop_computed()  # the owner of a live module edited it
                start = self._end_overdue()
            for step in self._in_flight:  # its draw waited until the host had read the step before
                step.draw()
            with self._changing():
                batch = self.scheduler.schedule()
            if batch is not None:
                alone = not self._in_flight
                self._in_flight.append(LaunchedStep.launch(self.model_runner, batch, start, self.clock, alone=alone))
            leaves_running = self.config.overlap and batch is not None and len(self._in_flight) == 1
            if not self._in_flight or leaves_running:
                return
            oldest = self._in_flight[0]  # it stays in the queue until it is read: a failure undoes it with the others
            token_ids = oldest.wait()
        except BaseException as error:
            if not self.is_dead:  # no change of state was cut short
                self._undo(error)  # raises StepError for an Exception
            raise  # an interrupt, or the error of a dead engine
        with self._changing():
            advanced = self.scheduler.update(oldest.batch, token_ids, oldest.report)
            self._deliver(oldest, advanced)
        self.observers.step_ended(self.scheduler, oldest.batch, oldest.times, self.clock(), advanced)

    def _undo(self, error: BaseException) -> None:
        """Roll back every step in flight: a launch that failed may have overwritten the tokens of the one before.

        Raises StepError if `error` is an Exception.
        """
        self.model_runner.draw_unread(self._in_flight)  # outside of `_changing`: an interrupt cuts no change short
        with self._changing():
            sequences = self._drop_in_flight(has_failed=True)
            self._failed_steps.update(sequences)
        if isinstance(error, DeviceError):
            self._death = error
        if isinstance(error, Exception):
            raise StepError(list(dict.fromkeys(sequence.request_id for sequence in sequences)), error) from error

    def _deliver(self, step: LaunchedStep, advanced: list[Sequence]) -> None:
        """Detokenise a step's tokens, finish samples at stop strings, append outputs."""
        self._in_flight.popleft()
        if self._failed_steps:
            for entry in step.batch.entries:
                self._failed_steps.pop(entry.sequence, None)
        now = step.times.delivered_time = self.clock()
        outputs = deliver(self.requests, advanced, now, step.times.tokens, self.scheduler.finish, step.batch.runs)
        self.scheduler.stats.num_output_tokens -= step.times.tokens.num_cut
        self.outputs.extend(outputs)
        for output in outputs:
            if output.finished:
                self._forget(output.request_id)

    def _drop_in_flight(self, *, has_failed: bool) -> list[Sequence]:
        """Undo the steps in flight; returns their sequences. The device still finishes them before later launches."""
        if not has_failed:  # `_undo` does this for failed steps
            self.model_runner.draw_unread(self._in_flight)
        self._in_flight.clear()
        batches = [*self.scheduler.in_flight]
        sequences = self.scheduler.rollback(batches[0], has_failed=has_failed) if batches else []
        lost = self.block_manager.lost_blocks(batches)
        for sequence in [s for s in self.scheduler.running if lost and not lost.isdisjoint(s.held_blocks())]:
            self.scheduler.preempt(sequence)  # a fork's begun block: its copy was undone
        return sequences

    # ---------------------------------------------------------------------------------------------------- state

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Context of every change of state: an exception that cuts a change short makes the engine dead."""
        self.check_alive()
        try:
            yield
        except GeneratorExit:  # an interrupt came between this generator and its `with` statement
            self._death = KeyboardInterrupt()
            raise
        except BaseException as error:
            self._death = error
            raise

    def drop_computed(self) -> None:
        """Drop all KV after a change of the weights: the prefix cache is emptied, and running requests recompute."""
        self.model_runner.check_editable()
        with self._changing():
            self.model_runner.forget_model()
            self._drop_computed()

    def _drop_computed(self) -> None:
        self.restart_running()
        self.block_manager.reset_prefix_cache()

    def restart_running(self) -> None:
        """Undo the steps in flight and preempt all running requests; their KV mostly stays in the prefix cache."""
        with self._changing():
            self._drop_in_flight(has_failed=False)
            self.scheduler.preempt_all()

    def reset_prefix_cache(self) -> None:
        """Make every cached prefix unfindable; running requests keep their blocks."""
        with self._changing():
            self.block_manager.reset_prefix_cache()

    def use_idle_time(self, *, captures: bool) -> bool:
        """Do one piece of idle work: touch memory of a CPU's KV cache; False if nothing is left to do.

        With `captures`, for the thread that steps alone, also store a prefix in a tier or capture a CUDA graph.
        """
        touches = self.config.kv_cache_touch == "idle" and self.model_runner.binding.caches.memory.take_some_memory()
        if touches or not captures:
            return touches
        stores = self.tiers is not None and not self._in_flight and self.tiers.save_idle()
        return stores or self.model_runner.capture_ahead()

    def num_output_tokens(self) -> int:
        """Tokens generated since construction."""
        return self.scheduler.stats.num_output_tokens

    def stats(self) -> Any:
        """Statistics of the observers: `EngineStats`, or the scheduler's counters alone."""
        if os.getpid() != self._process_id:
            raise ForkedChildError("Engine", self._process_id)
        return self.observers.engine_stats(self)

    @property
    def is_dead(self) -> bool:
        return self._death is not None

    def check_alive(self) -> None:
        """Raise EngineDeadError if an error has left no usable state, ForkedChildError in a forked child."""
        if os.getpid() != self._process_id:
            raise ForkedChildError("Engine", self._process_id)
        if self._death is not None:
            what = "a device error" if isinstance(self._death, DeviceError) else "an error in its bookkeeping"
            raise EngineDeadError(
                f"this engine died of {what} ({type(self._death).__name__}: {self._death}); build a new one."
            ) from self._death

    def close(self) -> None:
        """Drop every request and free the caches; a live module returns to its owner. No-op in a forked child."""
        if os.getpid() != self._process_id:
            return
        self.model_runner.draw_unread(self._in_flight)
        self._in_flight.clear()
        self.requests.clear()
        self._deadlines.clear()
        self.outputs.clear()
        self.observers.notify("engine_closed")
        self.model_runner.close()
