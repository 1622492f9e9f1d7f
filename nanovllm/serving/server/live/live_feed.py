"""Live feed: pushes engine snapshots to viewers at a bounded rate; without viewers only step records are kept.

::

    thread of the engine                         event loop
    step, hook: append to the last 1,000         one task, while there are viewers:
    between two steps: take_snapshot  ◀───────── inspect, 10 times a second at most, for 1 % of its time
                                      ─────────▶ publish ──▶ watchers: changes since the last message

A watcher has no queue: a slow one skips snapshots, and misses steps only after 1,000 further ones.
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from dataclasses import asdict, replace
from typing import Any

from nanovllm.errors import EngineClosedError, EngineDeadError
from nanovllm.observability.step_records import RECENT_STEPS, StepRecord
from nanovllm.serving.async_llm import AsyncLLM
from nanovllm.serving.server.live.engine_snapshot import (
    EngineSnapshot,
    group_rows,
    pool_map,
    step_row,
    take_snapshot,
    with_queue_positions,
)
from nanovllm.serving.server.sse import compact, event

INTERVAL_SECONDS = 0.1  # least time between two snapshots
IDLE_SECONDS = 1.0  # most time between two messages while nothing changes
MOST_ENGINE_TIME = 0.01  # the share of the engine's time that snapshots may take
MAX_WATCHERS = 32
KEEP_ALIVE_SECONDS = 5.0  # most time between comments: proxies may close silent connections

logger = logging.getLogger("nanovllm")


def named_event(name: str, data: dict[str, Any]) -> bytes:
    """Encode a server-sent event."""
    return f"event: {name}\n".encode() + event(compact(data))


class SnapshotMessages:
    """A snapshot and its encoded messages, shared by watchers with the same last step."""

    def __init__(self, snapshot: EngineSnapshot, zero: float, before: SnapshotMessages | None) -> None:
        self.snapshot = snapshot
        self.last_step = snapshot.steps[-1].step_id if snapshot.steps else -1
        self._zero = zero
        self._messages: dict[tuple[int, bool], bytes] = {}
        self.pool: dict[str, Any]
        if before is not None and before.usage == self.usage:
            self.pool = before.pool
            self.is_idle = before.last_step == self.last_step and not (snapshot.num_running or snapshot.num_waiting)
        else:
            self.pool = pool_map(*self.usage)
            self.is_idle = False

    @property
    def usage(self) -> tuple[bytes, bytes]:
        return self.snapshot.num_holders, self.snapshot.findable

    def message(self, last_step: int, knows_pool: bool) -> bytes:
        """Return the message for a watcher that has the steps up to `last_step`."""
        if (last_step, knows_pool) not in self._messages:
            steps = self.snapshot.steps
            first = bisect_right(steps, last_step, key=lambda record: record.step_id)
            data = {
                "time": round(1e6 * (self.snapshot.time - self._zero)),
                "steps": [step_row(record, self._zero) for record in steps[first:]],
                "requests": self.snapshot.requests,
                "running": self.snapshot.num_running,
                "waiting": self.snapshot.num_waiting,
                "places": self.snapshot.queue_positions,
                "counters": self.snapshot.counters,
                "machine": self.snapshot.machine,
                "budget": self.snapshot.budget,
                "groups": group_rows(steps),
                "pool": None if knows_pool else self.pool,
            }
            if self.snapshot.drafts:
                data["drafts"] = self.snapshot.drafts
            if self.snapshot.tiers is not None:
                data["tiers"] = asdict(self.snapshot.tiers)
            self._messages[last_step, knows_pool] = named_event("look", data)
        return self._messages[last_step, knows_pool]


class LiveFeed:
    """Feed of one engine for its viewers.

    Args:
        engine: engine to inspect; it is not modified.
        about: constant values, for the first message.
        questions: `InFlight.questions`, the requests of pages.
    """

    def __init__(self, engine: AsyncLLM, about: dict[str, Any], questions: Mapping[str, str] | None = None) -> None:
        self._engine = engine
        self._about = about
        self._questions = {} if questions is None else questions
        self._steps: deque[StepRecord] = deque(maxlen=RECENT_STEPS)  # the engine thread appends
        self.on_step = self._steps.append
        self._started = time.monotonic()
        self._num_watchers = 0
        self._task: asyncio.Task[None] | None = None  # runs while there are watchers
        self._zero: float | None = None
        self._latest: SnapshotMessages | None = None
        self._published = asyncio.Event()  # each publication sets and replaces it
        self._end_reason: str | None = None

    @property
    def is_full(self) -> bool:
        return self._num_watchers >= MAX_WATCHERS

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events: "hello", then "look" for each change, and "end" with a reason.

        Reasons: the engine is "dead" or "closed", or the snapshot "failed".
        """
        self._num_watchers += 1
        try:
            uptime_us = round(1e6 * (time.monotonic() - self._started))
            yield named_event("hello", self._about | {"uptime_us": uptime_us})
            last_step = -1
            pool = None
            shown = None
            while True:
                published = self._published  # a publication from here on ends the wait below
                latest = self._latest_or_begin()
                if latest is not None and latest is not shown:
                    yield latest.message(last_step, latest.pool is pool)
                    last_step = latest.last_step
                    pool = latest.pool
                    shown = latest
                if self._end_reason is not None:
                    yield named_event("end", {"reason": self._end_reason})
                    return
                try:
                    await asyncio.wait_for(published.wait(), KEEP_ALIVE_SECONDS)
                except TimeoutError:
                    yield b": keep-alive\n\n"
        finally:
            self._num_watchers -= 1
            if not self._num_watchers:
                self._latest = None

    def _latest_or_begin(self) -> SnapshotMessages | None:
        if self._end_reason is None and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._publish_snapshots())
        return self._latest

    async def _publish_snapshots(self) -> None:
        """Publish snapshots until the last watcher leaves."""
        loop = asyncio.get_running_loop()
        last_time = -IDLE_SECONDS
        try:
            while self._num_watchers and self._end_reason is None:
                snapshot = await self._engine.inspect(self._look)
                if self._zero is None:
                    self._zero = snapshot.time
                messages = SnapshotMessages(snapshot, self._zero, self._latest)
                if not messages.is_idle or loop.time() - last_time >= IDLE_SECONDS:
                    last_time = loop.time()
                    self._latest = messages
                    self._publish()
                await asyncio.sleep(max(INTERVAL_SECONDS, snapshot.seconds / MOST_ENGINE_TIME))
        except EngineDeadError:
            self._show_last_steps()
            self._end("dead")
        except EngineClosedError:
            self._show_last_steps()
            self._end("closed")
        except Exception:
            logger.exception("the live view failed to inspect the engine and stops")
            self._end("failed")

    def _look(self, engine: Any) -> EngineSnapshot:
        snapshot = take_snapshot(engine, self._steps)
        return with_queue_positions(snapshot, engine, self._questions) if self._questions else snapshot

    def _show_last_steps(self) -> None:
        """Publish the steps after the last snapshot; a dead or closed engine allows no other."""
        before = self._latest
        steps = tuple(self._steps)
        if before is not None and self._zero is not None and steps and steps[-1].step_id > before.last_step:
            snapshot = replace(before.snapshot, steps=steps, time=max(before.snapshot.time, steps[-1].time))
            self._latest = SnapshotMessages(snapshot, self._zero, before)

    def _end(self, reason: str) -> None:
        self._end_reason = self._end_reason or reason
        self._publish()

    def _publish(self) -> None:
        published, self._published = self._published, asyncio.Event()
        published.set()
