"""Adapters of a pool: each replica reads them itself, and drops one that nothing in the front refers to any more.

Invariant: a replica that is up has received an order for each adapter in `_live` before any request that names it.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanovllm.features.adapters.loading import Adapter
from nanovllm.serving.replicas.messages import AdapterLoaded, DropAdapter, FromEngine, LoadAdapter, Ready
from nanovllm.serving.replicas.replica_queue import FleetInterface, ReplicaQueue

logger = logging.getLogger("nanovllm")


class Loading:
    """Order to load an adapter, and its answers so far.

    waiting: replicas that have received the order and are up, without their answer.
    """

    def __init__(self, order: LoadAdapter) -> None:
        self.order = order
        self.waiting: set[ReplicaQueue] = set()
        self.answers: dict[ReplicaQueue, AdapterLoaded] = {}
        self.is_sent = False

    @property
    def digests(self) -> set[str]:
        return {answer.digest for answer in self.answers.values() if answer.error is None}

    def error(self) -> str | None:
        """Reason not to serve the adapter, once no answer is missing; None without one."""
        name, path = self.order.name, self.order.path
        if not self.answers:
            return f"every replica died while it loaded the adapter {name!r} from {path}; their output says why."
        if errors := [answer.error for answer in self.answers.values() if answer.error is not None]:
            return errors[0]
        if len(self.digests) > 1:
            return f"replicas read different bytes of the adapter {name!r} from {path}. Load it once it is written."
        return None


class PoolAdapters:
    """Adapters of a fleet, without their factors. Not thread-safe, except that any thread may collect one."""

    def __init__(self, fleet: FleetInterface) -> None:
        self._fleet = fleet
        self._live: weakref.WeakSet[Adapter] = weakref.WeakSet()  # adapters with a name or a request
        self._dropped: deque[str] = deque()  # digests of collected adapters
        self._numbers = itertools.count()
        self._loading: Loading | None = None

    def load(self, name: str, path: Any, advance: Callable[[], None]) -> Adapter:
        """Load an adapter in every replica that is up, or in none.

        Args:
            advance: function that waits for messages and passes each on to `handle`.

        Raises ValueError if a replica cannot load it, if all died of it, or if they read different bytes.
        """
        folder = str(Path(path).expanduser().absolute())  # replicas may have another working directory
        self._loading = loading = Loading(self._order(name, folder, None))
        try:
            for replica in self._fleet.up:
                self._send_pending(replica)
            while loading.waiting or not loading.is_sent:
                advance()
            if (error := loading.error()) is not None:
                self._dropped += loading.digests
                raise ValueError(error)
            answer = next(iter(loading.answers.values()))
            adapter = Adapter(name, folder, answer.digest, answer.rank, {})
            self._live.add(adapter)
            weakref.finalize(adapter, self._dropped.append, adapter.digest).atexit = False
            return adapter
        finally:
            self._loading = None
            self.drop_unused()

    def handle(self, replica: ReplicaQueue, message: FromEngine | None) -> None:
        """Handle a message of a replica, None for its death."""
        loading = self._loading
        if isinstance(message, Ready):
            for adapter in self._live:
                self._fleet.send(replica, self._order(adapter.name, adapter.path, adapter.digest))
            self._send_pending(replica)
        elif isinstance(message, AdapterLoaded):
            if loading is not None and message.number == loading.order.number:
                loading.waiting.discard(replica)
                loading.answers[replica] = message
            elif message.error is not None:
                logger.error("replica %d: %s", replica.index, message.error)
            else:  # its load was cut off, or the adapter may have been collected since the order
                self._dropped.append(message.digest)
        elif message is None and loading is not None:
            loading.waiting.discard(replica)
            loading.answers.pop(replica, None)

    def drop_unused(self) -> None:
        """Have the replicas drop bytes that no adapter of the front has any more; no-op while one is loaded."""
        while self._dropped and self._loading is None:
            digest = self._dropped.popleft()
            if all(adapter.digest != digest for adapter in self._live):
                for replica in self._fleet.up:
                    self._fleet.send(replica, DropAdapter(digest))

    def _order(self, name: str, path: str, digest: str | None) -> LoadAdapter:
        return LoadAdapter(next(self._numbers), name, path, digest)

    def _send_pending(self, replica: ReplicaQueue) -> None:
        if (loading := self._loading) is not None:
            self._fleet.send(replica, loading.order)
            loading.waiting.add(replica)
            loading.is_sent = True
