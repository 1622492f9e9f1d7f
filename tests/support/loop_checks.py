"""Invariants of the scheduler that a loop checks after every call, for any manager of blocks."""

from __future__ import annotations

from collections import Counter
from typing import Any

from nanovllm.cache.block_checks import check_scheduler
from nanovllm.core.batch import ScheduledBatch
from nanovllm.core.sequence import SCHEDULING_KEY, Sequence
from tests.support.mock_states import check

MAX_IN_FLIGHT = 3


class LoopChecks:
    """The checks of a `Loop`."""

    scheduler: Any
    manager: Any
    model: Any
    sequences: list[Sequence]
    unfinished: list[Sequence]
    in_flight: Any
    seen: Counter[str]
    now: float
    num_steps_without_progress: int
    lost_slot: Sequence | None
    _successor: Sequence | None
    _lost_blocks: set[Sequence]
    _gave_way: set[Sequence]

    def check(self) -> None:
        """Check every invariant that holds between calls."""
        scheduler = self.scheduler
        check_scheduler(scheduler)
        check(len(scheduler.running) <= scheduler.config.max_num_seqs, "more sequences run than max_num_seqs")
        check([item.batch for item in self.in_flight] == list(scheduler.in_flight), "batches in flight are lost")
        in_flight = Counter(sequence.request_id for item in self.in_flight for sequence in item.batch.sampling)
        for sequence in self.sequences:
            check(
                sequence.num_in_flight_tokens == in_flight[sequence.request_id],
                f"{sequence} counts {sequence.num_in_flight_tokens} tokens in flight",
            )
            check(sequence.is_finished or sequence.num_computed_tokens <= sequence.num_known_tokens, f"{sequence}")
        for queue, is_running in ((scheduler.running, True), (scheduler.waiting, False)):
            states = {(sequence.is_running, sequence.is_finished) for sequence in queue}
            check(states <= {(is_running, False)}, f"the queue with is_running={is_running} holds others")
        check(len(scheduler.running) + len(scheduler.waiting) == len(self.unfinished), "a request is in no queue")
        for states in self.model.states:
            states.check_findable(self.manager)
        self._check_order()
        self._check_shares()
        self._check_partial_prefills()

    def _check_progress(self) -> None:
        """Check that sequences advance or end: at most two prompts of the largest length are computed in between."""
        self.num_steps_without_progress += 1
        bound = 2 * self.manager.num_blocks_for(self.scheduler.config.max_model_len) + MAX_IN_FLIGHT
        check(self.num_steps_without_progress <= bound, f"no sequence advanced or ended in {bound} steps")

    def _check_order(self) -> None:
        """Check that both queues are in order of aged priority, then of arrival."""
        ageing = self.scheduler.config.priority_ageing_s
        for queue in (self.scheduler.running, self.scheduler.waiting):
            gained = [(self.now - sequence.arrival_time) / ageing if ageing else 0.0 for sequence in queue]
            order = [(s.priority - gain, s.arrival) for s, gain in zip(queue, gained, strict=True)]
            check(order == sorted(order), f"queue out of order: {order}")
            self.seen["ordered by age"] += list(queue) != sorted(queue, key=lambda s: (s.priority, s.arrival))

    def _check_shares(self) -> None:
        """Check the bound between waiting clients, and that the queue knows each client of an unfinished request."""
        queue, config = self.scheduler.waiting, self.scheduler.config
        if not self.has_shares:
            return
        smallest = min([1.0, *(config.client_weights or {}).values()])
        bound = 2 * queue.bound / smallest
        check(queue.gap <= bound, f"counters of waiting clients are {queue.gap} apart, and may be {bound}")
        self.seen["bounds checked"] += queue.gap > 0
        clients = {sequence.client for sequence in self.unfinished}
        check(
            queue.num_clients == len(clients), f"{queue.num_clients} clients are counted, {len(clients)} have requests"
        )
        check(sorted(queue.in_order(), key=SCHEDULING_KEY) == list(queue), "the order of shares loses a request")
        self.seen["clients beside each other"] += len(clients) > 1

    def _check_partial_prefills(self) -> None:
        """Check the limits; not where failed steps returned sequences to their states, or for what is left of a cut."""
        config, is_cut = self.scheduler.config, bool(self.model.states)
        if is_cut and self.scheduler.stats.num_failed_steps:
            return
        lacking = [sequence.num_known_tokens - sequence.num_computed_tokens for sequence in self.scheduler.running]
        num_long = sum(count > config.long_prefill_token_threshold for count in lacking)
        check(num_long <= config.max_long_partial_prefills, f"{num_long} long prefills in progress")
        num_partial = sum(count > (self.manager.block_size if is_cut else 1) for count in lacking)  # back at a boundary
        check(num_partial <= config.max_num_partial_prefills, f"{num_partial} prefills in progress")

    def _check_preemptions(self, was_running: list[Sequence], batch: ScheduledBatch) -> None:
        preempted = [sequence for sequence in was_running if not sequence.is_running]
        if self.lost_slot in preempted and self.lost_slot not in self._lost_blocks:
            preempted.remove(self.lost_slot)
            check(self._successor in self.scheduler.running, f"{self.lost_slot} gave up its slot, and nobody took it")
            self.seen["slots taken"] += 1
        preempted = [sequence for sequence in preempted if sequence not in self._gave_way]
        self.seen["blocks taken"] += bool(self._gave_way)
        if not preempted:
            return
        placed = {entry.sequence.request_id for entry in batch.entries}
        check(not placed & {sequence.request_id for sequence in preempted}, "a sequence was placed and preempted")
        before = {sequence.request_id for sequence in was_running}
        check(placed <= before, "a step that preempted admitted a request")
        oldest = min(sequence.key for sequence in preempted)
        is_shared = self.has_shares and self.scheduler.waiting.is_shared
        for sequence in () if is_shared else self.scheduler.running:
            spared = sequence.key < oldest or sequence.request_id in placed
            check(spared, f"{sequence} was spared, though younger than one that was preempted")
        check(self.scheduler.running[0].key < oldest, "a sequence was preempted for a younger one")
