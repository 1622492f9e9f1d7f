"""Routing policies: assign each request to a replica, by its queue and prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from nanovllm.sequence import Sequence as RequestSequence
from nanovllm.tools.simulate.replica import Replica

# (request, replicas) -> index of a replica.
Route = Callable[[RequestSequence, Sequence[Replica]], int]

WAITING_WEIGHT = 4  # weight of a waiting request, in running ones
# A replica is overloaded above OVERLOAD_FACTOR x the least load + OVERLOAD_MARGIN.
OVERLOAD_FACTOR = 1.5
OVERLOAD_MARGIN = 16


def replica_load(replica: Replica) -> int:
    """Return 4 x waiting + running requests."""
    return WAITING_WEIGHT * replica.num_waiting + replica.num_running


def round_robin() -> Route:
    """Replicas in turn, regardless of load."""
    turns = count()
    return lambda sequence, replicas: next(turns) % len(replicas)


def least_loaded() -> Route:
    """The replica with the least load (see `replica_load`); ties in turn."""
    turns = count()

    def route(sequence: RequestSequence, replicas: Sequence[Replica]) -> int:
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

    def route(sequence: RequestSequence, replicas: Sequence[Replica]) -> int:
        first = next(turns) % len(replicas)
        loads = [replica_load(replica) for replica in replicas]
        limit = OVERLOAD_FACTOR * min(loads) + OVERLOAD_MARGIN

        in_order = sorted(
            (index for index, load in enumerate(loads) if load <= limit),
            key=lambda index: (loads[index], (index - first) % len(replicas)),
        )
        best, most = in_order[0], 0
        for index in in_order:
            manager = replicas[index].scheduler.block_manager
            if manager.may_hold(sequence, most) and (num_hits := len(manager.lookup(sequence))) > most:
                best, most = index, num_hits
        return best

    return route


POLICIES: dict[str, Callable[[], Route]] = {
    "round-robin": round_robin,
    "least-loaded": least_loaded,
    "prefix-aware": prefix_aware,
}
