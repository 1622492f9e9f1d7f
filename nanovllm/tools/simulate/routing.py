"""Which of several replicas a request goes to; each policy sees their true queues and prefix caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from nanovllm.sequence import Sequence as RequestSequence
from nanovllm.tools.simulate.replica import Replica

# From a request and the replicas to the index of one of them.
Route = Callable[[RequestSequence, Sequence[Replica]], int]

WAITING_WEIGHT = 4  # a request that waits counts as much as so many that run
# A replica is overloaded if its load is more than this multiple of the least one, and this much on top of it.
OVERLOAD_FACTOR = 1.5
OVERLOAD_MARGIN = 16


def load_of(replica: Replica) -> int:
    """4 x waiting + running requests."""
    return WAITING_WEIGHT * replica.num_waiting + replica.num_running


def round_robin() -> Route:
    """One after the other, whatever they do."""
    turns = count()
    return lambda sequence, replicas: next(turns) % len(replicas)


def least_loaded() -> Route:
    """The one with the least load (see `load_of`), the first of several; those in turn that are idle alike."""
    turns = count()

    def route(sequence: RequestSequence, replicas: Sequence[Replica]) -> int:
        first = next(turns) % len(replicas)
        return min(range(len(replicas)), key=lambda index: (load_of(replicas[index]), (index - first) % len(replicas)))

    return route


def prefix_aware() -> Route:
    """Among the replicas that are not overloaded, the one that holds most of the prompt's blocks in its prefix cache.

    Of several the one with the least load, and of those in turn. A replica is overloaded if its load is above
    `OVERLOAD_FACTOR` times the least load of all plus `OVERLOAD_MARGIN`; the least loaded one never is.
    """
    turns = count()

    def route(sequence: RequestSequence, replicas: Sequence[Replica]) -> int:
        first = next(turns) % len(replicas)
        loads = [load_of(replica) for replica in replicas]
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
