"""The queue of waiting sequences, and the shares of their clients: virtual token counters (Sheng et al. 2024, VTC).

A client has one counter in each priority level: the cost of the tokens computed and generated for it, over its weight.
Within a level the least-served client's oldest request starts first::

    counter of A    |=====================>            running, and 800 waiting
    counter of B    |=====>                            waits: its next request starts before all of A's
    counter of C                   |>                  asks again: begins at the least counter of waiting clients

Bound: the counters of two clients that both wait all the time differ by at most twice `ClientQueue.bound`, over the
smaller weight. From half of it on no request of the client that was served more starts, and its running sequences give
up the blocks that the other one lacks. A client loses its last slot only to one that was served less by more than both
cost again, so each turn brings tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from operator import attrgetter

from sortedcontainers import SortedKeyList

from nanovllm.admission import Admission
from nanovllm.block_manager import BlockManager
from nanovllm.features.engine_config import EngineConfig
from nanovllm.sequence import SCHEDULING_KEY, Sequence

PREFILL_COST, DECODE_COST = 1.0, 3.0  # Costs of a token; 3 is an estimate, for engines that measured none
MAX_IDLE = 1024  # Counters kept for clients without requests
SERVED = attrgetter("served")  # Field of an Account
LOOKS_PER_TURN = 8  # requests of one client that cannot start and are skipped before the next client's turn


@dataclass(slots=True, eq=False)
class Account:
    """A client in one priority level.

    served: its service: the cost of its tokens over its weight.
    num_waiting, first: Length and head of `waiting`, which each step reads for every client.
    """

    client: str
    weight: float
    served: float = 0.0
    num_unfinished: int = 0
    num_waiting: int = 0
    waiting: SortedKeyList = field(default_factory=lambda: SortedKeyList(key=SCHEDULING_KEY))
    first: Sequence | None = None

    @property
    def num_running(self) -> int:
        return self.num_unfinished - self.num_waiting


class ClientQueue:
    """`Queue` that starts the sequences of the client with the least service per weight first.

    bound: Cost that may separate two waiting clients: the longest prompt's, or all tokens' that may run at once.
    is_shared: True if there are several clients; generated tokens of a single one are not counted.

    Args:
        config: Configuration with limits resolved; a client without a weight in `client_weights` has 1.
        blocks: Block manager of the scheduler.
        prefill_cost, decode_cost: Costs of a computed and of a generated token, in any unit of time.
    """

    def __init__(
        self,
        config: EngineConfig,
        blocks: BlockManager,
        *,
        prefill_cost: float = PREFILL_COST,
        decode_cost: float = DECODE_COST,
    ) -> None:
        self.prefill_cost = prefill_cost
        self.decode_cost = decode_cost
        num_tokens = min(blocks.max_running_tokens, config.max_num_seqs * config.max_model_len)
        self.bound = max(prefill_cost * config.max_model_len, decode_cost * num_tokens)
        self.is_shared = False
        self._config = config
        self._blocks = blocks
        self._admission = Admission(config, blocks)
        self._weights = config.client_weights or {}
        self._waiting = SortedKeyList(key=SCHEDULING_KEY)
        self._levels: dict[int, dict[str, Account]] = {}  # Priority -> client -> account
        self._num_accounts: Counter[str] = Counter()  # Client -> number of its accounts
        self._idle: dict[tuple[int, str], Account] = {}  # Accounts without sequences, oldest first

    # ------------------------------------------------------------------------------------------------- requests

    def join(self, sequence: Sequence) -> None:
        """Queue a new sequence.

        An idle client returns at the minimum counter of clients that wait, or that run if none waits, so it cannot bank
        service.
        """
        client = sequence.client
        level = self._levels.setdefault(sequence.priority, {})
        account = level.get(client)
        if account is None:
            account = self._idle.pop((sequence.priority, client), None)
            account = account or Account(client, self._weights.get(client, 1.0))
            self._num_accounts[client] += 1
        if not account.num_waiting:
            others = [other for other in level.values() if other is not account]
            waiting = [other for other in others if other.num_waiting]
            account.served = max(account.served, min(map(SERVED, waiting or others), default=0.0))
        level[client] = account
        account.num_unfinished += 1
        sequence.account = account
        self.is_shared = len(self._num_accounts) > 1 or bool(self._idle)
        self.add(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended; it waits no longer."""
        client = sequence.client
        level = self._levels[sequence.priority]
        level[client].num_unfinished -= 1
        if not level[client].num_unfinished:
            self._idle[sequence.priority, client] = level.pop(client)
            self._num_accounts[client] -= 1
            if not self._num_accounts[client]:
                del self._num_accounts[client]
        if not level:
            del self._levels[sequence.priority]
        if len(self._idle) > MAX_IDLE:
            del self._idle[next(iter(self._idle))]
        if self._idle and len(level) < 2:  # forget clients with which the last one has caught up
            least = min(map(SERVED, level.values()), default=math.inf)
            self._idle = {
                key: account
                for key, account in self._idle.items()
                if key[0] != sequence.priority or account.served > least
            }

    def rejoin(self, sequence: Sequence) -> None:
        """Queue a preempted sequence again; a client that had none waiting lags by at most `bound`.

        A client that got all it asked for cannot bank service, either.
        """
        account = sequence.account
        if self.is_shared and not account.num_waiting:
            level = self._levels[sequence.priority].values()
            most = max((other.served for other in level if other.num_waiting), default=0.0)
            account.served = max(account.served, most - self.bound / account.weight)
        self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        account = sequence.account
        self._waiting.add(sequence)
        account.waiting.add(sequence)
        account.num_waiting += 1
        account.first = account.waiting[0]

    def remove(self, sequence: Sequence) -> None:
        """Take out a waiting sequence, which starts or has ended."""
        account = sequence.account
        self._waiting.remove(sequence)
        account.waiting.remove(sequence)
        account.num_waiting -= 1
        account.first = account.waiting[0] if account.num_waiting else None

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    # ------------------------------------------------------------------------------------------------- counters

    def charge(self, sequence: Sequence, num_tokens: int, victim: Sequence | None = None) -> None:
        """Charge the client for prompt tokens placed (negative: a refund), and for recomputing `victim`."""
        if victim is not None:
            num_tokens += self._num_lost_tokens(victim, sequence)
        account = sequence.account
        account.served += num_tokens * self.prefill_cost / account.weight

    def charge_generated(self, advanced: list[Sequence], without_token: list[Sequence]) -> None:
        """Charge one generated token for each advanced sequence except `without_token`; any may have ended."""
        if not self.is_shared:
            return
        for sequences, cost in ((advanced, self.decode_cost), (without_token, -self.decode_cost)):
            for sequence in sequences:
                sequence.account.served += cost / sequence.account.weight
        self.is_shared = len(self._num_accounts) > 1 or bool(self._idle)  # The last tokens of a client count too

    @property
    def num_clients(self) -> int:
        """Clients with waiting or running sequences."""
        return len(self._num_accounts)

    @property
    def gap(self) -> float:
        """Largest difference of the counters of two clients that wait in one priority level."""
        if not self.is_shared:
            return 0.0
        served = [[a.served for a in level.values() if a.first is not None] for level in self._levels.values()]
        return max((max(counters) - min(counters) for counters in served if counters), default=0.0)

    # ---------------------------------------------------------------------------------------------------- order

    def in_order(self) -> Iterable[Sequence]:
        return self._by_share(math.inf) if self.is_shared else self._waiting

    def startable(self) -> Iterable[Sequence]:
        """See `Queue`. Only clients served at most `bound` more may pass a sequence that did not start."""
        return self._by_share(self.bound) if self.is_shared else self._waiting

    def _by_share(self, bound: float) -> Iterator[Sequence]:
        """Sequences by priority level, then service; with ageing, the level of the oldest sequence goes first."""
        held_back: dict[int, Account] = {}  # priority -> first account, so the least served
        heaps: dict[int, list[tuple[int, float, tuple[float, int], int, int, Account]]] = {}
        passed: set[Sequence] = set()
        for oldest in self._waiting:
            if (heap := heaps.get(oldest.priority)) is None:
                accounts = self._levels[oldest.priority].values()
                heap = [(0, a.served, a.first.key, 0, 0, a) for a in accounts if a.first is not None]
                heapify(heap)
                heaps[oldest.priority] = heap
            while heap and oldest not in passed:
                _, served, _, num_skipped, index, account = heap[0]
                least = held_back.get(oldest.priority, account)
                if account.served > least.served + bound / least.weight:
                    heappop(heap)
                    continue
                sequence = account.waiting[index]
                passed.add(sequence)
                yield sequence
                if not sequence.num_computed_tokens:
                    held_back.setdefault(oldest.priority, account)
                index += 1
                num_skipped += account.served == served
                if index < len(account.waiting):
                    key = account.waiting[index].key
                    heapreplace(heap, (num_skipped // LOOKS_PER_TURN, account.served, key, num_skipped, index, account))
                else:
                    heappop(heap)

    @property
    def first(self) -> Sequence:
        """The first waiting sequence in the order of shares; there must be one."""
        level = self._levels[self._waiting[0].priority].values()
        return min([(account.served, first.key, first) for account in level if (first := account.first) is not None])[2]

    def rank(self, sequence: Sequence) -> tuple[float, ...]:
        """Priority level, and the service of its client."""
        return sequence.key[0] // 1, sequence.account.served if self.is_shared else 0.0

    # --------------------------------------------------------------------------------------------------- victims

    def victims(self, running: SortedKeyList, sequence: Sequence) -> list[Sequence]:
        """Younger sequences of the same or lower priority, those of the most-served client first."""
        younger = running.irange_key(min_key=sequence.key, inclusive=(False, True), reverse=True)
        return sorted(younger, key=_precedence, reverse=True) if self.is_shared else list(younger)

    def make_way(self, running: SortedKeyList, preempt: Callable[[Sequence], None]) -> Sequence | None:
        """Preempt for less-served clients that lack blocks; returns the sequence that yields its slot, if any."""
        if not self.is_shared:
            return None
        for victim in self.block_victims(running):
            preempt(victim)
        is_full = len(running) == self._config.max_num_seqs
        return self._ready_slot_victim(running) if is_full and self._waiting else None

    def block_victims(self, running: SortedKeyList) -> Iterator[Sequence]:
        """Yield running sequences to preempt for clients that were served less by more than `bound`.

        The caller preempts each before the next. They are enough once blocks are free for the next tokens of all
        running sequences, and for the first waiting request of the less-served client.
        """
        blocks = self._blocks
        blocks_lacking = self._admission.blocks_lacking
        for first, victims in self._lagging(running):
            hits = blocks.lookup(first) if first else []
            if first and not self._admission.chunk_size(first, len(hits) * blocks.block_size, first.num_known_tokens):
                first = None  # waits for files or a state
            for victim in victims:
                lacking = sum(map(blocks_lacking, running), blocks_lacking(first, hits) if first else 0)
                num_growing = sum(s.num_computed_tokens == len(s.block_table) * blocks.block_size for s in running)
                if blocks.has_free(lacking + num_growing):
                    break
                yield victim

    def _lagging(self, running: SortedKeyList) -> Iterator[tuple[Sequence | None, list[Sequence]]]:
        """Yield, for each priority, (first waiting sequence of its least-served client, sequences to preempt for it).

        Only where clients run that were served more by over `bound`: their sequences, in the order of preemption. The
        first is None if that client has none waiting, or while its token is in flight.
        """
        for priority, level in self._levels.items():
            least = min(level.values(), key=SERVED)
            limit = least.served + self.bound / least.weight
            if any(account.num_running and account.served > limit for account in level.values()):
                ahead = [s for s in running if s.priority == priority and s.account.served > limit]
                first = least.first
                ahead.sort(key=_precedence, reverse=True)
                yield None if first and first.num_in_flight_tokens else first, ahead

    def _ready_slot_victim(self, running: SortedKeyList) -> Sequence | None:
        """The running sequence that yields its slot if the first waiting one can start.

        None while a prefill is in progress that comes before it: it may take the budget that the successor needs.
        """
        victim = self.slot_victim(running)
        if victim is None or victim.num_known_tokens - victim.num_computed_tokens > 1:
            return None
        few = 1 + (self._config.speculation is not None) * self._config.num_speculative_tokens  # drafts are repeated
        order = self.rank(self.first)
        prefills = (s for s in running if s.num_known_tokens - s.num_computed_tokens > few)
        return None if any(self.rank(s) <= order for s in prefills) else victim

    def slot_victim(self, running: SortedKeyList) -> Sequence | None:
        """The running sequence that yields its slot to the first waiting one, of a client served less; None if none.

        A less-served client gets slots at once until it has one less than the most-served one. A client's last slot is
        preempted only if its service lead exceeds the recompute cost of both sequences; further ones, if it exceeds
        `bound`.
        """
        first = self.first
        account = first.account
        client = first.client
        if first.num_in_flight_tokens:
            return None
        num_slots = sum(level[client].num_running for level in self._levels.values() if client in level)
        if not num_slots and max(self._levels) > first.priority:
            # With ageing an older one of lower priority would start before the first waiting one again.
            lower = [s for s in running if s.priority > first.priority and s.key > first.key and s.client != client]
            if lower:
                return max(lower, key=_precedence)
        rivals = [a for a in self._levels[first.priority].values() if a.num_unfinished > a.num_waiting]
        rival = max(rivals, key=SERVED, default=account)  # Most steps look at clients, not at sequences
        behind = (rival.served - account.served) * account.weight
        has_more = rival.num_running > num_slots + 1
        if behind <= (self.bound if num_slots and not has_more else 0.0):
            return None
        own = [s for s in reversed(running) if s.account is rival]
        victim = next((s for s in own if s.num_known_tokens - s.num_computed_tokens <= 1), own[0])  # not a prefill
        due = self.prefill_cost * (victim.num_known_tokens + first.num_known_tokens)
        return victim if num_slots or has_more or behind > due else None

    def _num_lost_tokens(self, victim: Sequence, successor: Sequence) -> int:
        """Tokens of `victim` to recompute, which the successor pays for; 0 for a client's last slot."""
        if victim.account.num_running == 1 or victim.priority != successor.priority:
            return 0
        is_kept = self._config.enable_prefix_caching and self._blocks.has_free(
            self._admission.blocks_lacking(successor)
        )
        return victim.num_known_tokens % self._blocks.block_size if is_kept else victim.num_known_tokens


def _precedence(sequence: Sequence) -> tuple[int, float, tuple[float, int]]:
    return sequence.priority, sequence.account.served, sequence.key
