"""The queue of waiting sequences, and the shares of their clients: virtual token counters (Sheng et al. 2024, VTC).

A client has one counter in each priority level: the cost of the tokens computed and generated for it, over its weight.
Within a level the least-served client's oldest request starts first::

    counter of A    |=====================>            running, and 800 waiting
    counter of B    |=====>                            waits: its next request starts before all of A's
    counter of C                          |>           comes (back): begins at the least counter of those with requests

Bound: the counters of two clients that both wait all the time differ by at most 2 * max(cost of the longest prompt,
cost of generating as many tokens as running sequences may hold), over the smaller weight.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace

from sortedcontainers import SortedKeyList

from nanovllm.core.sequence import SCHEDULING_KEY, Sequence

PREFILL_COST, DECODE_COST = 1.0, 3.0  # of a token; 3 is an estimate: decodes share a step's fixed cost
MAX_IDLE = 1024  # clients without requests whose counters are kept
LOOKS_PER_TURN = 8  # requests of one client that cannot start and are skipped before the next client's turn


@dataclass(slots=True, eq=False)
class Account:
    """A client with sequences in one priority level; `served` is its counter."""

    weight: float
    served: float
    num_unfinished: int = 0
    waiting: SortedKeyList = field(default_factory=lambda: SortedKeyList(key=SCHEDULING_KEY))


class ClientQueue:
    """Waiting sequences by their keys, and in the order of shares; running ones count as unfinished.

    Args:
        weights: of clients; 1 for the others.
        prefill_cost, decode_cost: of a computed and of a generated token, in any unit of time.
    """

    def __init__(
        self,
        weights: Mapping[str, float] | None = None,
        prefill_cost: float = PREFILL_COST,
        decode_cost: float = DECODE_COST,
    ) -> None:
        self.prefill_cost, self.decode_cost = prefill_cost, decode_cost
        self._weights = weights or {}
        self._waiting = SortedKeyList(key=SCHEDULING_KEY)
        self._levels: dict[int, dict[str, Account]] = {}  # by priority, then by client
        self._num_accounts: Counter[str] = Counter()  # of each client
        self._idle: dict[tuple[int, str], float] = {}  # counters of clients without sequences, oldest first

    # ------------------------------------------------------------------------------------------------- requests

    def join(self, sequence: Sequence) -> None:
        """Queue a new sequence; a client that had none in its level gets at least the least counter there."""
        client, level = sequence.client, self._levels.setdefault(sequence.priority, {})
        if client not in level:
            served = max(self._idle.pop((sequence.priority, client), 0.0), _least_served(level, 0.0))
            level[client] = Account(self._weights.get(client, 1.0), served)
            self._num_accounts[client] += 1
        level[client].num_unfinished += 1
        self.add(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Forget a sequence that ended and is in no queue."""
        client, level = sequence.client, self._levels[sequence.priority]
        level[client].num_unfinished -= 1
        if not level[client].num_unfinished:
            self._idle[sequence.priority, client] = level.pop(client).served
            self._num_accounts[client] -= 1
            if not self._num_accounts[client]:
                del self._num_accounts[client]
        if not level:
            del self._levels[sequence.priority]
        if len(self._idle) > MAX_IDLE:
            del self._idle[next(iter(self._idle))]
        if self._idle and len(level) < 2:  # forget clients with which the last one has caught up
            least = _least_served(level, math.inf)
            self._idle = {key: n for key, n in self._idle.items() if key[0] != sequence.priority or n > least}

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence again that was preempted."""
        self._waiting.add(sequence)
        self._account(sequence).waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, which runs now or has ended."""
        self._waiting.remove(sequence)
        self._account(sequence).waiting.remove(sequence)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def _account(self, sequence: Sequence) -> Account:
        return self._levels[sequence.priority][sequence.client]

    # ------------------------------------------------------------------------------------------------- counters

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Count prompt tokens placed for an unfinished sequence; hits are free, and a negative number is a refund."""
        account = self._account(sequence)
        account.served += num_tokens * self.prefill_cost / account.weight

    def charge_generated(self, sampling: Iterable[Sequence]) -> None:
        """Count a token generated for each of these sequences, unless its client has none left."""
        for sequence in sampling:
            account = self._levels.get(sequence.priority, {}).get(sequence.client)
            if account is not None:
                account.served += self.decode_cost / account.weight

    @property
    def is_shared(self) -> bool:
        """Whether a client has others to keep up with; else its generated tokens need not be counted."""
        return len(self._num_accounts) > 1 or bool(self._idle)

    @property
    def num_clients(self) -> int:
        """Clients with waiting or running sequences."""
        return len(self._num_accounts)

    @property
    def gap(self) -> float:
        """Largest difference of the counters of two clients that wait in one priority level."""
        served = [[a.served for a in level.values() if a.waiting] for level in self._levels.values()]
        return max((max(counters) - min(counters) for counters in served if counters), default=0.0)

    # ---------------------------------------------------------------------------------------------------- order

    def in_order(self) -> Iterable[Sequence]:
        """Waiting sequences in the order of admission, which follows charges made while it is iterated."""
        return self._by_share() if self.is_shared else self._waiting

    def _by_share(self) -> Iterator[Sequence]:
        """Level by level; with ageing the level of the oldest is first."""
        heaps: dict[int, list[tuple[int, float, tuple[float, int], int, int, Account]]] = {}
        passed: set[Sequence] = set()
        for oldest in self._waiting:
            if (heap := heaps.get(oldest.priority)) is None:
                accounts = [account for account in self._levels[oldest.priority].values() if account.waiting]
                heap = [(0, account.served, account.waiting[0].key, 0, 0, account) for account in accounts]
                heapify(heap)
                heaps[oldest.priority] = heap
            while oldest not in passed:
                _, served, _, num_skipped, index, account = heap[0]
                passed.add(account.waiting[index])
                yield account.waiting[index]
                index += 1
                num_skipped += account.served == served
                if index < len(account.waiting):
                    key = account.waiting[index].key
                    heapreplace(heap, (num_skipped // LOOKS_PER_TURN, account.served, key, num_skipped, index, account))
                else:
                    heappop(heap)

    def preemption_order(self, running: Iterable[Sequence]) -> list[Sequence]:
        """Running sequences, those of lowest priority first, then of the most-served client, then the youngest."""
        return sorted(running, key=self._precedence, reverse=True)

    def _precedence(self, sequence: Sequence) -> tuple[int, float, tuple[float, int]]:
        return sequence.priority, self._account(sequence).served, sequence.key

    def slot_victim(self, running: Collection[Sequence], bound: float) -> Sequence | None:
        """The running sequence that yields its slot to the first waiting one, of a client served less; None if none.

        A client without a slot gets one when its counter is so far behind that what is computed twice is paid for;
        else when it is behind by `bound`, a cost.
        """
        first = next(iter(self.in_order()))
        has_slot = any(sequence.client == first.client for sequence in running)
        others = [
            s
            for s in running
            if s.client != first.client
            # With ageing an older one of lower priority would start before the first waiting one again.
            and (s.priority == first.priority or (not has_slot and s.priority > first.priority and s.key > first.key))
        ]
        if first.num_in_flight_tokens or not others:
            return None
        victim, account = max(others, key=self._precedence), self._account(first)
        due = bound if has_slot else self.prefill_cost * (victim.num_known_tokens + first.num_known_tokens)
        behind = (self._account(victim).served - account.served) * account.weight
        return victim if victim.priority > first.priority or behind > due else None


def _least_served(level: Mapping[str, Account], default: float) -> float:
    return min((account.served for account in level.values()), default=default)
