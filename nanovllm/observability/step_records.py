"""Step records for observers, and counters of recent steps for the engine's statistics."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from nanovllm.batch import ScheduledBatch
from nanovllm.features.engine_stats import CacheGroupStats, EngineStats
from nanovllm.features.groups.cache_groups import group_stats
from nanovllm.responses import StepTimes
from nanovllm.sequence import Sequence

if TYPE_CHECKING:
    from nanovllm.kv_cache import KVCaches
    from nanovllm.observability.decisions import Decision
    from nanovllm.scheduler import Scheduler

logger = logging.getLogger("nanovllm")

RECENT_STEPS = 1000
_TOTALS = attrgetter("num_steps", "num_scheduled_tokens", "prefix_cache_queries", "prefix_cache_hits")


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One finished step.

    time, start_time: end of its update and start of its scheduling, in seconds on the engine's clock.
    num_sequences: sequences in the step.
    num_decode_tokens: tokens computed for decodes, one each.
    num_prefill_tokens: tokens computed for chunks.
    num_draft_tokens, num_accepted_tokens: drafts that the step also computed, and how many were accepted.
    num_cached_tokens: tokens found in the prefix cache instead.
    num_running, num_waiting, num_used_blocks: counts after the step's update.
    ttfts: seconds from arrival to first token, of sequences that got it from this step.
    schedule_time, execute_time, update_time: seconds. execute_time is launching plus waiting for the tokens, without
        the host's work in between under overlap.
    launch_time: the first part of execute_time; on a CPU launching computes the step.
    request_ttfts, itls: seconds as in `TokenTimes`; itls are pairs of seconds and tokens.
    cache_groups: the pools after its update, as in `EngineStats`; num_used_blocks is the first pool's.
    budget: tokens that the step might have; with an `itl_goal` at most max_num_batched_tokens.
    predicted_time: seconds by the costs learned before; None without an `itl_goal`.
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
    cache_groups: tuple[CacheGroupStats, ...] = ()
    budget: int = 0
    predicted_time: float | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def group_usage(self) -> str:
        """Used blocks of each cache group, as text; empty with a single group."""
        if len(self.cache_groups) < 2:
            return ""
        return ", ".join(f"{group.name}: {group.num_used_blocks} of {group.num_blocks}" for group in self.cache_groups)


StepHook = Callable[[StepRecord], None]


class Observer:
    """Observer of an engine, called in the engine's thread; subclasses override the events that they need."""

    def request_added(self, sequences: list[Sequence]) -> None:
        """A request was queued; sequences: its samples'."""

    def step_ended(self, record: StepRecord, batch: ScheduledBatch) -> None:
        """A step was read, and the scheduler updated."""

    def request_ended(self, sequence: Sequence, time: float) -> None:
        """A sample of a request ended, for any reason; `time` on the engine's clock."""

    def prefix_decided(self, decision: Decision) -> None:
        """A prefix that a tier has is loaded, or computed since that is predicted to be faster."""

    def engine_closed(self) -> None:
        """The engine was closed."""


class OnStep(Observer):
    """Calls a function with each step's record."""

    def __init__(self, hook: StepHook) -> None:
        if not callable(hook):
            raise TypeError(f"on_step must be callable (it is given a StepRecord for each step), not {hook!r}.")
        self._hook = hook

    def step_ended(self, record: StepRecord, batch: ScheduledBatch) -> None:
        self._hook(record)

    def __str__(self) -> str:
        return "on_step"


class StepObservers:
    """The observers of one engine, and the counters of its recent steps.

    An observer that raises is logged with its traceback and dropped, since it must not fail requests;
    `EngineStats.hook_error` keeps the error.
    """

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = list(observers)
        self.error: str | None = None  # error of a dropped observer
        self.predict: Callable[[ScheduledBatch], float] | None = None  # seconds of a step, with an `itl_goal`
        # Totals after each step.
        self._recent: deque[tuple[int, int, int, int]] = deque([(0, 0, 0, 0)], maxlen=RECENT_STEPS + 1)

    def append(self, observer: Observer) -> None:
        """Add an observer, from any thread."""
        self._observers.append(observer)

    def step_ended(
        self, scheduler: Scheduler, batch: ScheduledBatch, times: StepTimes, time: float, advanced: list[Sequence]
    ) -> None:
        """Record a step read at `time`; advanced: the sequences that got a token or an error from it."""
        manager = scheduler.block_manager
        self._recent.append(_TOTALS(scheduler.stats))
        if not self._observers:
            return
        prefills = batch.prefills
        tokens = times.tokens
        record = StepRecord(
            batch.step_id,
            time,
            times.start_time,
            len(batch.entries),
            batch.num_decodes + len(batch.drafted),
            sum([entry.num_new_tokens for entry in prefills]),
            sum([entry.start - entry.num_computed_before for entry in prefills if entry.num_new_tokens]),  # no forks
            len(scheduler.running),
            len(scheduler.waiting),
            manager.num_blocks - 1 - len(manager.free_blocks),
            times.schedule_time,
            times.launch_time,
            times.launch_time + times.wait_time,
            time - times.read_time,
            tuple(tokens.ttfts),
            tuple(tokens.request_ttfts),
            tuple(tokens.itls.items()),
            group_stats(manager),
            batch.budget,
            None if self.predict is None else self.predict(batch),
            sum([len(entry.draft) for entry in batch.drafted]),
            sum([entry.sequence.drafting.num_accepted for entry in batch.drafted]),
        )
        self.notify("step_ended", record, batch)
        for sequence in advanced:
            if sequence.is_finished:
                self.notify("request_ended", sequence, times.delivered_time)

    def notify(self, event: str, *arguments: Any) -> None:
        """Call a method of every observer, by its name in `Observer`."""
        for observer in tuple(self._observers):
            try:
                getattr(observer, event)(*arguments)
            except Exception as error:
                with suppress(ValueError):  # a nested event has dropped it already
                    self._observers.remove(observer)
                self.error = f"{type(error).__name__}: {error}"
                logger.exception("%s raised in %s; it is not called again", observer, event)

    def engine_stats(self, engine: Any) -> EngineStats:
        """A snapshot of the engine."""
        pools = engine.block_manager.pools
        caches = engine.model_runner.binding.caches
        return replace(
            self.stats(engine.scheduler),
            kv_touched_bytes=touched_bytes(caches, [pool.num_touched_blocks / (pool.num_blocks - 1) for pool in pools]),
            kv_findable_bytes=bytes_of(caches, [pool.num_findable_blocks / (pool.num_blocks - 1) for pool in pools]),
            tiers=None if engine.tiers is None else engine.tiers.stats(),
        )

    def stats(self, scheduler: Scheduler) -> EngineStats:
        """A snapshot of the scheduler, and figures of recent steps."""
        first = self._recent[0]
        last = self._recent[-1]
        num_steps, num_tokens, queries, hits = (after - before for before, after in zip(first, last, strict=True))
        return replace(
            EngineStats.of_scheduler(scheduler),
            recent_hit_rate=hits / queries if queries else None,
            recent_budget_use=num_tokens / num_steps / scheduler.config.max_num_batched_tokens if num_steps else None,
            hook_error=self.error,
            cache_groups=group_stats(scheduler.block_manager),
        )


def bytes_of(caches: KVCaches, shares: list[float]) -> int:
    """Bytes of a share, 0 to 1, of each cache group's blocks."""
    return sum(round(num_bytes * shares[group]) for group, num_bytes in caches.group_bytes.items())


def touched_bytes(caches: KVCaches, shares: list[float]) -> int:
    """Bytes of memory that the caches occupy once `shares` of the blocks were handed out; on a GPU all of it."""
    num_taken = caches.memory.num_taken
    if num_taken is None:
        return bytes_of(caches, [1.0] * len(shares))
    return max(bytes_of(caches, shares), num_taken)
