"""Fleet of a front's pool on Ray: Serve starts the replicas and routes the requests.

::

    pool's thread                event loop                       router's thread
    send: Add     ────────────▶  a call of `Replica.generate` ──▶ the replica is chosen
    listen        ◀──────────────────────────────────────────────  routed
                  ◀────────────  Report, Report, ...; or failed

A request is in the queue `_unrouted` until its replica is known. Invariant: an event is ignored unless its placement is
the latest of its request.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle

from nanovllm.features.engine_stats import ReplicaStatus
from nanovllm.features.refusals import RAY, refuse
from nanovllm.ray.prompt import Prompt
from nanovllm.serving.replicas.messages import (
    Abort,
    Add,
    FromEngine,
    LoadAdapter,
    Order,
    Report,
    SentRequest,
    ToEngine,
    decode_from_engine,
    encode,
)
from nanovllm.serving.replicas.pool_request import PoolRequest
from nanovllm.serving.replicas.replica_queue import ReplicaQueue

logger = logging.getLogger("nanovllm")

Event = tuple[ReplicaQueue, FromEngine | None]


class RayReplica(ReplicaQueue):
    """Requests of one front in one replica. name: Serve's id of the replica, None after its death."""

    def __init__(self, index: int, max_num_seqs: int) -> None:
        super().__init__(index)
        self.max_num_seqs = max_num_seqs
        self.name: str | None = None

    def bury(self, now: float) -> list[PoolRequest]:
        requests = super().bury(now)
        logger.error("replica %s has died with %d requests of this front", self.name, len(requests))
        self.name = None
        return requests


class RayFleet:
    """Replicas with requests of this front. Not thread-safe, except `wake`; calls report through a queue.

    Args:
        handle: handle of the `Replica` deployment.
        loop: event loop that runs the calls; it outlives the pool.
        max_num_seqs: option of each engine.
        hash_seed: hash seed of the front's model.

    replicas: the first is the queue of unrouted requests; the index of a dead replica is reused.
    """

    def __init__(
        self, handle: DeploymentHandle, loop: asyncio.AbstractEventLoop, *, max_num_seqs: int, hash_seed: str
    ) -> None:
        self._calls = handle.options(stream=True).generate
        self._loop = loop
        self._max_num_seqs = max_num_seqs
        self._hash_seed = hash_seed
        self._unrouted = ReplicaQueue(0)
        self._unrouted.max_num_seqs = 0  # every request counts as waiting
        self.replicas = [self._unrouted]
        self.up = [self._unrouted]
        self._homes: dict[int, ReplicaQueue] = {}  # replica by placement, until the call ends
        self._tasks: dict[int, asyncio.Task[None]] = {}  # task by placement; the event loop's thread alone uses it
        self._events: deque[Callable[[], Event | None]] = deque()
        self._has_event = threading.Event()

    # ------------------------------------------------------------------------------------------ interface of a fleet

    @property
    def statuses(self) -> list[ReplicaStatus]:
        """Empty: a front knows only the replicas that have its requests."""
        return []

    @property
    def has_failed(self) -> bool:
        return False  # Serve restarts replicas while the application runs

    def wake(self) -> None:
        self._has_event.set()

    def wait(self, timeout: float | None) -> None:
        self._has_event.wait(timeout)

    def listen(self) -> Iterator[Event]:
        self._has_event.clear()
        while self._events:
            if (event := self._events.popleft()()) is not None:
                yield event

    def send(self, replica: ReplicaQueue, message: ToEngine) -> None:
        if isinstance(message, Add):
            for request in message.requests:
                self._homes[request.placement] = replica
                self._loop.call_soon_threadsafe(self._start, request)
        elif isinstance(message, Abort):
            self._cancel(message.placement)
        else:
            asked = message.call.replace("check", "update") if isinstance(message, Order) else "reset_prefix_cache"
            refuse("load_adapter" if isinstance(message, LoadAdapter) else asked, RAY)

    def stalled(self) -> list[ReplicaQueue]:
        return []  # Serve calls `Replica.check_health`

    def drop(self, replica: ReplicaQueue) -> None:
        for placement in replica.requests:  # an unreachable replica may still run them
            self._cancel(placement)

    def restart(self) -> None:
        """Do nothing: Serve restarts replicas."""

    def close(self) -> None:
        for placement in list(self._homes):
            self._cancel(placement)

    # ------------------------------------------------------------------------------------- in the event loop's thread

    def _start(self, request: SentRequest) -> None:
        task = asyncio.ensure_future(self._call(request))
        self._tasks[request.placement] = task
        task.add_done_callback(lambda _: self._tasks.pop(request.placement))

    async def _call(self, request: SentRequest) -> None:
        placement = request.placement
        on_routed = partial(self._post_event, self._routed, placement)
        prompt = Prompt(request.prompt_token_ids, request.cache_salt, self._hash_seed, on_routed)
        try:
            response = self._calls.remote(encode(Add([request])), self._hash_seed, time.monotonic(), prompt=prompt)
            try:
                async for data in response:
                    self._post_event(self._reported, placement, decode_from_engine(data))
            finally:
                response.cancel()  # no effect on an ended call
            self._post_event(self._ended, placement)
        except (Exception, asyncio.CancelledError) as error:  # CancelledError: Serve removed the replica
            self._post_event(self._failed, placement, error)

    def _cancel(self, placement: int) -> None:
        self._homes.pop(placement, None)

        def cancel() -> None:
            if (task := self._tasks.get(placement)) is not None:
                task.cancel()

        self._loop.call_soon_threadsafe(cancel)

    def _post_event(self, event: Callable[..., Event | None], *arguments: Any) -> None:
        """Queue an event for the pool's thread; any thread may call it."""
        self._events.append(partial(event, *arguments))
        self._has_event.set()

    # ------------------------------------------------------------------------------------------ in the pool's thread

    def _routed(self, placement: int, name: str, running: Collection[str]) -> None:
        request = self._unrouted.requests.get(placement)
        if request is not None:
            self._unrouted.remove(request)
            self._homes[placement] = replica = self._replica(name, running)
            replica.place(request, placement)

    def _reported(self, placement: int, report: Report) -> Event | None:
        home = self._homes.get(placement)
        return None if home is None else (home, report)

    def _ended(self, placement: int) -> Event | None:
        return self._failed(placement, RuntimeError("it ended before the request did"))

    def _failed(self, placement: int, error: BaseException) -> Event | None:
        home = self._homes.pop(placement, None)
        request = None if home is None else home.requests.get(placement)
        if home is None or request is None:  # the request was aborted, has ended or was moved
            return None
        if home is not self._unrouted and isinstance(error, RayActorError):
            return home, None
        logger.error("a call for request %s failed: %r", request.new.request_id, error)
        home.remove(request)
        alone = ReplicaQueue(home.index)  # only this request moves; its replica lives
        alone.place(request, placement)
        return alone, None

    def _replica(self, name: str, running: Collection[str]) -> RayReplica:
        """Queue of a replica; a new replica reuses the index of a gone one."""
        own = [replica for replica in self.replicas if isinstance(replica, RayReplica)]
        found = next((replica for replica in own if replica.name == name), None)
        if found is not None:
            return found
        gone = (replica for replica in own if replica.name not in running and not replica.requests)
        replica = next(gone, None) or RayReplica(len(self.replicas), self._max_num_seqs)
        if replica.index == len(self.replicas):
            self.replicas.append(replica)
        replica.name = name
        return replica
