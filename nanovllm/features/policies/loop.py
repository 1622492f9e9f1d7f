"""The engine's calls of a scheduler, without an engine: in any order, every invariant checked after each."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from nanovllm.batch import NON_FINITE, NULL_BLOCK, ScheduledBatch
from nanovllm.features.groups.block_checks import check_scheduler
from nanovllm.features.groups.cache_groups import CacheGroups
from nanovllm.features.policies.mock_model import MockModel, generate_alone
from nanovllm.features.policies.mock_states import check
from nanovllm.features.sampling_params import SamplingParams
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import NewRequest, Sequence

MAX_IN_FLIGHT = 3


def make_sequence(
    prompt: Iterable[int],
    *,
    arrival: int = 0,
    priority: int = 0,
    arrival_time: float = 0.0,
    cache_salt: str = "",
    client: str = "",
    max_model_len: int = 64,
    eos_token_ids: Iterable[int] = (),
    **params: Any,
) -> Sequence:
    return Sequence(
        NewRequest(
            str(arrival),
            prompt,  # type: ignore[arg-type]  # copied by the sequence
            SamplingParams(**params),
            arrival_time=arrival_time,
            priority=priority,
            cache_salt=cache_salt,
            client=client,
        ),
        arrival=arrival,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
    )


@dataclass(frozen=True)
class Launched:
    batch: ScheduledBatch
    sampled: list[int]
    tables: tuple[tuple[int, ...], ...]  # block tables at launch


class Loop:
    """The engine's calls of a scheduler, in any order; checks every invariant after each."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.manager = scheduler.block_manager
        self.model = MockModel(scheduler)
        self.sequences: list[Sequence] = []
        self.in_flight: deque[Launched] = deque()
        self.now = 0.0
        self.seen: Counter[str] = Counter()  # situations met, so that a fuzz can assert its coverage
        self.num_steps_without_progress = 0  # a step in which a sequence advances or ends resets it
        self._lost_blocks: set[Sequence] = set()  # sequences that the last step preempted for blocks of others
        self._preempt_for = scheduler._preempt_for
        scheduler._preempt_for = self._note_preempted  # type: ignore[method-assign]

    def _note_preempted(self, sequence: Sequence, num_blocks: int) -> bool:
        before = {*self.scheduler.running}
        has_blocks = self._preempt_for(sequence, num_blocks)
        lost = before.difference(self.scheduler.running)
        check(sequence not in lost, f"{sequence} was preempted for its own blocks")
        self._lost_blocks |= lost
        return has_blocks

    @property
    def unfinished(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if not sequence.is_finished]

    def add(self, prompt: Iterable[int], **options: Any) -> Sequence:
        sequence = self._make(prompt, **options)
        self.scheduler.add(sequence)
        return sequence

    def _make(self, prompt: Iterable[int], **options: Any) -> Sequence:
        options.setdefault("max_model_len", self.scheduler.config.max_model_len)
        sequence = make_sequence(prompt, arrival=len(self.sequences), arrival_time=self.now, **options)
        self.sequences.append(sequence)
        return sequence

    def add_samples(self, n: int, prompt: list[int], **options: Any) -> list[Sequence]:
        """Add several samples of one prompt."""
        samples = [self._make(prompt, **options) for _ in range(n)]
        for sequence in samples:
            sequence.samples = samples if n > 1 else ()
            self.scheduler.add(sequence)
        return samples

    def fork(self, source: Sequence, at: int, **options: Any) -> Sequence:
        """Add a request that has the first `at` tokens of another as its prompt."""
        return self.add(source.token_ids[:at], cache_salt=source.cache_salt, **options)

    def launch(self, non_finite: Collection[str] = ()) -> ScheduledBatch | None:
        """Schedule a batch and execute it; its tokens are read later."""
        was_running = list(self.scheduler.running)
        self._lost_blocks.clear()
        batch = self.scheduler.schedule()
        if batch is None:
            self.check()
            check(bool(self.in_flight) or not self.unfinished, "work is left, none is in flight, none is scheduled")
            return None
        self._check_step(was_running, batch)
        tables = tuple(tuple(entry.block_table) for entry in batch.entries)
        self.in_flight.append(Launched(batch, self.model.execute(batch, non_finite), tables))
        self.check()
        return batch

    def read(self) -> list[Sequence]:
        """Read the oldest launched batch's tokens; returns the sequences that advanced."""
        launched = self.in_flight.popleft()
        for entry, table in zip(launched.batch.entries, launched.tables, strict=True):
            now = [self._at_launch(*blocks) for blocks in zip(entry.block_table, table, strict=False)]
            check(tuple(now) == table, "a launched batch's block table changed")
        advanced: list[Sequence] = []
        dropped: list[Sequence] = []
        drafted = {entry.sequence for entry in launched.batch.drafted}
        again = {s for s, t in zip(launched.batch.sampling, launched.sampled, strict=True) if t < 0 and s in drafted}
        for sequence in dict.fromkeys(launched.batch.sampling):
            if sequence not in again or sequence.is_finished:
                (dropped if sequence.is_finished else advanced).append(sequence)
            self.seen["preempted in flight"] += not sequence.is_running and not sequence.is_finished
        num_findable = self.manager.num_findable_blocks
        returned = self.scheduler.update(launched.batch, launched.sampled)
        if returned:
            self.num_steps_without_progress = 0
        check(returned == advanced, "update returns other sequences than those that advanced")
        self.seen["late registrations"] += max(0, self.manager.num_findable_blocks - num_findable)
        self.seen["dropped in flight"] += len(dropped)
        self.seen["drafted again"] += len(again)
        for sequence, token_id in zip(launched.batch.sampling, launched.sampled, strict=True):
            if token_id == NON_FINITE:
                self.model.report_non_finite(sequence, self.scheduler.running)
                if sequence in advanced and sequence not in drafted:
                    check(sequence.error is not None and sequence.is_finished, f"{sequence} should end with an error")
                    self.seen["non-finite"] += 1
        self.check()
        return returned

    def _at_launch(self, block: int, before: int) -> int:
        """The block as it was, where a window may have passed it meanwhile."""
        return before if block == NULL_BLOCK and isinstance(self.manager, CacheGroups) else block

    def step(self) -> ScheduledBatch:
        """One step without overlap."""
        batch = self.launch()
        if batch is None:
            raise AssertionError("nothing was scheduled")
        self.read()
        return batch

    def fail(self, index: int = 0, *, has_failed: bool = True) -> list[Sequence]:
        """Undo the batch in flight with this index, and those launched after it, whether or not they failed."""
        batch = self.in_flight[index].batch
        batches = [launched.batch for launched in [*self.in_flight][index:]]
        while len(self.in_flight) > index:
            self.model.fail(self.in_flight.pop().batch)
        affected = self.scheduler.rollback(batch, has_failed=has_failed)
        self.num_steps_without_progress = 0
        lost = self.manager.lost_blocks(batches)
        for sequence in [s for s in self.scheduler.running if not lost.isdisjoint(s.held_blocks())]:
            self.scheduler.preempt(sequence)  # the engine does the same
        self.check()
        return affected

    def abort(self, sequence: Sequence) -> None:
        self.seen["aborted in flight"] += sequence.num_in_flight_tokens > 0
        self.scheduler.finish(sequence, "abort")
        self.num_steps_without_progress = 0
        check(not sequence.block_table, "an aborted request holds blocks")
        self.check()

    def drain(self, depth: int = 1) -> int:
        """Run to the end with at most `depth` batches in flight; returns the number of steps, which is bounded."""
        num_steps = 0
        # Older prefills may wait for younger decodes: twice the steps of serving one request after the other.
        limit = 2 * self.scheduler.config.max_model_len * (len(self.unfinished) + 1)
        while self.in_flight or self.unfinished:
            batch = self.launch()
            num_steps += batch is not None
            if self.in_flight and (batch is None or len(self.in_flight) >= depth):
                self.read()
            check(num_steps <= limit, f"{len(self.unfinished)} requests unfinished after {num_steps} steps: starvation")
        return num_steps

    def check_outputs(self) -> None:
        """Check that every request ended with its tokens (an aborted one with a prefix), and that nothing leaked."""
        for sequence in self.sequences:
            expected = generate_alone(sequence)
            output = sequence.output_token_ids
            if sequence.finish_reason in ("abort", "error"):
                expected = expected[: len(output)]
            elif expected and expected[-1] in sequence.stop_token_ids:
                check(sequence.finish_reason == "stop" and sequence.stop_reason == expected[-1], f"{sequence}")
            else:
                check(sequence.finish_reason == "length" and sequence.stop_reason is None, f"{sequence}")
            check(output == expected, f"{sequence} generated {output}, alone it generates {expected}")
        for pool in self.manager.pools:
            check(len(pool.free_blocks) == pool.num_blocks - 1, "blocks leaked")

    # ------------------------------------------------------------------------------------------------------- checks

    def check(self) -> None:
        """Check every invariant that holds between calls."""
        scheduler = self.scheduler
        check_scheduler(scheduler)
        check(len(scheduler.running) <= scheduler.config.max_num_seqs, "more sequences run than max_num_seqs")
        check([item.batch for item in self.in_flight] == list(scheduler.in_flight), "batches in flight are lost")
        in_flight = Counter(sequence for item in self.in_flight for sequence in item.batch.sampling)
        for sequence in self.sequences:
            check(
                sequence.num_in_flight_tokens == in_flight[sequence],
                f"{sequence} counts {sequence.num_in_flight_tokens} tokens in flight",
            )
            check(sequence.is_finished or sequence.num_computed_tokens <= sequence.num_known_tokens, f"{sequence}")
        running = {sequence for sequence in self.unfinished if sequence.is_running}
        check(set(scheduler.running) == running, "the sequences that run are not those that count as running")
        self._check_queue({sequence for sequence in self.unfinished if not sequence.is_running})
        for states in self.model.states:
            states.check_findable(self.manager)
        self._check_partial_prefills()

    def _check_queue(self, waiting: set[Sequence]) -> None:
        """Check that the queue has every request that waits once, in each of its orders."""
        queue = self.scheduler.waiting
        check(len(queue) == len(waiting), f"the queue counts {len(queue)} requests, and {len(waiting)} wait")
        orders = {"the queue": list(queue), "in_order": list(queue.in_order()), "startable": list(queue.startable())}
        for name, order in orders.items():
            check(len(set(order)) == len(order), f"{name} has a request twice")
            check(waiting.issuperset(order), f"{name} has a request that does not wait")
            check(name == "startable" or len(order) == len(waiting), f"{name} lacks a request that waits")
        check(not waiting or queue.first in waiting, "the first request of the queue does not wait")

    def _check_step(self, was_running: list[Sequence], batch: ScheduledBatch) -> None:
        """Check a step's budget, that it preempts nothing that it computes, and that sequences advance or end.

        In between at most two prompts of the largest length are computed.
        """
        limit = self.scheduler.config.max_num_batched_tokens
        num_decodes = batch.num_decodes
        check(batch.budget <= limit, f"a step has a budget of {batch.budget} tokens, above {limit}")
        within = batch.num_tokens <= max(batch.budget, num_decodes)
        check(within, f"{batch.num_tokens} tokens in a step with a budget of {batch.budget}")
        preempted = {sequence for sequence in was_running if not sequence.is_running}
        placed = {entry.sequence for entry in batch.entries}
        check(not placed & preempted, "a sequence was placed and preempted")
        self.num_steps_without_progress += 1
        bound = 2 * self.manager.num_blocks_for(self.scheduler.config.max_model_len) + MAX_IN_FLIGHT
        check(self.num_steps_without_progress <= bound, f"no sequence advanced or ended in {bound} steps")

    def _check_partial_prefills(self) -> None:
        """Check the limits; not where failed steps returned sequences to their states, or for the rest of a cut."""
        config = self.scheduler.config
        is_cut = bool(self.model.states)
        if is_cut and self.scheduler.stats.num_failed_steps:
            return
        lacking = [sequence.num_known_tokens - sequence.num_computed_tokens for sequence in self.scheduler.running]
        num_long = sum(count > config.long_prefill_token_threshold for count in lacking)
        check(num_long <= config.max_long_partial_prefills, f"{num_long} long prefills in progress")
        num_partial = sum(count > (self.manager.block_size if is_cut else 1) for count in lacking)  # back at a boundary
        check(num_partial <= config.max_num_partial_prefills, f"{num_partial} prefills in progress")
