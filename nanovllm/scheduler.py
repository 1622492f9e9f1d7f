"""Decides which sequences compute how many tokens in each step; pure Python, counts only, never a token's value.

Invariant: no batch exceeds the token budget or the free blocks, and while work remains that is not in flight,
`schedule()` returns some of it. The oldest sequence of the highest priority can preempt the others, and the pool holds
one sequence of max_model_len, so it always finishes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter

from sortedcontainers import SortedKeyList

from nanovllm.batch import NON_FINITE, NOTHING_LEFT, ScheduledBatch, ScheduledSequence
from nanovllm.block_manager import BlockManager
from nanovllm.config import EngineConfig
from nanovllm.outputs import ErrorKind
from nanovllm.sequence import Sequence, SequenceStatus

_KEY = attrgetter("key")  # the order of scheduling
# A request whose chunk rounds down to nothing may be overtaken this often; then the others wait for it.
MAX_TIMES_PASSED = 64
# Requests that cannot start and are skipped in one step.
MAX_LOOK_PAST = 64


@dataclass(slots=True)
class SchedulerStats:
    """Counters since construction. Prefix-cache figures are tokens, counted once per admitted request."""

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_failed_steps: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0


@dataclass(slots=True)
class _Step:
    """The step being scheduled: leftover budget, placed sequences, prefills that need another step."""

    budget: int
    placed: dict[Sequence, tuple[int, int]] = field(default_factory=dict)  # -> (computed before hits, chunk start)
    num_partial: int = 0
    num_long: int = 0  # of those, the ones with more than the threshold still to compute

    def count_if_partial(self, sequence: Sequence, threshold: int) -> None:
        lacking = sequence.num_known_tokens - sequence.num_computed_tokens
        self.num_partial += lacking > 0
        self.num_long += lacking > threshold


class Scheduler:
    """Continuous batching (Yu et al. 2022, Orca) with chunked prefill (Agrawal et al. 2024, Sarathi-Serve).

    Calls come in turns: `schedule` makes a batch and counts it as launched; `update` takes its sampled tokens. Several
    batches may be launched before the first is updated; updates come in launch order.
    """

    def __init__(self, config: EngineConfig, block_manager: BlockManager) -> None:
        self.config = config
        self.block_manager = block_manager
        self.block_size = block_manager.block_size
        self.stats = SchedulerStats()
        self.waiting: SortedKeyList = SortedKeyList(key=_KEY)
        self.running: SortedKeyList = SortedKeyList(key=_KEY)
        self._in_flight: deque[ScheduledBatch] = deque()
        self._step_id = 0

    # ------------------------------------------------------------------------------------------------ the queues

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_batches_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def oldest_in_flight(self) -> ScheduledBatch | None:
        return self._in_flight[0] if self._in_flight else None

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; with ageing it gains one level of priority for every `priority_ageing_s` since its arrival.

        All age alike, so the order of two never changes, and the key is fixed here: priority - (now - arrival time) /
        ageing, without the part that is the same for all.
        """
        if self.config.priority_ageing_s:
            aged = sequence.priority + sequence.arrival_time / self.config.priority_ageing_s
            sequence.key = (aged, sequence.arrival)
        self.waiting.add(sequence)

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a sequence now, wherever it is; its blocks are free at once. A token still in flight is dropped."""
        (self.running if sequence.status is SequenceStatus.RUNNING else self.waiting).remove(sequence)
        self.block_manager.release(sequence)
        sequence.finish_reason = reason
        sequence.status = SequenceStatus.FINISHED

    # -------------------------------------------------------------------------------------------------- schedule

    def schedule(self) -> ScheduledBatch | None:
        """The next step's batch; None if all work is in flight."""
        self._step_id += 1
        num_preemptions = self.stats.num_preemptions
        entries: list[ScheduledSequence] = []
        prefills = self._schedule_decodes(entries)
        num_decodes = len(entries)
        step = _Step(budget=self.config.max_num_batched_tokens - num_decodes)
        for sequence in prefills:
            if sequence.status is SequenceStatus.RUNNING:  # it may have been preempted for an older one
                self._schedule_next_chunk(step, sequence)
        if self.waiting and self.stats.num_preemptions == num_preemptions:
            self._admit(step)
        self._spend_what_is_left(step)

        for sequence, (before, start) in step.placed.items():
            end = sequence.num_computed_tokens
            samples = end == sequence.num_known_tokens
            sequence.num_in_flight_tokens += samples
            entries.append(ScheduledSequence(sequence, start, end - start, samples, sequence.block_table, before))
        if not entries:
            return None
        batch = ScheduledBatch(self._step_id, tuple(entries), num_decodes)
        self._in_flight.append(batch)
        self.stats.num_steps += 1
        self.stats.num_scheduled_tokens += self.config.max_num_batched_tokens - step.budget
        return batch

    def _schedule_decodes(self, entries: list[ScheduledSequence]) -> list[Sequence]:
        """Place one token of every running sequence that lacks just one; returns those that lack more.

        This loop runs once per sequence and step, so it is written out flat.
        """
        step_id, block_size, manager = self._step_id, self.block_size, self.block_manager
        prefills: list[Sequence] = []
        for sequence in list(self.running):
            start = sequence.num_computed_tokens
            in_flight = sequence.num_in_flight_tokens
            known = len(sequence.token_ids) + in_flight
            if known - start != 1 or sequence.status is not SequenceStatus.RUNNING:
                if known - start > 1:
                    prefills.append(sequence)
                continue
            if in_flight and (known >= sequence.max_num_tokens or sequence.params.logits_processors):
                continue  # the token in flight is its last, or the next one's logits wait for the host to read it
            table = sequence.block_table
            if start == len(table) * block_size:
                if not manager.num_free_blocks and not self._preempt_for(sequence, 1):
                    continue
                manager.allocate(sequence, 1)
            sequence.num_computed_tokens = sequence.num_counted_tokens = known
            sequence.num_in_flight_tokens = in_flight + 1
            sequence.placed_in_step = step_id
            if known % block_size == 0 and not in_flight:  # a token in flight is unknown: see _register_late
                manager.register(sequence, known // block_size - 1, known // block_size, step_id)
            entries.append(ScheduledSequence(sequence, start, 1, True, table, start))
        return prefills

    def _schedule_next_chunk(self, step: _Step, sequence: Sequence) -> None:
        """Place the next chunk of a prefill in progress, if budget and blocks allow one."""
        before, num_blocks = sequence.num_computed_tokens, len(sequence.block_table)
        hits = self.block_manager.lookup(sequence) if before == num_blocks * self.block_size else []
        size = self._chunk_size(sequence, before + len(hits) * self.block_size, self._chunk_limit(step))
        if size:
            self._claim(sequence, hits)
            lacking = self.block_manager.num_blocks_for(sequence.num_computed_tokens + size) - len(sequence.block_table)
            if lacking > self.block_manager.num_free_blocks:
                self._preempt_for(sequence, lacking)
            size = self._cut_to_free_blocks(sequence, size)
            if size:
                step.placed[sequence] = (before, sequence.num_computed_tokens)
                self._extend(step, sequence, size)
            else:
                self.block_manager.truncate(sequence, num_blocks)
                sequence.num_computed_tokens = before
        step.count_if_partial(sequence, self.config.long_prefill_token_threshold)

    def _admit(self, step: _Step) -> None:
        """Start waiting sequences in (priority, arrival) order while budget, slots and blocks last."""
        manager = self.block_manager
        slots = self.config.max_num_seqs - len(self.running)
        if slots <= 0:
            return
        reserved = sum(self._blocks_lacking(sequence) for sequence in self.running)
        admitted: list[Sequence] = []
        overtaken: list[Sequence] = []
        num_looked_past = 0
        for sequence in self.waiting:
            if len(admitted) == slots or step.budget <= 0 or num_looked_past == MAX_LOOK_PAST:
                break
            if sequence.num_in_flight_tokens:
                continue  # preempted with a token in flight: it comes back once that is read
            hits = manager.lookup(sequence)
            start = len(hits) * self.block_size
            size = self._chunk_size(sequence, start, self._chunk_limit(step))
            if size == 0:
                if sequence.num_times_passed >= MAX_TIMES_PASSED:
                    break
                overtaken.append(sequence)
            if size == 0 or not self._may_start(step, sequence.num_known_tokens - start, size):
                num_looked_past += 1
                continue
            lacking = self._blocks_lacking(sequence) - len(hits) + manager.num_free_among(hits)
            if reserved + lacking > manager.num_free_blocks:
                break
            if sequence.num_counted_tokens == 0 and not sequence.lacks_prompt_logprobs:
                self.stats.prefix_cache_queries += sequence.num_tokens
            self._claim(sequence, hits)
            step.placed[sequence] = (0, start)
            self._extend(step, sequence, size)
            step.count_if_partial(sequence, self.config.long_prefill_token_threshold)
            reserved += self._blocks_lacking(sequence)
            admitted.append(sequence)
            for other in overtaken:
                other.num_times_passed += 1
        for sequence in admitted:
            self.waiting.remove(sequence)
            sequence.status = SequenceStatus.RUNNING
            sequence.num_times_passed = 0
            self.running.add(sequence)

    def _spend_what_is_left(self, step: _Step) -> None:
        """Give leftover budget to chunks capped by the threshold, in their order."""
        for sequence in step.placed:
            size = self._chunk_size(sequence, sequence.num_computed_tokens, step.budget)
            if not size or self.block_manager.lookup(sequence):
                continue  # this step computes its next block for another sequence: a hit in the next step
            if size := self._cut_to_free_blocks(sequence, size):
                self._extend(step, sequence, size)

    # ------------------------------------------------------------------------------------------- parts of a chunk

    def _chunk_limit(self, step: _Step) -> int:
        return min(step.budget, self.config.long_prefill_token_threshold)

    def _chunk_size(self, sequence: Sequence, start: int, limit: int) -> int:
        """Tokens of a chunk from `start`: it ends on a block boundary unless it ends the known tokens; maybe 0."""
        lacking = sequence.num_known_tokens - start
        if lacking <= limit:
            return lacking
        return max(0, limit - (start + limit) % self.block_size)

    def _cut_to_free_blocks(self, sequence: Sequence, size: int) -> int:
        capacity = (len(sequence.block_table) + self.block_manager.num_free_blocks) * self.block_size
        return min(size, capacity - sequence.num_computed_tokens)

    def _may_start(self, step: _Step, lacking: int, size: int) -> bool:
        """Whether the limits on partial prefills let a sequence start that computes `size` of `lacking` tokens now."""
        config = self.config
        if size == lacking:
            return True
        if lacking > config.long_prefill_token_threshold and step.num_long >= config.max_long_partial_prefills:
            return False
        return step.num_partial < config.max_num_partial_prefills

    def _claim(self, sequence: Sequence, hits: list[int]) -> None:
        """Take blocks found in the prefix cache: their tokens count as computed."""
        if not hits:
            return
        self.block_manager.claim(sequence, hits)
        sequence.num_computed_tokens += len(hits) * self.block_size
        # Tokens computed before a preemption, or counted before, are not counted again.
        num_cached = min(sequence.num_computed_tokens, sequence.num_prompt_tokens) - sequence.num_counted_tokens
        if num_cached > 0:
            sequence.num_cached_tokens += num_cached
            self.stats.prefix_cache_hits += num_cached
        sequence.num_counted_tokens = max(sequence.num_counted_tokens, sequence.num_computed_tokens)

    def _extend(self, step: _Step, sequence: Sequence, size: int) -> None:
        """Give the sequence `size` tokens of this step and the blocks for them, which the caller found free."""
        start = sequence.num_computed_tokens
        end = start + size
        self.block_manager.allocate(sequence, self.block_manager.num_blocks_for(end) - len(sequence.block_table))
        self.block_manager.register(sequence, start // self.block_size, end // self.block_size, self._step_id)
        sequence.num_computed_tokens = end
        sequence.num_counted_tokens = max(sequence.num_counted_tokens, end)
        sequence.placed_in_step = self._step_id
        step.budget -= size

    def _blocks_lacking(self, sequence: Sequence) -> int:
        """Blocks that a prefill still needs for all its known tokens and one more; 0 for a steady decode."""
        if sequence.num_computed_tokens and sequence.num_known_tokens - sequence.num_computed_tokens <= 1:
            return 0
        tokens = min(sequence.num_known_tokens + 1, self.config.max_model_len)
        return self.block_manager.num_blocks_for(tokens) - len(sequence.block_table)

    # ------------------------------------------------------------------------------------------------ preemption

    def _preempt_for(self, sequence: Sequence, num_blocks: int) -> bool:
        """Preempt younger sequences of the same or lower priority until `num_blocks` are free, youngest first."""
        for victim in list(reversed(self.running)):
            if self.block_manager.num_free_blocks >= num_blocks:
                break
            if victim.key <= sequence.key:
                break
            if victim.placed_in_step != self._step_id:
                self._preempt(victim)
        return self.block_manager.num_free_blocks >= num_blocks

    def _preempt(self, victim: Sequence) -> None:
        """Return a sequence to the queue without blocks; they stay findable, so it comes back mostly by a cache hit."""
        self.running.remove(victim)
        self._to_waiting(victim)
        victim.num_preemptions += 1
        self.stats.num_preemptions += 1

    def _to_waiting(self, sequence: Sequence) -> None:
        self.block_manager.release(sequence)
        sequence.num_computed_tokens = 0
        sequence.status = SequenceStatus.WAITING
        self.waiting.add(sequence)

    def preempt_all(self) -> None:
        """Make every running sequence recompute its KV (the weights changed); nothing may be in flight."""
        if self._in_flight:
            raise RuntimeError("preempt_all() while a step is in flight")
        for sequence in list(self.running):
            self._preempt(sequence)

    # --------------------------------------------------------------------------------------------------- outcome

    def update(self, batch: ScheduledBatch, token_ids: Iterable[int]) -> list[Sequence]:
        """Take the tokens that `batch` sampled, in the order of `batch.sampling`.

        Returns the sequences that got a token or an error now, finished ones included.
        """
        if not self._in_flight or self._in_flight[0] is not batch:
            raise RuntimeError(f"step {batch.step_id} is not the oldest in flight")
        self._in_flight.popleft()
        self.block_manager.commit(batch.step_id)
        advanced: list[Sequence] = []
        tokens = iter(token_ids)
        for sequence, _, _, samples, _, _ in batch.entries:
            if not samples:
                continue
            token_id = next(tokens)
            sequence.num_in_flight_tokens -= 1
            if token_id == NON_FINITE:
                self.block_manager.forget(sequence)  # also when it was preempted or aborted meanwhile
            if sequence.status is SequenceStatus.FINISHED:
                continue
            advanced.append(sequence)
            if token_id < 0:
                self._fail(sequence, token_id)
                continue
            self.stats.num_output_tokens += 1
            known = sequence.token_ids
            known.append(token_id)
            if token_id in sequence.stop_token_ids:
                sequence.stop_reason = token_id
                self.finish(sequence, "stop")
            elif len(known) >= sequence.max_num_tokens:
                self.finish(sequence, "length")
            elif self._in_flight and len(known) % self.block_size == 0:
                self._register_late(sequence)
        return advanced

    def _register_late(self, sequence: Sequence) -> None:
        """Register a block that a launched step fills: its last token was read only now."""
        index = sequence.num_tokens // self.block_size - 1
        if sequence.num_computed_tokens >= sequence.num_tokens:
            self.block_manager.register(sequence, index, index + 1, self._in_flight[-1].step_id)

    def _fail(self, sequence: Sequence, answer: int) -> None:
        request, count = f"request {sequence.request_id!r}", sequence.num_tokens
        if answer == NOTHING_LEFT:
            sequence.error_kind = ErrorKind.REQUEST
            sequence.error = sequence.error or (
                f"{request}: no token is left to draw after {count} tokens: allowed_token_ids, bad_words, min_tokens "
                "and logits_processors (or their NaN or +infinity) together forbid every one; allow at least one"
            )
        else:
            sequence.error_kind = ErrorKind.INTERNAL
            sequence.error = (
                f"{request}: the model's logits after {count} tokens are not finite (NaN or infinity); check the "
                "weights and the dtype"
            )
        self.finish(sequence, "error")

    def rollback(self, batch: ScheduledBatch) -> list[Sequence]:
        """Undo `batch`, which failed, and every batch launched after it; returns the unfinished sequences of all.

        Registrations are withdrawn and the sequences return to what was computed before, ready to be scheduled again.
        """
        num_in_flight = len(self._in_flight)
        affected = self.discard(batch)
        self.stats.num_failed_steps += num_in_flight - len(self._in_flight)
        return affected

    def discard(self, batch: ScheduledBatch) -> list[Sequence]:
        """Undo steps that did not fail, whose results are no longer needed."""
        if not any(batch is launched for launched in self._in_flight):
            raise RuntimeError(f"step {batch.step_id} is not in flight")
        affected: dict[Sequence, None] = {}
        while self._in_flight and self._in_flight[-1].step_id >= batch.step_id:
            undone = self._in_flight.pop()
            self.block_manager.withdraw(undone.step_id)
            for entry in reversed(undone.entries):
                sequence = entry.sequence
                sequence.num_in_flight_tokens -= entry.samples
                if sequence.is_finished:
                    continue
                affected[sequence] = None
                if sequence.block_table is entry.block_table:  # else it was preempted since
                    self._return_to(sequence, entry.num_computed_before)
        return sorted(affected, key=_KEY)

    def _return_to(self, sequence: Sequence, num_computed: int) -> None:
        if num_computed == 0:
            self.running.remove(sequence)
            self._to_waiting(sequence)
        else:
            num_blocks = self.block_manager.num_blocks_for(num_computed)
            if num_blocks < len(sequence.block_table):
                self.block_manager.truncate(sequence, num_blocks)
            sequence.num_computed_tokens = num_computed
