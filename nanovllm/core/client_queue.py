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

PREFILL_COST, DECODE_COST = 1.0, 3.0  # of a token: decodes, which share a step's fixed cost, take some 3 times as long
MAX_IDLE = 1024  # clients without requests that a level remembers
LOOKS_PER_TURN = 8  # requests of one client that cannot start and are skipped before the next client's turn


@dataclass(slots=True, eq=False)
class Account:
    """A client in one priority level; `served` is its counter."""

    weight: float
    served: float = 0.0
    num_unfinished: int = 0
    waiting: SortedKeyList = field(default_factory=lambda: SortedKeyList(key=SCHEDULING_KEY))


class ClientQueue:
    """Waiting sequences in order of their keys, and in that of shares; knows the running ones as unfinished.

    is_shared: several clients are known. With one client nothing but prefills is counted.

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
        self._waiting = SortedKeyList(key=SCHEDULING_KEY)
        self.is_shared = False
        self.prefill_cost, self.decode_cost = prefill_cost, decode_cost
        self._weights = weights or {}
        self._levels: dict[int, dict[str, Account]] = {}  # by priority, then by client, used last behind
        self._num_accounts: Counter[str] = Counter()  # of each client

    # ------------------------------------------------------------------------------------------------- requests

    def join(self, sequence: Sequence) -> None:
        """Queue a new sequence; a client that had none in its level gets the least counter of those that have."""
        client, level = sequence.client, self._levels.setdefault(sequence.priority, {})
        account = level.pop(client, None)
        if account is None:
            account = Account(self._weights.get(client, 1.0))
            self._num_accounts[client] += 1
        if not account.num_unfinished:
            account.served = max(account.served, _least(level))
        account.num_unfinished += 1
        level[client] = account
        self._share()
        self.add(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Forget a sequence that ended and is in no queue, and idle clients that are owed nothing less for it."""
        level = self._levels[sequence.priority]
        level[sequence.client].num_unfinished -= 1
        least = _least(level) if any(account.num_unfinished for account in level.values()) else math.inf
        idle = [client for client, account in level.items() if not account.num_unfinished]
        excess = len(idle) - MAX_IDLE
        for number, client in enumerate(idle):
            if number < excess or level[client].served <= least:
                del level[client]
                self._num_accounts[client] -= 1
                if not self._num_accounts[client]:
                    del self._num_accounts[client]
        if not level:
            del self._levels[sequence.priority]
        self._share()

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence again that was preempted."""
        self._waiting.add(sequence)
        if self.is_shared:
            self._account(sequence).waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, which runs now or has ended."""
        self._waiting.remove(sequence)
        if self.is_shared:
            self._account(sequence).waiting.remove(sequence)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def _share(self) -> None:
        """Sort waiting sequences by client once there are several, and no longer once there is one."""
        if self.is_shared == (len(self._num_accounts) > 1):
            return
        self.is_shared = not self.is_shared
        for level in self._levels.values():
            for account in level.values():
                account.waiting.clear()
        if self.is_shared:
            for sequence in self:
                self._account(sequence).waiting.add(sequence)

    def _account(self, sequence: Sequence) -> Account:
        account: Account = self._levels[sequence.priority][sequence.client]
        return account

    # ------------------------------------------------------------------------------------------------- counters

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Count prompt tokens placed for an unfinished sequence; hits are free, and a negative number is a refund."""
        account = self._account(sequence)
        account.served += num_tokens * self.prefill_cost / account.weight

    def charge_generated(self, sampling: Iterable[Sequence]) -> None:
        """Count a token generated for each of these sequences, unless its client is forgotten."""
        for sequence in sampling:
            account = self._levels.get(sequence.priority, {}).get(sequence.client)
            if account is not None:
                account.served += self.decode_cost / account.weight

    @property
    def num_clients(self) -> int:
        """Clients with waiting or running sequences."""
        if not self.is_shared:
            return len(self._num_accounts)
        return len({c for level in self._levels.values() for c, account in level.items() if account.num_unfinished})

    @property
    def gap(self) -> float:
        """Largest difference of the counters of two clients that wait in one priority level."""
        if not self.is_shared:
            return 0.0
        served = [[a.served for a in level.values() if a.waiting] for level in self._levels.values()]
        return max((max(counters) - min(counters) for counters in served if counters), default=0.0)

    # ---------------------------------------------------------------------------------------------------- order

    def in_order(self) -> Iterable[Sequence]:
        """Waiting sequences in the order of admission, which follows charges made while it is iterated."""
        return self._by_share() if self.is_shared else self._waiting

    def _by_share(self) -> Iterator[Sequence]:
        """Level by level; with ageing the level of the oldest is first."""
        heaps = []
        for level in self._levels.values():
            heap = []
            for account in level.values():
                if account.waiting:
                    rest = iter(account.waiting)
                    head = next(rest)
                    heap.append((0, account.served, head.key, 0, account, rest, head))
            if heap:
                heapify(heap)
                heaps.append(heap)
        while heaps:
            heap = heaps[0] if len(heaps) == 1 else min(heaps, key=lambda heap: min(turn[2] for turn in heap))
            _, served, _, num_skipped, account, rest, head = heap[0]
            yield head
            num_skipped += account.served == served
            if (head := next(rest, None)) is not None:
                turn = num_skipped // LOOKS_PER_TURN, account.served, head.key, num_skipped, account, rest, head
                heapreplace(heap, turn)
            else:
                heappop(heap)
                if not heap:
                    heaps.remove(heap)

    def victims(self, running: Iterable[Sequence]) -> list[Sequence]:
        """Running sequences in the order of preemption: lowest priority, then most-served client, then youngest."""
        return sorted(running, key=lambda s: (s.priority, self._account(s).served, s.key), reverse=True)

    def place_to_take(self, running: Collection[Sequence], bound: float) -> Sequence | None:
        """The running sequence whose place is due to the first waiting one, of a client served less; None if none is.

        A client without a place gets one when its counter is so far behind that what is computed twice is paid for;
        else when it is behind by `bound`, a cost.
        """
        first = next(iter(self.in_order()))
        has_place = any(sequence.client == first.client for sequence in running)
        last = first.priority if has_place else math.inf
        others = [
            s
            for s in running
            if s.client != first.client
            and first.priority <= s.priority <= last
            # With ageing an older one of lower priority would start before the first waiting one again.
            and (s.priority == first.priority or s.key > first.key)
        ]
        if first.num_in_flight_tokens or not others:
            return None
        victim, account = self.victims(others)[0], self._account(first)
        due = bound if has_place else self.prefill_cost * (victim.num_known_tokens + first.num_known_tokens)
        behind = (self._account(victim).served - account.served) * account.weight
        return victim if victim.priority > first.priority or behind > due else None


def _least(level: dict[str, Account]) -> float:
    """The least counter of clients with sequences; 0 if there is none."""
    return min((account.served for account in level.values() if account.num_unfinished), default=0.0)
