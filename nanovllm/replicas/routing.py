"""Routing policies: assign each request to a replica, by its queue and prefix cache.

The front of a server and the simulator route by the same code: each shows its replicas as `ReplicaView`. Nothing here
imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol

WAITING_WEIGHT = 4  # weight of a waiting request, in running ones
# A replica is overloaded above OVERLOAD_FACTOR x the least load + OVERLOAD_MARGIN.
OVERLOAD_FACTOR = 1.5
OVERLOAD_MARGIN = 16


class ReplicaView(Protocol):
    """What a policy knows of a replica; it may be old, which costs prefix hits and never an answer."""

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_running(self) -> int: ...

    def num_hits(self, hashes: Sequence[bytes]) -> int:
        """How many of a prompt's blocks, from the first on, are in the prefix cache; hashes: a `PromptHashes`."""


# (block hashes of the prompt, replicas) -> index of a replica.
Route = Callable[[Sequence[bytes], Sequence[ReplicaView]], int]


def replica_load(replica: ReplicaView) -> int:
    """Return 4 x waiting + running requests."""
    return WAITING_WEIGHT * replica.num_waiting + replica.num_running


def round_robin() -> Route:
    """Replicas in turn, regardless of load."""
    turns = count()
    return lambda hashes, replicas: next(turns) % len(replicas)


def least_loaded() -> Route:
    """The replica with the least load (see `replica_load`); ties in turn."""
    turns = count()

    def route(hashes: Sequence[bytes], replicas: Sequence[ReplicaView]) -> int:
        first = next(turns) % len(replicas)
        return min(
            range(len(replicas)), key=lambda index: (replica_load(replicas[index]), (index - first) % len(replicas))
        )

    return route


def prefix_aware() -> Route:
    """The replica with most of the prompt's blocks in its prefix cache, among those that are not overloaded.

    Ties go to the least load, then in turn. A replica is overloaded above `OVERLOAD_FACTOR` x the least load +
    `OVERLOAD_MARGIN`; the least loaded one never is.
    """
    turns = count()

    def route(hashes: Sequence[bytes], replicas: Sequence[ReplicaView]) -> int:
        first = next(turns) % len(replicas)
        loads = [replica_load(replica) for replica in replicas]
        limit = OVERLOAD_FACTOR * min(loads) + OVERLOAD_MARGIN

        in_order = sorted(
            (index for index, load in enumerate(loads) if load <= limit),
            key=lambda index: (loads[index], (index - first) % len(replicas)),
        )
        return max(in_order, key=lambda index: replicas[index].num_hits(hashes))  # the first of equals

    return route


POLICIES: dict[str, Callable[[], Route]] = {
    "round-robin": round_robin,
    "least-loaded": least_loaded,
    "prefix-aware": prefix_aware,
}
