"""Routing policies: assign each request to a replica, by its queue and prefix cache.

The front of a server and the simulator route by the same code: each shows its replicas as `ReplicaView`. Nothing here
imports torch.
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
# Of `prefix_aware`, in blocks: for each block by which what a replica was given to compute exceeds the least, and for
# each running request. docs/guide/simulator.md has hit rates of other values.
BALANCE = 0.1
LOAD_COST = 1.0
MAX_IMBALANCE = 256.0


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
    """The replica where a prompt costs least, among those that are not overloaded; ties in turn.

    Its cost is the blocks that must be computed there, + `BALANCE` x those that the replica was given to compute beyond
    the one with fewest, + `LOAD_COST` x its load. So conversations return to their blocks, and what is new, or shares
    no more than a system prompt, goes where least was computed: caches turn over alike, and evict what was used longest
    ago of all of them together. A replica is overloaded above `OVERLOAD_FACTOR` x the least load + `OVERLOAD_MARGIN`;
    the least loaded one never is.
    """
    turns = count()
    computed: WeakKeyDictionary[ReplicaView, float] = WeakKeyDictionary()  # blocks that each was given

    def route(hashes: Sequence[bytes], replicas: Sequence[ReplicaView]) -> int:
        first = next(turns) % len(replicas)
        loads = [replica_load(replica) for replica in replicas]
        limit = OVERLOAD_FACTOR * min(loads) + OVERLOAD_MARGIN
        # One that comes up again, or is new, has no more to make up for than this.
        floor = max((computed.get(replica, 0.0) for replica in replicas), default=0.0) - MAX_IMBALANCE
        work = [max(computed.get(replica, floor), floor) for replica in replicas]
        least = min(work)
        best, chosen = (inf, 0), 0
        misses = 0
        for index, replica in enumerate(replicas):
            if loads[index] > limit:
                continue
            missed = len(hashes) - replica.num_hits(hashes)
            cost = missed + BALANCE * (work[index] - least) + LOAD_COST * loads[index]
            if (cost, (index - first) % len(replicas)) < best:
                best, chosen, misses = (cost, (index - first) % len(replicas)), index, missed
        computed[replicas[chosen]] = work[chosen] + misses
        return chosen

    return route


POLICIES: dict[str, Callable[[], Route]] = {
    "round-robin": round_robin,
    "least-loaded": least_loaded,
    "prefix-aware": prefix_aware,
}
