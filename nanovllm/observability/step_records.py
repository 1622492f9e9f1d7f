"""What each step did: told to whoever listens, and kept for a while for the engine's statistics."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from nanovllm.batch import ScheduledBatch
from nanovllm.outputs import EngineStats
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Sequence

logger = logging.getLogger("nanovllm")

RECENT_STEPS = 1000


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step that was read.

    time, start_time: when it was read and all was done with it, and when its scheduling began, in seconds on the
        engine's clock.
    num_sequences: sequences in the step.
    num_decode_tokens, num_prefill_tokens: the tokens that it computed, one for each decode, and of chunks.
    num_cached_tokens: tokens that it found in the prefix cache instead.
    num_running, num_waiting, num_used_blocks: once it was read.
    ttfts: of the sequences that got their first token from it, the seconds since their arrival.
    schedule_time, execute_time, update_time: seconds. Executing is launching and then waiting for the tokens; with
        overlap, what the host does in between is not counted.
    launch_time: the first part of execute_time; on a CPU launching computes the step.
    request_ttfts: as ttfts, but of several samples of a request only the first one's.
    itls: seconds since a sequence's token before, each with the number of its tokens for which it is so.
    """

    step_id: int
    time: float
    start_time: float
    num_sequences: int
    num_decode_tokens: int
    num_prefill_tokens: int
    num_cached_tokens: int
    num_running: int
    num_waiting: int
    num_used_blocks: int
    schedule_time: float
    launch_time: float
    execute_time: float
    update_time: float
    ttfts: tuple[float, ...]
    request_ttfts: tuple[float, ...] = ()
    itls: tuple[tuple[float, int], ...] = ()


StepHook = Callable[[StepRecord], None]


@dataclass(frozen=True, slots=True)
class News:
    """What a tracer has not heard of yet: sequences that came, steps, and sequences that ended with their times."""

    added: deque[Sequence] = field(default_factory=deque)
    steps: deque[tuple[StepRecord, ScheduledBatch]] = field(default_factory=deque)
    ended: deque[tuple[Sequence, float]] = field(default_factory=deque)


class Tracer(Protocol):
    """Follows every sequence of an engine; `TraceWriter` is one."""

    def follow(self, news: News) -> None:
        """Take from the news what was taken note of, so that an interrupt loses nothing."""


class StepRecorder:
    """Knows the counters of recent steps, and calls those who watch.

    One that raises is logged with its traceback and not called again, since a tool that watches must not end the
    requests that it watches; `EngineStats.hook_error` goes on saying so.

    Args:
        hook: is given each step's record.
        tracer: is told of every sequence too.
    """

    def __init__(self, hook: StepHook | None, tracer: Tracer | None = None) -> None:
        self._hook = hook
        self._tracer = tracer
        self._untold: deque[StepRecord] = deque()
        self._news = News()
        self._hook_error: str | None = None
        # Of the step that is being read. Sequences that decode together share their gap, so there are few of these.
        self._ttfts: list[float] = []
        self._request_ttfts: list[float] = []
        self._itls: dict[float, int] = {}
        # After each step: steps, scheduled tokens, queries, hits since construction.
        self._recent: deque[tuple[int, int, int, int]] = deque([(0, 0, 0, 0)], maxlen=RECENT_STEPS + 1)

    def record(
        self,
        scheduler: Scheduler,
        batch: ScheduledBatch,
        time: float,
        start_time: float,
        schedule_time: float,
        launch_time: float,
        wait_time: float,
        update_time: float,
    ) -> None:
        """Take note of a step that was just read; `tell` passes it on."""
        counters, manager = scheduler.stats, scheduler.block_manager
        self._recent.append(
            (
                counters.num_steps,
                counters.num_scheduled_tokens,
                counters.prefix_cache_queries,
                counters.prefix_cache_hits,
            )
        )
        if self._hook is None and self._tracer is None:
            return
        prefills = batch.prefills
        record = StepRecord(
            batch.step_id,
            time,
            start_time,
            len(batch.entries),
            batch.num_decodes,
            sum([entry.num_new_tokens for entry in prefills]),
            sum([entry.start - entry.num_computed_before for entry in prefills]),
            len(scheduler.running),
            len(scheduler.waiting),
            manager.num_blocks - 1 - manager.num_free_blocks,
            schedule_time,
            launch_time,
            launch_time + wait_time,
            update_time,
            tuple(self._ttfts),
            tuple(self._request_ttfts),
            tuple(self._itls.items()),
        )
        if self._hook is not None:
            self._untold.append(record)
        if self._tracer is not None:
            self._news.steps.append((record, batch))
        for kept in (self._ttfts, self._request_ttfts, self._itls):
            kept.clear()  # only now, so that an interrupt loses none

    def note_added(self, sequences: list[Sequence]) -> None:
        """Take note of sequences that begin to wait; `tell` passes them on."""
        if self._tracer is not None:
            self._news.added.extend(sequences)

    def note_ended(self, sequences: list[Sequence], time: float) -> None:
        """Take note of those among the sequences that have ended by this time; `tell` passes them on."""
        if self._tracer is not None:
            self._news.ended.extend([(sequence, time) for sequence in sequences if sequence.is_finished])

    def note_first_token(self, ttft: float, is_requests_first: bool) -> None:
        """A sequence got its first token from the step that is being read, so many seconds after its arrival."""
        if self._hook is not None:
            self._ttfts.append(ttft)
            if is_requests_first:
                self._request_ttfts.append(ttft)

    def note_itl(self, itl: float) -> None:
        """A sequence got a token from the step that is being read, so many seconds after the one before."""
        if self._hook is not None:
            self._itls[itl] = self._itls.get(itl, 0) + 1

    def tell(self) -> None:
        """Call hook and tracer with what they have not heard of."""
        if self._tracer is not None:
            try:
                self._tracer.follow(self._news)
            except Exception as error:
                self._tracer, self._news = None, News()
                self._note_error(error, "the trace could not be written; it ends here")
        while self._untold and self._hook is not None:
            record = self._untold.popleft()
            try:
                self._hook(record)
            except Exception as error:
                self._hook = None
                self._note_error(error, f"on_step raised after step {record.step_id}; it is not called again")

    def _note_error(self, error: Exception, message: str) -> None:
        self._hook_error = f"{type(error).__name__}: {error}"
        logger.exception(message)

    def stats(self, scheduler: Scheduler) -> EngineStats:
        """A snapshot of the engine."""
        manager, counters = scheduler.block_manager, scheduler.stats
        num_blocks = manager.num_blocks - 1
        first, last = self._recent[0], self._recent[-1]
        num_steps, num_tokens, queries, hits = (after - before for before, after in zip(first, last, strict=True))
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_blocks=num_blocks,
            num_used_blocks=num_blocks - manager.num_free_blocks,
            num_free_blocks=manager.num_free_blocks,
            num_findable_blocks=manager.num_findable_blocks,
            prefix_cache_queries=counters.prefix_cache_queries,
            prefix_cache_hits=counters.prefix_cache_hits,
            prefix_cache_evictions=manager.num_evictions,
            num_preemptions=counters.num_preemptions,
            num_steps=counters.num_steps,
            num_failed_steps=counters.num_failed_steps,
            num_scheduled_tokens=counters.num_scheduled_tokens,
            num_output_tokens=counters.num_output_tokens,
            recent_hit_rate=hits / queries if queries else None,
            recent_budget_use=num_tokens / num_steps / scheduler.config.max_num_batched_tokens if num_steps else None,
            hook_error=self._hook_error,
        )
