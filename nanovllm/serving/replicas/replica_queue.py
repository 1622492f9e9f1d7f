"""Queue of a replica in the front, and the interface of a fleet: a pool's replicas on this host or on Ray."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from nanovllm.features.engine_stats import EngineStats, ReplicaStatus
from nanovllm.serving.replicas.messages import FromEngine, ToEngine
from nanovllm.serving.replicas.pool_request import PoolRequest
from nanovllm.serving.replicas.prefix_index import PrefixIndex


class ReplicaQueue:
    """Requests of one replica; a `ReplicaView` for the routing policies.

    requests: its running and queued requests, by placement.
    stats: last reported statistics of its engine.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.prefixes = PrefixIndex()
        self.state = "starting"
        self.requests: dict[int, PoolRequest] = {}
        self.num_samples = 0  # total over requests
        self.max_num_seqs = 1
        self.stats: EngineStats | None = None

    @property
    def num_running(self) -> int:
        return min(self.num_samples, self.max_num_seqs)

    @property
    def num_waiting(self) -> int:
        return self.num_samples - self.num_running

    def num_hits(self, hashes: Sequence[bytes]) -> int:
        return self.prefixes.num_hits(hashes)

    def place(self, request: PoolRequest, placement: int) -> None:
        """Assign a request, which is about to be sent."""
        request.replica = self.index
        request.placement = placement
        self.requests[placement] = request
        self.num_samples += request.new.params.n

    def remove(self, request: PoolRequest) -> None:
        self.prefixes.settle(request.new.request_id)
        del self.requests[request.placement]
        self.num_samples -= request.new.params.n
        request.replica = None

    def bury(self, now: float) -> list[PoolRequest]:
        """Record the death of its engine; returns its requests."""
        self.stats = None
        self.prefixes.clear()
        requests = list(self.requests.values())
        self.requests = {}
        self.num_samples = 0
        for request in requests:
            request.replica = None
        return requests


class FleetInterface(Protocol):
    """Interface of a fleet, documented in `Fleet`. Each `Any` is one of `replicas`."""

    @property
    def replicas(self) -> Sequence[Any]: ...

    @property
    def up(self) -> Sequence[Any]: ...

    @property
    def statuses(self) -> list[ReplicaStatus]: ...

    @property
    def has_failed(self) -> bool: ...

    def wake(self) -> None: ...

    def wait(self, timeout: float | None) -> None: ...

    def listen(self) -> Iterable[tuple[Any, FromEngine | None]]: ...

    def send(self, replica: Any, message: ToEngine) -> None: ...

    def stalled(self) -> Sequence[Any]: ...

    def drop(self, replica: Any) -> None: ...

    def restart(self) -> None: ...

    def close(self) -> None: ...
