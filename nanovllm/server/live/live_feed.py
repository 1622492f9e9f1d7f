"""Who watches an engine hears of it at a bounded rate; while nobody does, nothing but its last steps is kept.

::

    thread of the engine                         event loop
    step, hook: append to the last 1,000         one task, while somebody watches:
    between two steps: take_snapshot  ◀───────── inspect, 10 times a second at most, for 1 % of its time
                                      ─────────▶ publish ──▶ watchers: what each has not been told yet

A watcher has no queue: one that reads slowly skips snapshots, and misses steps only once 1,000 more have passed.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from nanovllm.async_llm import AsyncLLM
from nanovllm.errors import EngineClosedError, EngineDeadError
from nanovllm.observability.step_records import RECENT_STEPS, StepRecord
from nanovllm.server.live.engine_snapshot import EngineSnapshot, pool_map, step_row, take_snapshot
from nanovllm.server.sse import compact, event

INTERVAL_SECONDS = 0.1  # between two snapshots
IDLE_SECONDS = 1.0  # between two messages while nothing changes
MOST_ENGINE_TIME = 0.01  # the share of the engine's time that snapshots may take
MAX_WATCHERS = 32
KEEP_ALIVE_SECONDS = 5.0  # a connection on which nothing comes may be taken for a dead one

logger = logging.getLogger("nanovllm")


def named_event(name: str, data: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return f"event: {name}\n".encode() + event(compact(data))


class Look:
    """A snapshot as messages; what several watchers lack alike is written once."""

    def __init__(self, snapshot: EngineSnapshot, zero: float, before: Look | None) -> None:
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
        """For a watcher who was told of this step last."""
        if (last_step, knows_pool) not in self._messages:
            steps = self.snapshot.steps
            first = bisect_right(steps, last_step, key=lambda record: record.step_id)
            data = {
                "time": round(1e6 * (self.snapshot.time - self._zero)),
                "steps": [step_row(record, self._zero) for record in steps[first:]],
                "requests": self.snapshot.requests,
                "running": self.snapshot.num_running,
                "waiting": self.snapshot.num_waiting,
                "counters": self.snapshot.counters,
                "pool": None if knows_pool else self.pool,
            }
            self._messages[last_step, knows_pool] = named_event("look", data)
        return self._messages[last_step, knows_pool]


class LiveFeed:
    """What the live view is told of an engine.

    Args:
        engine: to look at; all of it is left as it is.
        about: what does not change, for the first message.
    """

    def __init__(self, engine: AsyncLLM, about: dict[str, Any]) -> None:
        self._engine = engine
        self._about = about
        self._steps: deque[StepRecord] = deque(maxlen=RECENT_STEPS)  # the engine's thread's
        self.on_step = self._steps.append
        self._num_watchers = 0
        self._task: asyncio.Task[None] | None = None  # looks while somebody watches
        self._zero: float | None = None
        self._latest: Look | None = None
        self._published = asyncio.Event()  # a new one for each publication
        self._end_reason: str | None = None

    @property
    def is_full(self) -> bool:
        return self._num_watchers >= MAX_WATCHERS

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events: "hello" first, then "look" as things change, and "end" with a reason if nothing more can
        come: the engine is "dead" or "closed", or looking at it "failed"."""
        self._num_watchers += 1
        try:
            yield named_event("hello", self._about)
            last_step, pool, shown = -1, None, None
            while True:
                published = self._published  # before the look, so that none is missed
                look = self._latest_or_begin()
                if look is not None and look is not shown:
                    yield look.message(last_step, look.pool is pool)
                    last_step, pool, shown = look.last_step, look.pool, look
                if self._end_reason is not None:
                    yield named_event("end", {"reason": self._end_reason})
                    return
                try:
                    await asyncio.wait_for(published.wait(), KEEP_ALIVE_SECONDS)
                except TimeoutError:
                    yield b": the engine is within a long step\n\n"
        finally:
            self._num_watchers -= 1
            if not self._num_watchers:
                self._latest = None

    def _latest_or_begin(self) -> Look | None:
        if self._end_reason is None and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._look())
        return self._latest

    async def _look(self) -> None:
        """Publish snapshots until nobody watches any more."""
        loop = asyncio.get_running_loop()
        last_time = -IDLE_SECONDS
        try:
            while self._num_watchers and self._end_reason is None:
                snapshot = await self._engine.inspect(lambda engine: take_snapshot(engine, self._steps))
                if self._zero is None:
                    self._zero = snapshot.time
                look = Look(snapshot, self._zero, self._latest)
                if not look.is_idle or loop.time() - last_time >= IDLE_SECONDS:
                    last_time = loop.time()
                    self._latest = look
                    self._publish()
                await asyncio.sleep(max(INTERVAL_SECONDS, snapshot.seconds / MOST_ENGINE_TIME))
        except EngineDeadError:
            self._show_last_steps()
            self._end("dead")
        except EngineClosedError:
            self._show_last_steps()
            self._end("closed")
        except Exception:
            logger.exception("the live view could not look at the engine; it ends here")
            self._end("failed")

    def _show_last_steps(self) -> None:
        """Those behind the last snapshot too, now that no other can be taken."""
        before, steps = self._latest, tuple(self._steps)
        if before is not None and self._zero is not None and steps and steps[-1].step_id > before.last_step:
            snapshot = replace(before.snapshot, steps=steps, time=max(before.snapshot.time, steps[-1].time))
            self._latest = Look(snapshot, self._zero, before)

    def _end(self, reason: str) -> None:
        self._end_reason = self._end_reason or reason
        self._publish()

    def _publish(self) -> None:
        published, self._published = self._published, asyncio.Event()
        published.set()
