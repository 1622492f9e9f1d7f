"""Decides which sequences compute how many tokens in each step; pure Python, counts only, never a token's value.

Invariant: no batch exceeds the token budget or the free blocks, and `schedule()` returns work while there is any that
is neither in flight nor waits for files. The oldest sequence of the highest priority always finishes: it can preempt
all others for their blocks, and the pool holds one sequence of max_model_len. A queue that preempts sequences for
other clients leaves each of them running long enough to generate tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceABC
from typing import Any, Protocol

from sortedcontainers import SortedKeyList

from nanovllm.admission import Admission, NoProposer, OpenStep, Proposer
from nanovllm.admission import Queue as Queue
from nanovllm.admission import WaitingQueue as WaitingQueue
from nanovllm.batch import NON_FINITE, ScheduledBatch, ScheduledSequence, StepResults, end_without_token
from nanovllm.block_manager import BlockManager
from nanovllm.config import EngineConfig
from nanovllm.outputs import FinishReason, SchedulerStats
from nanovllm.sequence import SCHEDULING_KEY, Sequence


class Budget(Protocol):
    """Token budget of each step. `WholeBudget` is the default; `features/goals` has one that keeps latency goals."""

    def see(self, sequence: Sequence) -> None:
        """Note that a sequence arrives or ends now."""

    def in_step(self, running: SequenceABC[Sequence]) -> SequenceABC[Sequence]:
        """The running sequences that take part in the step."""

    def of_step(
        self,
        decodes: SequenceABC[ScheduledSequence],
        prefills: SequenceABC[Sequence],
        waiting: Queue,
        lookup: Callable[[Sequence], SequenceABC[int]],
        *,
        has_slot: bool,
    ) -> tuple[int, int]:
        """(budget of the step, at most `max_num_batched_tokens`; most tokens of one prompt while others wait).

        Args:
            prefills: Sequences that run and have several tokens left to compute.
            lookup: Function that returns the next blocks of a sequence in the prefix cache.
            has_slot: True if a waiting sequence may start.
        """

    def has_time(self, sequence: Sequence) -> bool:
        """Whether the step has time for the sequence's mask (structured output); if so, that time is spent."""

    def stats(self) -> Any: ...


class WholeBudget:
    """`max_num_batched_tokens` for every step."""

    def __init__(self, config: EngineConfig) -> None:
        self._tokens = config.max_num_batched_tokens, config.long_prefill_token_threshold

    def see(self, sequence: Sequence) -> None:
        pass

    def in_step(self, running: SequenceABC[Sequence]) -> SequenceABC[Sequence]:
        return running

    def of_step(self, *_: object, has_slot: bool) -> tuple[int, int]:
        return self._tokens

    def has_time(self, sequence: Sequence) -> bool:
        return True

    def stats(self) -> None:
        return None


class Scheduler:
    """Continuous batching (Yu et al. 2022, Orca) with chunked prefill (Agrawal et al. 2024, Sarathi-Serve).

    `schedule` makes a batch and counts it as in flight; `update` takes its sampled tokens. Several batches may be in
    flight; they are updated in the order in which they were scheduled.

    Args:
        budget: Budget of each step; by default `max_num_batched_tokens`.
        queue: Queue of waiting sequences; by default they start by priority, then arrival.
    """

    def __init__(
        self,
        config: EngineConfig,
        block_manager: BlockManager,
        budget: Budget | None = None,
        queue: Queue | None = None,
    ) -> None:
        self.config = config
        self.waiting: Queue = WaitingQueue() if queue is None else queue
        self.budget: Budget = WholeBudget(config) if budget is None else budget
        self.block_manager = block_manager
        self.block_size = block_manager.block_size
        self.admission = Admission(config, block_manager)
        self.proposer: Proposer = NoProposer()
        self.stats = SchedulerStats()
        self.running: SortedKeyList = SortedKeyList(key=SCHEDULING_KEY)
        self.in_flight: deque[ScheduledBatch] = deque()  # Batches that are not updated yet, oldest first
        self._step_id = self._started_in_step = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; with ageing it gains one priority level for every `priority_ageing_s` since its arrival."""
        if self.config.priority_ageing_s:
            # priority - (now - arrival time) / ageing, less the term in `now`: all age alike, so the order is fixed.
            aged = sequence.priority + sequence.arrival_time / self.config.priority_ageing_s
            sequence.key = (aged, sequence.arrival)
        self.budget.see(sequence)
        self.waiting.join(sequence)
        self.block_manager.want(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a running or waiting sequence and free its blocks at once; a token in flight is dropped."""
        (self.running if sequence.is_running else self.waiting).remove(sequence)
        self.block_manager.release(sequence)
        self.block_manager.wanted.remove(sequence)
        sequence.finish_reason = reason
        sequence.is_running = False
        sequence.is_finished = True
        self.waiting.leave(sequence)
        self.budget.see(sequence)

    # -------------------------------------------------------------------------------------------------- schedule

    def schedule(self) -> ScheduledBatch | None:
        """The next step's batch; None if all work is in flight, waits for files, or needs the tokens in flight."""
        if self.proposer.waits(self.running, self.in_flight):
            return None
        self._step_id += 1
        for begin in self.block_manager.at_steps:
            begin()
        victim = self.waiting.make_way(self.running, self.preempt)
        step = OpenStep(victim, self.stats.num_preemptions, self.budget.has_time)
        running = [sequence for sequence in self.budget.in_step(self.running) if sequence is not victim]
        prefills = self._schedule_decodes(step, running)
        self._grant(step, prefills)
        for sequence in self.admission.turns(step, prefills, self.waiting, self._started_in_step):
            if sequence is None:
                self._admit(step, prefills)
            else:
                self._schedule_next_chunk(step, sequence)
        self._spend_what_is_left(step)
        num_decodes = len(step.entries) - self.proposer.place(step)
        if not step.entries and not step.chunks:
            return None
        copies = self.block_manager.take_copies(self._step_id)
        self._enter_chunks(step)
        batch = ScheduledBatch(self._step_id, tuple(step.entries), num_decodes, copies, step.total)
        self.in_flight.append(batch)
        self.stats.num_steps += 1
        self.stats.num_scheduled_tokens += step.total - step.budget
        return batch

    def _schedule_decodes(self, step: OpenStep, running: list[Sequence]) -> list[Sequence]:
        """Place a decode of each sequence that lacks just one token; returns the prefills, which lack more."""
        # This loop runs once per sequence and step, so it avoids calls.
        step_id = self._step_id
        block_size = self.block_size
        manager = self.block_manager
        entries = step.entries
        prefills: list[Sequence] = []
        for sequence in running:
            start = sequence.num_computed_tokens
            known = sequence.num_known_tokens
            if known - start != 1 or not sequence.is_running:
                if known - start > 1:
                    prefills.append(sequence)
                continue
            is_in_flight = known > len(sequence.token_ids)  # the step before samples the token to compute
            if is_in_flight and known >= sequence.max_num_tokens:
                continue  # the token in flight is the sequence's last
            table = sequence.block_table
            if start == len(table) * block_size:
                if not manager.num_free_blocks and not self._preempt_for(sequence, 1):
                    continue
                manager.allocate(sequence, 1)
            sequence.num_computed_tokens = sequence.num_counted_tokens = known
            sequence.num_known_tokens = known + 1
            sequence.placed_in_step = step_id
            if known % block_size == 0 and not is_in_flight:  # `update` registers it once a token in flight is read
                manager.register(sequence, known // block_size - 1, known // block_size, step_id)
            entries.append(ScheduledSequence(sequence, start, 1, 1, table, start))
        return prefills

    def _grant(self, step: OpenStep, prefills: list[Sequence]) -> None:
        """Set budget and threshold of the step; its decodes are paid first."""
        has_slot = step.victim is not None or len(self.running) < self.config.max_num_seqs
        lookup = self.block_manager.lookup
        step.total, threshold = self.budget.of_step(step.entries, prefills, self.waiting, lookup, has_slot=has_slot)
        step.budget = step.total - len(step.entries)
        step.threshold = max(self.block_size, threshold)

    def _schedule_next_chunk(self, step: OpenStep, sequence: Sequence) -> None:
        """Place the next chunk of a prefill in progress, if budget and blocks allow one."""
        if not sequence.is_running:  # a chunk of an older sequence preempted it
            return
        hits = self.block_manager.lookup(sequence)
        start = sequence.num_computed_tokens + len(hits) * self.block_size
        if size := self.admission.chunk_size(sequence, start, min(step.budget, step.threshold)):
            self._place(step, sequence, size, hits)

    def _admit(self, step: OpenStep, prefills: list[Sequence]) -> None:
        """Start waiting sequences while budget, slots and blocks last; with a victim, the first of them alone."""
        victim = step.victim
        slots = self.config.max_num_seqs - len(self.running) + (victim is not None)
        if slots > 0 and self.stats.num_preemptions == step.num_preemptions:
            waiting = self.waiting.startable() if victim is None else [self.waiting.first]
            admitted: list[Sequence] = []
            for sequence, size, hits in self.admission.walk(waiting, step, prefills, slots):
                if victim is not None:
                    self.waiting.charge(sequence, 0, victim)
                    self.preempt(victim)
                if sequence.num_counted_tokens == 0:
                    self.stats.prefix_cache_queries += sequence.num_findable_tokens
                self._place(step, sequence, size, hits)
                admitted.append(sequence)
            for sequence in admitted:
                self.start(sequence)
        if victim is not None and victim.is_running and step.budget:  # the first waiting one cannot start
            self._schedule_decodes(step, [victim])
            step.budget -= victim.placed_in_step == self._step_id

    def start(self, sequence: Sequence) -> None:
        """Move a waiting sequence to the running ones; the caller allocates its blocks."""
        self.waiting.remove(sequence)
        self.block_manager.wanted.remove(sequence)
        self.running.add(sequence)
        sequence.is_running = True
        sequence.num_times_passed = 0
        self._started_in_step = self._step_id

    def _spend_what_is_left(self, step: OpenStep) -> None:
        """Give leftover budget to chunks that the threshold capped, in their order.

        If nobody waits, a step with decodes skips this: longer chunks would delay them and raise no throughput.
        """
        if step.entries and not self.waiting:
            return
        for sequence, (_, start) in step.chunks.items():
            if sequence.num_computed_tokens == sequence.num_known_tokens:
                continue
            placed = sequence.num_computed_tokens - start
            size = self.admission.chunk_size(sequence, start, placed + step.budget) - placed
            # With a hit, this step computes the next block for another sequence, and the next step claims it.
            if size > 0 and not self.block_manager.lookup(sequence):
                self._place(step, sequence, size)

    def _enter_chunks(self, step: OpenStep) -> None:
        """Add the entries of the chunks, and of samples that fork from the last row of their prompt."""
        for sequence, (before, start) in step.chunks.items():
            size = sequence.num_computed_tokens - start
            num_samples = int(sequence.num_computed_tokens == sequence.num_known_tokens)
            sequence.num_known_tokens += num_samples
            step.entries.append(ScheduledSequence(sequence, start, size, num_samples, sequence.block_table, before))
            if num_samples and sequence.samples and self.stats.num_preemptions == step.num_preemptions:
                num_slots = self.config.max_num_seqs - len(self.running) - step.num_more_samples
                step.entries += self.admission.fork_samples(sequence, num_slots, self.waiting, self.start)

    def _place(self, step: OpenStep, sequence: Sequence, size: int, hits: Collection[int] = ()) -> None:
        """Claim `hits`, then place `size` tokens after them, or as many as there are free blocks for."""
        manager = self.block_manager
        block_size = self.block_size
        before = sequence.num_computed_tokens
        num_blocks = len(sequence.block_table)
        if hits:  # first, since the allocation could evict them
            manager.claim(sequence, hits)
        start = before + len(hits) * block_size
        end = start + size
        lacking = manager.num_blocks_for(end) - len(sequence.block_table)
        may_preempt = sequence not in step.chunks  # leftover budget preempts nothing
        if lacking > manager.num_free_blocks and not (may_preempt and self._preempt_for(sequence, lacking)):
            lacking = manager.num_free_blocks
            end = (len(sequence.block_table) + lacking) * block_size
            if end == start:
                manager.release(sequence, num_blocks)
                return
        manager.allocate(sequence, lacking)
        manager.register(sequence, start // block_size, end // block_size, self._step_id)
        # Tokens that were computed before a preemption are not counted again.
        num_cached = max(0, min(start, sequence.num_prompt_tokens) - sequence.num_counted_tokens)
        sequence.num_cached_tokens += num_cached
        self.stats.prefix_cache_hits += num_cached
        sequence.num_counted_tokens = max(sequence.num_counted_tokens, end)
        sequence.num_computed_tokens = end
        sequence.placed_in_step = self._step_id
        self.waiting.charge(sequence, end - start)
        step.chunks.setdefault(sequence, (before, start))
        step.budget -= end - start

    # ------------------------------------------------------------------------------------------------ preemption

    def _preempt_for(self, sequence: Sequence, num_blocks: int) -> bool:
        """Preempt younger sequences of the same or lower priority until `num_blocks` are free, in the queue's order."""
        self.block_manager.trim(sequence)
        for victim in self.waiting.victims(self.running, sequence):
            if self.block_manager.num_free_blocks >= num_blocks:
                break
            if victim.placed_in_step != self._step_id:
                self.preempt(victim)
        return self.block_manager.num_free_blocks >= num_blocks

    def preempt(self, victim: Sequence) -> None:
        self._requeue(victim)
        victim.num_preemptions += 1
        self.stats.num_preemptions += 1

    def _requeue(self, sequence: Sequence) -> None:
        """Return a running sequence to the queue without blocks; they stay findable, so it mostly finds them again."""
        self.running.remove(sequence)
        self.block_manager.release(sequence)
        sequence.num_computed_tokens = 0
        sequence.is_running = False
        self.waiting.rejoin(sequence)
        self.block_manager.want(sequence)

    def preempt_all(self) -> None:
        """Make every running sequence recompute its KV (the weights changed); nothing may be in flight."""
        if self.in_flight:
            raise RuntimeError("preempt_all() while a step is in flight")
        for sequence in list(self.running):
            self.preempt(sequence)

    # --------------------------------------------------------------------------------------------------- outcome

    def update(self, batch: ScheduledBatch, token_ids: list[int], results: StepResults | None = None) -> list[Sequence]:
        """Append the sampled tokens, in the order of `batch.sampling`; returns the sequences that got any, or an error.

        Where a sequence draws several tokens (a run), those after the first one that ends it are dropped.
        """
        if not self.in_flight or self.in_flight[0] is not batch:
            raise RuntimeError(f"step {batch.step_id} is not the oldest in flight")
        self.in_flight.popleft()
        if results is not None:
            results.record(batch.sampling, token_ids)
        manager = self.block_manager
        block_size = self.block_size
        entries, drawn = self.proposer.accept(batch, token_ids, self._requeue)
        manager.commit(batch.step_id, entries)
        advanced: list[Sequence] = []
        without_token: list[Sequence] = []
        for sequence, token_id in drawn:
            if token_id == NON_FINITE:
                manager.forget(sequence)  # even if it was preempted or aborted meanwhile
            if token_id < 0 or sequence.is_finished:
                sequence.num_known_tokens -= 1
            if sequence.is_finished:
                continue
            advanced.append(sequence)
            if token_id < 0:
                without_token.append(sequence)
                self.finish(sequence, end_without_token(sequence, token_id))
                continue
            known = sequence.token_ids
            known.append(token_id)
            if token_id in sequence.stop_token_ids:
                sequence.stop_reason = token_id
                self.finish(sequence, "stop")
            elif len(known) >= sequence.max_num_tokens:
                self.finish(sequence, "length")
            elif len(known) % block_size == 0 and sequence.num_computed_tokens >= len(known):
                # A step in flight, or this one's run, fills this block, but its last token was unknown until now.
                index = len(known) // block_size - 1
                manager.register(sequence, index, index + 1, (self.in_flight or [batch])[-1].step_id)
        self.stats.num_output_tokens += len(advanced) - len(without_token)
        self.waiting.charge_generated(advanced, without_token)
        if batch.draws_runs:  # drop reports beyond the end of a run
            manager.commit(batch.step_id)  # blocks that runs filled
            for sequence in advanced:
                if sequence.logprobs is not None:
                    del sequence.logprobs[sequence.num_output_tokens :]
        return list(dict.fromkeys(advanced)) if batch.draws_runs else advanced

    def rollback(self, batch: ScheduledBatch, *, has_failed: bool = True) -> list[Sequence]:
        """Undo `batch` and every batch launched after it; returns the unfinished sequences of all.

        Blocks that these steps registered become unfindable, and the sequences return to the tokens computed before.
        has_failed=False undoes steps without counting them as failed: nobody needs their results any more.
        """
        if batch not in self.in_flight:
            raise RuntimeError(f"step {batch.step_id} is not in flight")
        affected: dict[Sequence, None] = {}
        while self.in_flight and self.in_flight[-1].step_id >= batch.step_id:
            undone = self.in_flight.pop()
            self.proposer.undo(undone)
            self.stats.num_failed_steps += has_failed
            self.block_manager.withdraw(undone.step_id)
            for entry in undone.prefills:
                self.waiting.charge(entry.sequence, -entry.num_new_tokens)
            for sequence, _, _, num_samples, table, num_computed_before, _ in reversed(undone.entries):
                sequence.num_known_tokens -= num_samples
                if sequence.is_finished:
                    continue
                affected[sequence] = None
                if sequence.block_table is not table:  # It was preempted meanwhile
                    continue
                kept = self.block_manager.rewindable(sequence, num_computed_before)
                # Its tokens in flight are read first.
                if kept == 0 or (kept < num_computed_before and sequence.num_in_flight_tokens):
                    self._requeue(sequence)
                else:
                    self.block_manager.release(sequence, self.block_manager.num_blocks_for(kept))
                    sequence.num_computed_tokens = kept
        return sorted(affected, key=SCHEDULING_KEY)
