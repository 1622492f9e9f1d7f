"""Routing policies: assign each request to a replica, by its queue and prefix cache.

Shared by the front and the simulator, which pass their replicas as `ReplicaView`. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from math import inf
from typing import Protocol
from weakref import WeakKeyDictionary

WAITING_WEIGHT = 4  # weight of a waiting request, in running ones
# A replica is overloaded above OVERLOAD_FACTOR x the least load + OVERLOAD_MARGIN.
OVERLOAD_FACTOR = 1.5
OVERLOAD_MARGIN = 16
# Costs of `prefix_aware`, in blocks: per block of work above the replica with the least work, and per running request.
# docs/guide/simulator.md has hit rates of other values.
BALANCE = 0.1
LOAD_COST = 1.0
MAX_IMBALANCE = 256.0


class ReplicaView(Protocol):
    """State of a replica for a policy; stale values cost prefix hits, never an answer."""

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_running(self) -> int: ...

    def num_hits(self, hashes: Sequence[bytes]) -> int:
        """Number of a prompt's leading blocks in the prefix cache; hashes: a `PromptHashes`."""


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
    """The replica with the least cost for a prompt, overloaded ones excluded; ties in turn.

    cost = the prompt's missing blocks there + `BALANCE` x (blocks given to the replica - the least of any) +
    `LOAD_COST` x its load. So conversations return to their blocks, and new prompts, or ones that share only a system
    prompt, go to the replica that computed least: all caches turn over at one rate, like one large LRU cache. A
    replica is overloaded above `OVERLOAD_FACTOR` x the least load + `OVERLOAD_MARGIN`; the least loaded one never is.
    """
    turns = count()
    computed: WeakKeyDictionary[ReplicaView, float] = WeakKeyDictionary()  # blocks given to each replica

    def route(hashes: Sequence[bytes], replicas: Sequence[ReplicaView]) -> int:
        first = next(turns) % len(replicas)
        loads = [replica_load(replica) for replica in replicas]
        limit = OVERLOAD_FACTOR * min(loads) + OVERLOAD_MARGIN
        # Bounds how much work a new or restarted replica catches up on.
        floor = max((computed.get(replica, 0.0) for replica in replicas), default=0.0) - MAX_IMBALANCE
        work = [max(computed.get(replica, floor), floor) for replica in replicas]
        least = min(work)
        best = (inf, 0)
        chosen = 0
        misses = 0
        for index, replica in enumerate(replicas):
            if loads[index] > limit:
                continue
            missed = len(hashes) - replica.num_hits(hashes)
            cost = missed + BALANCE * (work[index] - least) + LOAD_COST * loads[index]
            if (cost, (index - first) % len(replicas)) < best:
                best = (cost, (index - first) % len(replicas))
                chosen = index
                misses = missed
        computed[replicas[chosen]] = work[chosen] + misses
        return chosen

    return route


POLICIES: dict[str, Callable[[], Route]] = {
    "round-robin": round_robin,
    "least-loaded": least_loaded,
    "prefix-aware": prefix_aware,
}
