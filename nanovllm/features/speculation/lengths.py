"""Lengths of drafts: as many tokens as raise the expected tokens per second of a step, by the cost model of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from nanovllm.batch import ScheduledBatch, ScheduledSequence
from nanovllm.features.costs.buckets import RowSizes
from nanovllm.features.costs.cost_model import DeviceCost, StepWork
from nanovllm.features.costs.learned_costs import LearnedCosts, RecursiveFit
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.groups.cache_pools import CacheGroup
from nanovllm.observability.step_records import StepRecord

PRIOR_RATE, PRIOR_WEIGHT = 0.7, 2.0  # of acceptance, in trials, before any draft of a sequence was verified
DECAY = 0.85  # of a sequence's trials with each verified draft
RECOVERY = 0.97  # of its trials with each step in which drafts did not pay, so that they are tried again
ENGINE_DECAY = 0.998
LEARN_EVERY = 8  # steps without drafts
ALL_NUMBERS = 16  # of drafts are compared up to so many, then a sixteenth of them at least apart
LEAST_GAIN = 1.1  # in tokens per second, of a step with drafts over one without: predictions are a tenth off
# Steps of a trial of the other way, with or without drafts. Of the second the first does not run ahead; a fit that is
# far off learns from the fifth step.
TRIAL_STEPS = 6
FIRST_PATIENCE, LAST_PATIENCE = 32, 2048  # steps of one way until such a trial; twice as many with each in a row
MAX_REST = 63  # steps that run ahead after one that waited for drafts of a few, and had none


@dataclass(slots=True)
class TrialBackoff:
    """Counts steps that went one way since the other was measured; then a trial of the other is due.

    num_tried, num_more: steps of the trial, the other way and not.
    """

    limit: int = FIRST_PATIENCE
    num_steps: int = 0
    num_tried: int = 0
    num_more: int = 0

    @property
    def is_over(self) -> bool:
        return self.num_steps >= self.limit

    def count(self, *, is_other: bool, is_measured: bool = True) -> None:
        """Count a step; a trial ends without steps of the other way too, as where no drafts are found."""
        if not self.is_over:
            self.num_steps += not is_other
            if is_other and is_measured:
                self.limit, self.num_steps = FIRST_PATIENCE, 0
            return
        self.num_tried += is_other
        self.num_more += not is_other
        if TRIAL_STEPS in (self.num_tried, self.num_more):
            self.limit = min(2 * self.limit, LAST_PATIENCE)
            self.num_steps = self.num_tried = self.num_more = 0


class DraftCosts(LearnedCosts):
    """Predicts steps with and without drafts; learns from all of the first, and from some of the others.

    With overlap a step without drafts runs ahead, which hides the host's work, so these steps have a fit of their own.
    One way of the two is measured only as long as it is chosen, so the other is tried now and then.

    Args:
        cost: of steps with drafts, at first.
        plain: of steps without.
    """

    def __init__(
        self,
        config: EngineConfig,
        groups: Sequence[CacheGroup] = (),
        cost: DeviceCost | None = None,
        plain: DeviceCost | None = None,
    ) -> None:
        super().__init__(config, groups, cost)
        self._plain = RecursiveFit(plain or self.fit.cost) if config.overlap else None
        self._drafted, self._refused = TrialBackoff(), TrialBackoff()
        self.has_refused = False  # drafts, since the last step ended

    def begin(self, drafted: RecursiveFit, plain: RecursiveFit) -> None:
        """Go on from fits to other steps."""
        self.fit = drafted
        if self._plain is not None:
            self._plain = plain

    @property
    def tries(self) -> bool | None:
        """Whether drafts are verified or left out whatever they cost; None if costs decide."""
        return False if self._drafted.is_over else True if self._refused.is_over else None

    def seconds(self, work: StepWork) -> float:
        return self.fit.seconds(work)

    def plain_seconds(self, work: StepWork) -> float:
        return (self._plain or self.fit).seconds(work)

    def step_ended(self, record: StepRecord, batch: ScheduledBatch) -> None:
        if self._plain is None:
            if batch.drafts or record.step_id % LEARN_EVERY == 0:
                super().step_ended(record, batch)
        elif batch.drafts:
            super().step_ended(record, batch)
            self._drafted.count(is_other=False)
            self._refused.count(is_other=True)
        else:
            is_due = self.tries is False or record.step_id % LEARN_EVERY == 0
            if is_measured := is_due and record.start_time < self.last_time:
                self._plain.learn(self.work(batch), record.time - self.last_time)
            self._drafted.count(is_other=True, is_measured=is_measured)
            if self.has_refused or (self._refused.is_over and batch.num_decodes):
                self._refused.count(is_other=False)
        self.has_refused = False
        self.last_time = record.time


class StepCosts(Protocol):
    """Predicts seconds of steps with drafts, and of plain ones; see `DraftCosts`."""

    has_refused: bool

    @property
    def tries(self) -> bool | None: ...
    def seconds(self, work: StepWork) -> float: ...
    def plain_seconds(self, work: StepWork) -> float: ...
    def work(self, batch: ScheduledBatch) -> StepWork: ...


@dataclass(slots=True)
class Acceptance:
    """Decaying numbers of trials: a draft is one if those before it were accepted."""

    num_accepted: float = 0.0
    num_rejected: float = 0.0

    def rate(self, prior: float) -> float:
        trials = self.num_accepted + self.num_rejected + PRIOR_WEIGHT
        return (self.num_accepted + PRIOR_WEIGHT * prior) / trials

    def note(self, num_accepted: int, num_rejected: int, decay: float) -> None:
        self.num_accepted = decay * self.num_accepted + num_accepted
        self.num_rejected = decay * self.num_rejected + num_rejected


@dataclass(slots=True)
class DraftLengths:
    """Chooses numbers of drafts, by acceptance so far and the seconds of steps.

    Args:
        costs: None proposes every draft.
        max_drafts: per sequence and step.
        row_sizes: that an engine with CUDA graphs pads to, where drafts run as further decodes; else None.
        are_repeated: whether the rows of an entry with a rejected draft are computed again (recurrent states).
    """

    costs: StepCosts | None
    max_drafts: int
    row_sizes: RowSizes | None = None
    are_repeated: bool = False
    _by_depth: list[Acceptance] = field(init=False)
    _pays: dict[int, tuple[int, bool]] = field(default_factory=dict)  # by about the number of decodes
    _rest: int = 0  # steps that still run ahead
    _next_rest: int = 1
    _rests_refused: bool = False  # whether costs began this rest

    def __post_init__(self) -> None:
        self._by_depth = [Acceptance() for _ in range(self.max_drafts)]

    def note(self, acceptance: Acceptance, num_drafted: int, num_accepted: int) -> None:
        """Note the outcome of a sequence's drafts."""
        num_rejected = int(num_accepted < num_drafted)
        acceptance.note(num_accepted, num_rejected, DECAY)
        for depth in range(num_accepted + num_rejected):
            self._by_depth[depth].note(depth < num_accepted, depth >= num_accepted, ENGINE_DECAY)

    @property
    def is_trial(self) -> bool:
        return self.costs is not None and self.costs.tries is True

    def may_pay(self, entries: Sequence[ScheduledSequence]) -> bool:
        """Whether drafts in a step of these decodes would pay if all were accepted; asked anew every 32 steps."""
        if self.costs is None or not entries:
            return True
        if self.costs.tries is not None:
            return self.costs.tries
        if self._rest:
            self._rest -= 1
            self.costs.has_refused |= self._rests_refused
            return False
        count = len(entries)
        key = count if count < ALL_NUMBERS else count // 4 * 4  # requests end one by one
        age, pays = self._pays.get(key, (0, False))
        if age == 0:
            pays = self._best(entries, [(1.0, index) for index in range(count) for _ in range(self.max_drafts)]) > 0
        self._pays[key] = (age - 1) % 32, pays
        self.costs.has_refused |= not pays
        return pays

    def note_step(self, num_asked: int, num_decodes: int, *, has_drafts: bool) -> bool:
        """Note a step that waited for drafts of some decodes; returns whether the next one may wait.

        One that waited for few, and had none, makes the next ones run ahead, twice as many each time. Where most were
        asked, each sequence has its own pause.
        """
        if has_drafts or self.costs is None:
            self._next_rest = 1
            return True
        if 2 * num_asked >= num_decodes:
            return True
        self._rest, self._rests_refused = self._next_rest, self.costs.has_refused
        self._next_rest = min(2 * self._next_rest + 1, MAX_REST)
        return False

    def choose(
        self, entries: Sequence[ScheduledSequence], proposed: Sequence[tuple[Acceptance, int]], room: int
    ) -> list[int]:
        """Numbers of drafts that pay, at most `room` in all.

        Args:
            entries: the decodes of the step.
            proposed: acceptance and number of drafts of each sequence that has any.
        """
        if self.costs is None:
            counts = []
            for _, count in proposed:
                counts.append(min(count, room))
                room -= counts[-1]
            return counts
        gains, priors = [], [depth.rate(PRIOR_RATE) for depth in self._by_depth]
        for index, (acceptance, count) in enumerate(proposed):
            probability = 1.0
            for prior in priors[:count]:
                probability *= acceptance.rate(prior)
                gains.append((probability, index))
        gains.sort(key=lambda gain: -gain[0])
        counts = [0] * len(proposed)
        number = self._best(entries, gains[:room])
        if not number and gains:
            number = self._most(entries, min(room, len(gains))) if self.costs.tries else 0
            self.costs.has_refused = True
        for _, index in gains[:number]:
            counts[index] += 1
        for (acceptance, _), count in zip(proposed, counts, strict=True):
            if count == 0:
                acceptance.note(0, 0, RECOVERY)
        return counts

    def _most(self, entries: Sequence[ScheduledSequence], room: int) -> int:
        """Most drafts of a step within `room`; where steps are padded, those of the next size."""
        if self.row_sizes is None:
            return room
        sizes = sorted(size - len(entries) for size in self.row_sizes.decodes if size > len(entries))
        return min(room, sizes[0]) if sizes else 0

    def _best(self, entries: Sequence[ScheduledSequence], gains: list[tuple[float, int]]) -> int:
        """Number of gains, the largest first, with the most tokens per second."""
        costs = self.costs
        assert costs is not None
        batch = ScheduledBatch(0, tuple(entries), len(entries))
        decodes = costs.work(batch)
        context = decodes.num_context_tokens // max(1, len(entries))
        best, most = 0, LEAST_GAIN * len(entries) / max(costs.plain_seconds(decodes), 1e-9)
        tokens = float(len(entries))
        sizes: set[int] | None = None  # numbers of drafts that fill a padded step
        if self.row_sizes is not None:
            sizes = {size - len(entries) for size in self.row_sizes.decodes}
            gains = gains[: max(0, max(sizes))]
        drafted: dict[int, float] = {}  # -> the probability that all of its drafts are accepted
        for number, (probability, index) in enumerate(gains, 1):
            tokens += probability
            drafted[index] = probability
            # The next draft costs nothing on a GPU, and hardly differs where there are many.
            apart = max(1, (1 << number.bit_length()) // (2 * ALL_NUMBERS))
            is_between = number not in sizes if sizes is not None else number % apart > 0
            if is_between and number < len(gains):
                continue
            work = self._with_drafts(decodes, number, len(drafted), context)
            seconds = costs.seconds(work)
            if self.are_repeated:  # a later step then costs as much more
                seconds += (1.0 - sum(drafted.values()) / len(drafted)) * (seconds - costs.seconds(decodes))
            if (per_second := tokens / max(seconds, 1e-9)) > most:
                best, most = number, per_second
        return best

    def _with_drafts(self, decodes: StepWork, num_drafts: int, num_drafted: int, context: int) -> StepWork:
        """The work of decodes; `num_drafted` of them verify `num_drafts` in all, each after so much context."""
        if self.row_sizes is not None:
            num_decodes = decodes.num_decodes + num_drafts
            return decodes._replace(
                num_tokens=self.row_sizes.padded(num_decodes, 0)[1],
                num_decodes=num_decodes,
                num_shared_context_tokens=decodes.num_shared_context_tokens + context * num_drafts,
                num_samples=decodes.num_samples + num_drafts,
            )
        rows = num_drafts + num_drafted
        return decodes._replace(
            num_tokens=decodes.num_tokens + num_drafts,
            num_decodes=decodes.num_decodes - num_drafted,
            num_chunks=decodes.num_chunks + num_drafted,
            num_context_tokens=decodes.num_context_tokens - context * num_drafted,
            num_chunk_pairs=decodes.num_chunk_pairs + context * rows,
            num_samples=decodes.num_samples + num_drafts,
        )
