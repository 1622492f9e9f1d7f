"""Decides which waiting requests start in a step, and how long chunks of prompts are; pure Python, counts only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from sortedcontainers import SortedKeyList

from nanovllm.batch import ScheduledBatch, ScheduledSequence
from nanovllm.config import EngineConfig
from nanovllm.sequence import SCHEDULING_KEY, Sequence

MAX_TIMES_PASSED = 64  # most admissions that overtake a request because its chunk rounds down to nothing
SHORT_BLOCKS = 4  # a prompt of so many blocks is not long, however few tokens a latency goal leaves a step
MAX_LOOK_PAST = 64  # most requests that one step skips because they cannot start


class Queue(Protocol):
    """Waiting sequences in the order in which they start, and the running ones that give way to them.

    `WaitingQueue` is the default; `features/shares` has one that keeps the shares of clients.

    num_clients: Number of clients with requests; 0 where clients are not counted.
    gap: Largest difference of service between waiting clients; 0 where clients are not counted.
    """

    @property
    def num_clients(self) -> int: ...
    @property
    def gap(self) -> float: ...
    @property
    def first(self) -> Sequence: ...  # next sequence to start; the queue must not be empty

    def join(self, sequence: Sequence) -> None:
        """Queue a new sequence."""

    def rejoin(self, sequence: Sequence) -> None:
        """Queue a preempted sequence again."""

    def remove(self, sequence: Sequence) -> None:
        """Take out a waiting sequence, which starts or has ended."""

    def leave(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended; it waits no longer."""

    def in_order(self) -> Iterable[Sequence]:
        """All waiting sequences in the order of admission."""

    def startable(self) -> Iterable[Sequence]:
        """The waiting sequences that may start now; the order follows charges that are made during the iteration."""

    def rank(self, sequence: Sequence) -> tuple[float, ...]:
        """Sort key of prompts in a step that holds few chunks; the smallest goes first."""

    def victims(self, running: SortedKeyList, sequence: Sequence) -> list[Sequence]:
        """Running sequences that this one may preempt for blocks, in the order of preemption."""

    def make_way(self, running: SortedKeyList, preempt: Callable[[Sequence], None]) -> Sequence | None:
        """Preempt for waiting sequences that lack blocks; returns the running one that yields its slot to `first`."""

    def charge(self, sequence: Sequence, num_tokens: int, victim: Sequence | None = None) -> None:
        """Charge the client for prompt tokens placed (negative: a refund), and for recomputing `victim`."""

    def charge_generated(self, advanced: list[Sequence], without_token: list[Sequence]) -> None:
        """Charge one generated token for each advanced sequence except `without_token`; any may have ended."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Sequence]: ...


class WaitingQueue:
    """Sequences by priority, then arrival. Waiting sequences preempt no running ones, and service is not counted."""

    num_clients = 0
    gap = 0.0

    def __init__(self) -> None:
        self._waiting = SortedKeyList(key=SCHEDULING_KEY)

    def join(self, sequence: Sequence) -> None:
        self._waiting.add(sequence)

    rejoin = join

    def remove(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)

    @property
    def first(self) -> Sequence:
        return next(iter(self.in_order()))

    def leave(self, sequence: Sequence) -> None:
        pass

    def in_order(self) -> Iterable[Sequence]:
        return self

    def startable(self) -> Iterable[Sequence]:
        return self.in_order()

    def rank(self, sequence: Sequence) -> tuple[float, ...]:
        return (sequence.key[0] // 1,)

    def victims(self, running: SortedKeyList, sequence: Sequence) -> list[Sequence]:
        return list(running.irange_key(min_key=sequence.key, inclusive=(False, True), reverse=True))

    def make_way(self, running: SortedKeyList, preempt: Callable[[Sequence], None]) -> Sequence | None:
        return None

    def charge(self, sequence: Sequence, num_tokens: int, victim: Sequence | None = None) -> None:
        pass

    def charge_generated(self, advanced: list[Sequence], without_token: list[Sequence]) -> None:
        pass

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)


@dataclass(slots=True)
class OpenStep:
    """The step being scheduled.

    victim: Sequence that yields its slot to the first waiting one, if that can start.
    num_preemptions: Preemptions counted before the step; nothing starts in a step that has preempted.
    has_time: Function that tells whether the step has time for a sequence's mask; see `Budget`.
    entries: Decodes placed so far.
    chunks: Prompts placed so far -> (computed tokens before hits, start of the chunk).
    total, budget: Token budget of the step, and tokens left of it.
    threshold: Most tokens of one prompt while others wait.
    num_more_samples: Tokens that its entries draw beyond one each.
    """

    victim: Sequence | None
    num_preemptions: int
    has_time: Callable[[Sequence], bool]
    entries: list[ScheduledSequence] = field(default_factory=list)
    chunks: dict[Sequence, tuple[int, int]] = field(default_factory=dict)
    total: int = 0
    budget: int = 0
    threshold: int = 0
    num_more_samples: int = 0


Outcome = tuple[tuple[ScheduledSequence, ...], Iterable[tuple[Sequence, int]]]


class Proposer(Protocol):
    """Guesses of coming tokens, which a step verifies. By default there are none; `features/speculation` has them."""

    def waits(self, running: Iterable[Sequence], in_flight: Collection[ScheduledBatch]) -> bool:
        """Whether scheduling waits for the steps in flight, since guesses depend on their tokens."""

    def place(self, step: OpenStep) -> int:
        """Give some decodes drafts, from leftover budget and blocks; they become the last entries. Returns how many."""

    def accept(self, batch: ScheduledBatch, token_ids: Iterable[int], requeue: Callable[[Sequence], None]) -> Outcome:
        """(entries, cut to the rows that stay; (sequence, token) of the draws that count); also cuts the sequences.

        Args:
            requeue: Callback that requeues a sequence to be computed again, without guesses.
        """

    def undo(self, batch: ScheduledBatch) -> None:
        """Take back the guesses of a step that nobody reads."""

    def stats(self) -> Any: ...


class NoProposer:
    """The default: every entry draws at most one token, and all draws count."""

    def waits(self, running: Iterable[Sequence], in_flight: Collection[ScheduledBatch]) -> bool:
        return False

    def place(self, step: OpenStep) -> int:
        return 0

    def accept(self, batch: ScheduledBatch, token_ids: Iterable[int], requeue: Callable[[Sequence], None]) -> Outcome:
        return batch.entries, zip(batch.sampling, token_ids, strict=True)

    def undo(self, batch: ScheduledBatch) -> None:
        pass

    def stats(self) -> None:
        return None


class Waiting(Protocol):
    """The part of a `Queue` that `Admission` uses."""

    @property
    def first(self) -> Sequence: ...
    def rank(self, sequence: Sequence) -> tuple[float, ...]: ...
    def __len__(self) -> int: ...


class Blocks(Protocol):
    """The part of a `BlockManager` that `Admission` uses."""

    block_size: int
    cuts_chunks: bool

    def lookup(self, sequence: Sequence) -> list[int]: ...
    def has_free(self, num_blocks: int, victim: Sequence | None = None, hits: Collection[int] = ()) -> bool: ...
    def cut(self, sequence: Sequence, start: int, end: int) -> int: ...
    def num_blocks_lacking(self, sequence: Sequence, num_tokens: int, hits: Collection[int]) -> int: ...
    def can_fork(self, source: Sequence, num_tokens: int) -> bool: ...
    def fork(self, source: Sequence, target: Sequence, num_tokens: int) -> None: ...


class Admission:
    """Starts waiting requests while budget, slots, blocks and the limits on partial prefills allow.

    A request without free blocks stops admission. One without a block of budget left stops its client only.
    """

    def __init__(self, config: EngineConfig, blocks: Blocks) -> None:
        self.config = config
        self.blocks = blocks

    def walk(
        self, waiting: Iterable[Sequence], step: OpenStep, prefills: list[Sequence], slots: int
    ) -> Iterator[tuple[Sequence, int, Collection[int]]]:
        """Yield (sequence, size of its first chunk, hit blocks) in order; the caller places each before the next.

        Blocks that running `prefills` still need are reserved for them; the blocks of a victim count as free.
        """
        reserved = sum(map(self.blocks_lacking, prefills))
        partial = [left for s in prefills if (left := s.num_known_tokens - s.num_computed_tokens)]
        # Prompts being computed for all their samples; recurrent states are not shared in this way.
        shared = {prompt for s in prefills if s.samples and (prompt := s.shared_prompt)}
        overtaken: list[Sequence] = []
        num_looked_past = 0
        held_back = None
        for sequence in waiting:
            if slots <= 0 or step.budget <= 0 or num_looked_past == MAX_LOOK_PAST:
                break
            if held_back is not None and sequence.client != held_back:
                break  # A start of another client could exceed the bound of shares
            if sequence.num_in_flight_tokens:
                continue  # It was preempted; its token in flight is read first
            if shared and sequence.shared_prompt in shared and not self.blocks.cuts_chunks:
                slots -= 1  # it forks once the prompt is computed
                continue
            start = len(hits := self.blocks.lookup(sequence)) * self.blocks.block_size
            lacking = sequence.num_known_tokens - start
            size = self.chunk_size(sequence, start, limit := min(step.budget, step.threshold))
            left = lacking - size
            if size == 0:
                if sequence.num_times_passed >= MAX_TIMES_PASSED:
                    break
                overtaken.append(sequence)
                held_back = sequence.client if limit < min(lacking, self.blocks.block_size) else held_back
            # A tail shorter than a block counts only if the limit, and not the manager, cut it off.
            is_partial = left >= self.blocks.block_size or (left > 0 and limit < lacking)
            is_held = is_partial and not self._may_be_partial(lacking, partial, step.threshold)
            if size == 0 or is_held or not step.has_time(sequence):
                num_looked_past += 1
                continue
            if not self.blocks.has_free(reserved + self.blocks_lacking(sequence, hits), step.victim, hits):
                break
            yield sequence, size, hits
            if sequence.samples and (prompt := sequence.shared_prompt):
                shared.add(prompt)
            if left:
                reserved += self.blocks_lacking(sequence)
            if is_partial:
                partial.append(left)
            slots -= 1
            for other in overtaken:
                other.num_times_passed += 1

    def turns(
        self, step: OpenStep, prefills: list[Sequence], waiting: Waiting, started_in_step: int
    ) -> list[Sequence | None]:
        """The order of a step's chunks: running prefills, and None for all waiting sequences together.

        A step with a reduced budget may hold a single chunk. There, and where a slot is exchanged, the queue's rank
        decides, then the time since a prompt was placed; for waiting ones, since any were started.
        """
        turns = [*prefills, *([None] if waiting else [])]
        if step.victim is None and step.total >= self.config.max_num_batched_tokens:
            return turns

        def turn(sequence: Sequence | None) -> tuple[float, ...]:
            if sequence is None:
                return *waiting.rank(waiting.first), started_in_step
            return *waiting.rank(sequence), sequence.placed_in_step

        return sorted(turns, key=turn)

    def chunk_size(self, sequence: Sequence, start: int, limit: int) -> int:
        """Tokens of a chunk from `start`, maybe 0; it ends on a block boundary or with the last known token."""
        end = min(start + limit, sequence.num_known_tokens)
        if end < sequence.num_known_tokens:
            end -= end % self.blocks.block_size
        return self.blocks.cut(sequence, start, end) - start if end > start else 0

    def blocks_lacking(self, sequence: Sequence, hits: Collection[int] = ()) -> int:
        """Blocks that a prefill still needs for its known tokens and one more; 0 once at most one token is left."""
        if sequence.num_computed_tokens and sequence.num_known_tokens - sequence.num_computed_tokens <= 1:
            return 0
        tokens = min(sequence.num_known_tokens + 1, self.config.max_model_len)
        return self.blocks.num_blocks_lacking(sequence, tokens, hits)

    def _may_be_partial(self, lacking: int, partial: list[int], threshold: int) -> bool:
        """Whether a prompt that lacks `lacking` tokens may start in part; `partial`: tokens left of earlier ones."""
        config = self.config
        threshold = max(threshold, min(SHORT_BLOCKS * self.blocks.block_size, config.long_prefill_token_threshold))
        if lacking > threshold and sum(left > threshold for left in partial) >= config.max_long_partial_prefills:
            return False
        return len(partial) < config.max_num_partial_prefills

    def fork_samples(
        self, source: Sequence, max_samples: int, waiting: Waiting, start: Callable[[Sequence], None]
    ) -> list[ScheduledSequence]:
        """Start further samples of a prompt on the KV of `source`, which computes the prompt's last token in this step.

        Args:
            start: Function that moves a waiting sequence to the running ones.

        Returns their entries, which draw from the last row of `source`.
        """
        entries: list[ScheduledSequence] = []
        num_tokens = source.num_prompt_tokens
        if source.num_computed_tokens > num_tokens or self.blocks.cuts_chunks:  # recurrent states are not copied
            return entries
        for sample in source.samples:
            if sample.is_running or sample.is_finished or not sample.shared_prompt or sample.lacks_prompt_logprobs:
                continue
            is_next = len(entries) < max_samples and waiting.first is sample
            if not is_next or not self.blocks.can_fork(source, num_tokens):
                break
            self.blocks.fork(source, sample, num_tokens)
            start(sample)
            sample.num_known_tokens += 1
            entries.append(ScheduledSequence(sample, num_tokens, 0, 1, sample.block_table, 0))
        return entries
