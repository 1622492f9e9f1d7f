"""`Speculation`: drafts enter a step as further rows of a decode, and leave it as far as they equal the model's draws.

::

    known tokens     t0 t1 t2 | t3            the last one is to be computed, drafts d4 d5 d6 follow it
    rows of the step            t3 d4 d5 d6   each draws with its position's noise: u4 u5 u6 u7
    accepted                    u4 = d4, u5 = d5, u6 != d6: the step brings u4 u5 u6, and the row of d6 is cut

Row i has seen the drafts before it. While these equal the draws, it is the row of a step without speculation, and its
draw the same token; the first draw that differs is still right. So tokens depend on no drafter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field
from itertools import islice, takewhile
from operator import eq

from nanovllm.admission import NoProposer, OpenStep, Outcome
from nanovllm.batch import NON_FINITE, ScheduledBatch, ScheduledSequence
from nanovllm.block_manager import BlockManager
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.engine_stats import SpeculationStats
from nanovllm.features.speculation.drafter import Drafter, DraftRequest
from nanovllm.features.speculation.kept_states import KeptStates
from nanovllm.features.speculation.lengths import DraftLengths
from nanovllm.features.speculation.suffix import SuffixDrafter
from nanovllm.features.token_masks import rewind
from nanovllm.observability.step_records import Observer
from nanovllm.sequence import Sequence

logger = logging.getLogger("nanovllm")

GRAMMAR = "grammar"  # the source of forced tokens
MAX_PAUSE = 64


@dataclass(slots=True)
class SpeculationCounts:
    """Counters since construction; see `SpeculationStats`. Tokens by depth: the first drafts' first."""

    num_drafts: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    by_source: dict[str, tuple[int, int]] = field(default_factory=dict)
    num_failures: int = 0

    def add(self, source: str, num_drafted: int, num_accepted: int) -> None:
        self.num_drafts += 1
        lacking = num_drafted - len(self.drafted)
        for counts, count in ((self.drafted, num_drafted), (self.accepted, num_accepted)):
            counts += [0] * lacking
            for depth in range(count):
                counts[depth] += 1
        drafted, accepted = self.by_source.get(source, (0, 0))
        self.by_source[source] = drafted + num_drafted, accepted + num_accepted


@dataclass(slots=True)
class DraftState:
    """Drafts of one sequence, kept at `Sequence.drafting`.

    is_off: True if the sequence gets no drafts any more.
    next_try: number of known tokens from which on it waits for its tokens in flight, to be drafted after them.
    pause: tokens until the next try after a failed one; doubles up to MAX_PAUSE.
    source: source of the drafts in flight.
    num_accepted: number of its last drafts that equal the draws, once their step is read.
    """

    is_off: bool = False
    next_try: int = 0
    pause: int = 1
    source: str = ""
    num_accepted: int = 0

    def note(self, num_tokens: int, num_accepted: int) -> None:
        """Record the outcome of a try after `num_tokens` known tokens."""
        self.pause = 1 if num_accepted else min(2 * self.pause, MAX_PAUSE)
        self.next_try = num_tokens + (0 if num_accepted else self.pause)


class Speculation(Observer):
    """Places drafts of one engine's sequences, and accepts them.

    Invariant: a sequence with drafts has no other step in flight, so each draw of its entry follows known tokens.

    Args:
        lengths: bounds how many drafts are verified.
        vocab_size: token ids of drafts are below it.
        source: the drafter's name in the statistics.
    """

    def __init__(
        self,
        config: EngineConfig,
        block_manager: BlockManager,
        drafter: Drafter,
        lengths: DraftLengths,
        *,
        vocab_size: int,
        source: str = "drafter",
    ) -> None:
        self.counts = SpeculationCounts()
        self.drafter = drafter
        self.lengths = lengths
        self._source = source
        self._may_draft = True  # True if a step like the last one may have drafts
        self._end: Callable[[Sequence], None] | None = getattr(drafter, "end", None)
        self._suffixes = drafter if isinstance(drafter, SuffixDrafter) else None
        self._max_num_seqs = config.max_num_seqs
        self._vocab_size = vocab_size
        self._manager, self._states = block_manager, KeptStates.of_manager(block_manager)

    # ------------------------------------------------------------------------------------------------ scheduling

    def waits(self, running: Iterable[Sequence], in_flight: Collection[ScheduledBatch]) -> bool:
        # All wait, prompts too: two steps of a part of the decodes each read the weights, and a step of prompts alone
        # has no goal, though decodes wait for its end.
        if self._suffixes is not None and self._may_draft:
            self._suffixes.begin_step()
        if any(batch.drafted for batch in in_flight):
            return True
        return self._may_draft and bool(in_flight) and any(map(self._waits, running))

    def _waits(self, sequence: Sequence) -> bool:
        """Whether a sequence has tokens in flight, and may be drafted once they are known."""
        state: DraftState | None = sequence.drafting  # None before the first try
        num_known = sequence.num_known_tokens
        if num_known == len(sequence.token_ids):
            return False
        if state is not None and (state.is_off or (num_known < state.next_try)):
            return False
        if num_known + 1 >= sequence.max_num_tokens or sequence.params.logits_processors:
            return False
        return self._may_have_drafts(sequence)

    def _may_have_drafts(self, sequence: Sequence) -> bool:
        return self._suffixes is None or sequence.matcher is not None or self._suffixes.expects(sequence)

    def place(self, step: OpenStep) -> int:
        entries = step.entries
        # Each row takes memory for its logits, so there are at most max_num_seqs of them.
        room = min(step.budget, self._max_num_seqs - len(entries) - len(step.chunks))
        limit = self.lengths.limit(len(entries))
        self._may_draft = limit > 0 and room > 0
        requests = self._requests(entries, limit, room) if self._may_draft else []
        self.lengths.asks = bool(requests)
        if not requests:
            return 0
        drafts: dict[Sequence, tuple[int, ...]] = {}
        for request, proposed in zip(requests, self._proposed(requests), strict=True):
            sequence = request.sequence
            token_ids = self._usable(request, proposed)
            count = allocate_drafts(self._manager, sequence, len(token_ids))
            if count and (self._states is None or self._states.keep(sequence)):
                drafts[sequence] = tuple(token_ids[:count])
            else:
                sequence.drafting.note(request.num_tokens, 0)
        if drafts:
            self._extend(entries, drafts)
            step.num_more_samples = sum(map(len, drafts.values()))
            step.budget -= step.num_more_samples
        return len(drafts)

    def _requests(self, entries: Iterable[ScheduledSequence], limit: int, room: int) -> list[DraftRequest]:
        """Requests that may have drafts, `limit` or an equal part of `room` each; only the oldest if room is short."""
        found = []
        for sequence, start, *_ in entries:
            num_known = len(sequence.token_ids)
            if num_known != start + 1 or sequence.params.logits_processors:  # functions may count their calls
                continue
            if not self._may_have_drafts(sequence):
                continue
            if sequence.drafting is None:
                sequence.drafting = DraftState()
            count = min(limit, sequence.max_num_tokens - num_known - 1)
            if self._states is not None:
                count = min(count, self._states.num_left(num_known))
            if count > 0 and not sequence.drafting.is_off:
                found.append((sequence, count))
        part = max(1, room // max(1, len(found)))
        return [DraftRequest(sequence, min(count, part)) for sequence, count in found[:room]]

    def _proposed(self, requests: list[DraftRequest]) -> list[SequenceABC[int]]:
        """The drafter's proposals; empty ones if it fails, which is logged once."""
        nothing: list[SequenceABC[int]] = [()] * len(requests)
        try:
            proposed = list(self.drafter.propose(requests))
            if len(proposed) != len(requests):
                raise ValueError(f"it returned {len(proposed)} drafts for {len(requests)} requests")
            return [self._checked(token_ids) for token_ids in proposed]
        except Exception as error:
            if not self.counts.num_failures:
                logger.warning(
                    "the drafter %r failed (%s: %s); this step goes on without drafts. Later failures are only counted",
                    self.drafter, type(error).__name__, error,
                )  # fmt: skip
            self.counts.num_failures += 1
            return nothing

    def _checked(self, token_ids: SequenceABC[int]) -> list[int]:
        checked = [int(token_id) for token_id in token_ids]
        for token_id in checked:
            if not 0 <= token_id < self._vocab_size:
                raise ValueError(f"token id {token_id} is not one of the model's {self._vocab_size}")
        return checked

    def _usable(self, request: DraftRequest, proposed: SequenceABC[int]) -> list[int]:
        """The drafts before the first that cannot be drawn or ends the sequence; a grammar's forced tokens go first."""
        sequence = request.sequence
        limit = request.max_tokens
        matcher = sequence.matcher
        if not proposed and matcher is None:
            return []
        sequence.drafting.source = self._source
        stops = sequence.stop_token_ids
        usable = list(takewhile(lambda token_id: token_id not in stops, islice(proposed, limit)))
        if matcher is None:
            return usable
        try:
            for token_id in sequence.output_token_ids[matcher.num_tokens :]:
                matcher.consume(token_id)
            forced = list(takewhile(lambda token_id: token_id not in stops, matcher.forced()[:limit]))
            if forced and usable[: len(forced)] != forced:
                sequence.drafting.source = GRAMMAR
                usable = forced
            del usable[matcher.accepted(usable) :]
        except Exception:  # a matcher over its limits raises again at its next mask; ids may exceed its vocabulary
            return []
        return usable

    @staticmethod
    def _extend(entries: list[ScheduledSequence], drafts: dict[Sequence, tuple[int, ...]]) -> None:
        """Move the entries with drafts after all decodes."""
        decodes = []
        drafted = []
        for entry in entries:
            sequence = entry.sequence
            if (draft := drafts.get(sequence)) is None:
                decodes.append(entry)
                continue
            sequence.draft = draft
            sequence.drafting.num_accepted = 0
            sequence.num_computed_tokens += len(draft)
            sequence.num_known_tokens += len(draft)
            num_rows = 1 + len(draft)
            drafted.append(entry._replace(num_new_tokens=num_rows, num_samples=num_rows, draft=draft))
        entries[:] = decodes + drafted

    # --------------------------------------------------------------------------------------------------- outcome

    def accept(self, batch: ScheduledBatch, token_ids: Iterable[int], requeue: Callable[[Sequence], None]) -> Outcome:
        if not batch.drafted:
            return NoProposer().accept(batch, token_ids, requeue)
        self._end_drafts(batch)
        draws = iter(token_ids)
        entries: list[ScheduledSequence] = []
        taken: list[tuple[Sequence, int]] = []
        for entry in batch.entries:
            sequence = entry.sequence
            drawn = list(islice(draws, entry.num_samples))
            if entry.draft and not sequence.is_finished:
                entry, drawn = self._accept(entry, drawn, requeue)
                sequence.drafting.num_accepted = max(0, len(drawn) - 1)
            entries.append(entry)
            taken += [(sequence, token_id) for token_id in drawn]
        if self._states is not None:
            self._states.free_kept()
        return tuple(entries), taken

    def undo(self, batch: ScheduledBatch) -> None:
        self._end_drafts(batch)
        if self._states is not None and batch.drafted:
            self._states.free_kept()

    @staticmethod
    def _end_drafts(batch: ScheduledBatch) -> None:
        """The host's tokens come next, for matchers too; drafts have been seen by all rows that read them."""
        for entry in batch.drafted:
            entry.sequence.draft = ()
            rewind(entry.sequence, entry.sequence.num_output_tokens)

    def _accept(
        self, entry: ScheduledSequence, drawn: list[int], requeue: Callable[[Sequence], None]
    ) -> tuple[ScheduledSequence, list[int]]:
        """Cut a sequence back to the draws that count: up to the first one that differs from its draft."""
        sequence = entry.sequence
        manager = self._manager
        drafts = entry.draft
        is_finite = NON_FINITE not in drawn
        num_accepted = sum(takewhile(bool, map(eq, drafts, drawn))) if is_finite else 0
        state: DraftState = sequence.drafting
        self._count(state.source, len(drafts), num_accepted)
        state.note(len(sequence.token_ids) + num_accepted + 1, num_accepted)
        kept = drawn[: num_accepted + 1] if is_finite else []
        num_cut = len(drawn) - len(kept)
        sequence.num_known_tokens -= num_cut
        if kept and kept[-1] >= 0:  # a negative draw is this row's own error
            sequence.error = None
        has_blocks = sequence.is_running  # a preempted one does not start before its draws are read
        if not is_finite:
            # A draft's NaN may have reached the rows before it, which see whole blocks: drawn again without drafts.
            state.is_off = True
            if sequence.logprobs is not None:
                del sequence.logprobs[sequence.num_output_tokens :]
            if has_blocks:
                manager.forget(sequence)
                requeue(sequence)
        elif has_blocks and num_cut:
            end = sequence.num_computed_tokens - num_cut
            if self._states is not None:
                end = self._states.put_back(sequence, entry.start)
            manager.release(sequence, manager.num_blocks_for(end))
            sequence.num_computed_tokens = end
            return entry._replace(num_new_tokens=end - entry.start), kept
        return entry._replace(num_new_tokens=len(kept)), kept

    def _count(self, source: str, num_drafted: int, num_accepted: int) -> None:
        self.counts.add(source, num_drafted, num_accepted)
        if self.lengths.acceptance is not None and source != GRAMMAR:
            self.lengths.acceptance.note(num_drafted, num_accepted)

    def stats(self) -> SpeculationStats:
        counts = self.counts
        return SpeculationStats(
            num_drafts=counts.num_drafts,
            num_draft_tokens=sum(counts.drafted),
            num_accepted_tokens=sum(counts.accepted),
            accepted_by_depth=tuple(counts.accepted),
            by_source=dict(counts.by_source),
            num_failures=counts.num_failures,
        )

    def request_ended(self, sequence: Sequence, time: float) -> None:
        if self._end is not None:
            self._end(sequence)

    def engine_closed(self) -> None:
        if (close := getattr(self.drafter, "close", None)) is not None:
            close()

    def __str__(self) -> str:
        return "speculation"


def allocate_drafts(manager: BlockManager, sequence: Sequence, count: int) -> int:
    """Allocate blocks for `count` drafts; returns the number of drafts that free blocks hold."""
    num_known = len(sequence.token_ids)
    num_slots = (len(sequence.block_table) + manager.num_free_blocks) * manager.block_size
    count = max(0, min(count, num_slots - num_known))
    lacking = manager.num_blocks_for(num_known + count) - len(sequence.block_table)
    if lacking > 0:
        manager.allocate(sequence, lacking)
    return count
