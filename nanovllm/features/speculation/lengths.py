"""Chooses the number of drafts in a step: fewer with more running sequences, and none for a while after a loss.

::

    steps of about so many sequences    | 16 with drafts | 16 without | 48 with drafts | 64 ... 64 | 16 without | 64 ...
    tokens a second were lower with drafts                           ^ | 256 without, or more | 64 with drafts | ...

Steps are measured as they come, without a calibration. Outputs are the same for any number of drafts.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from nanovllm.batch import ScheduledBatch
from nanovllm.observability.step_records import Observer, StepRecord

BOUNDS = ((16, 7), (64, 3))  # (most running sequences, drafts of each); no drafts with more sequences
WINDOW = 64  # Steps with drafts in a comparison
PLAIN_WINDOW = 16  # Steps without drafts in it; their times vary less: no luck of drafts is in them
CLEAR_LOSS = 0.75  # Drafts with at most this share of the tokens a second end after each PLAIN_WINDOW
WINDOWS = 16  # Comparisons after which steps without drafts are measured anew
REST, LONGEST_REST = 256, 4096  # Steps without drafts after a loss; each further loss in a row doubles them
DRAFT_COST = 0.2  # Share of a step that one more draft of a head costs: its own pass, and a row to verify
FIRST_RATE = 0.7  # Share of accepted drafts before any is measured
MEMORY = 16  # Drafts after which a share is mostly measured
LEAST_REST = 64  # Steps without drafts after the first failure
SLOWEST = 8  # The slowest of so many steps does not count: it compiles, captures, or the machine is busy


@dataclass(slots=True)
class BatchSize:
    """Measured steps of about one number of running sequences.

    drafted: (seconds, tokens of a sequence) of each step that had drafts, or waited for them in vain.
    plain: (seconds, tokens of a sequence) of the last steps without drafts.
    num_left: Steps that are still to run without drafts.
    rest: Steps to run without drafts after the next loss.
    num_won: Comparisons since steps without drafts were measured.
    """

    drafted: list[tuple[float, float]] = field(default_factory=list)
    plain: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=PLAIN_WINDOW))
    num_left: int = 0
    rest: int = REST
    num_won: int = 0

    def note(self, seconds: float, num_tokens: float, *, is_drafted: bool) -> None:
        """Record a step; once there are enough with and without drafts, compare them."""
        self.num_left -= self.num_left > 0
        (self.drafted if is_drafted else self.plain).append((seconds, num_tokens))
        count = len(self.drafted)
        if self.num_left or not count or count % PLAIN_WINDOW:
            return
        if lacking := PLAIN_WINDOW - len(self.plain):
            self.num_left = lacking
            return
        gain = _rate(self.drafted) / _rate(self.plain)
        if count < WINDOW and gain > CLEAR_LOSS:
            return
        self.drafted.clear()
        self.num_won += 1
        if gain >= 1.0:
            self.rest = REST
        else:
            self.num_left = self.rest
            self.rest = min(2 * self.rest, LONGEST_REST)
        if self.num_won == WINDOWS:
            self.num_won = 0
            self.plain.clear()


def _rate(steps: Iterable[tuple[float, float]]) -> float:
    """Tokens a second of one sequence, without the slowest steps."""
    ordered = sorted(steps)
    seconds, num_tokens = zip(*ordered[: len(ordered) - len(ordered) // SLOWEST], strict=True)
    return float(sum(num_tokens) / max(sum(seconds), 1e-9))


class Acceptance:
    """Chooses how many drafts of a chain to compute, by the share of accepted ones at each depth.

    Each draft costs about DRAFT_COST of a step, so one more pays while its chance to be accepted, over that cost, is
    above the tokens that a step with those before it brings for its own cost. Where not even one pays, none is computed
    for a while, which doubles with each failure.
    """

    def __init__(self, most: int) -> None:
        self._rates = [FIRST_RATE] * most  # shares of accepted drafts by depth, after accepted ones
        self._num_left = 0  # steps without drafts
        self._rest = LEAST_REST

    def limit(self) -> int:
        """Number of drafts in the next step; called once a step."""
        if self._num_left:
            self._num_left -= 1
            return 0
        chance = tokens = cost = 1.0
        depth = 0
        for rate in self._rates:
            chance *= rate
            if chance * cost < DRAFT_COST * tokens:
                break
            tokens += chance
            cost += DRAFT_COST
            depth += 1
        if depth == 0:
            self._num_left = self._rest
            self._rest = min(2 * self._rest, LONGEST_REST)
            self._rates[0] = 2 * DRAFT_COST  # it is tried again, with few drafts
        return depth

    def note(self, num_drafted: int, num_accepted: int) -> None:
        """Record one sequence's drafts of a step."""
        for depth in range(min(num_drafted, num_accepted + 1, len(self._rates))):
            is_accepted = depth < num_accepted
            self._rates[depth] += (is_accepted - self._rates[depth]) / MEMORY
            if depth == 0 and is_accepted:
                self._rest = LEAST_REST
        if num_drafted == num_accepted < len(self._rates):  # the next depth may be better than when it was left out
            self._rates[num_drafted] += (FIRST_RATE - self._rates[num_drafted]) / MEMORY


class DraftLengths(Observer):
    """Chooses the most drafts of a sequence in a step, by the number of running ones and measured steps.

    asks: True if the last scheduled step asked for drafts.

    Args:
        most: Limit of the engine's options.
        overlap: True if steps without drafts are launched while the one before runs.
        acceptance: Further limit, for drafts that are computed one after another; None for others.
    """

    def __init__(self, most: int, *, overlap: bool, acceptance: Acceptance | None = None) -> None:
        self.asks = False
        self.acceptance = acceptance
        self._most = most
        self._overlap = overlap
        self._sizes: defaultdict[int, BatchSize] = defaultdict(BatchSize)  # number of sequences, in bits -> steps
        self._last: StepRecord | None = None

    def limit(self, num_running: int) -> int:
        """Most drafts of each sequence in the next step, with `num_running` running sequences."""
        if self._size(num_running).num_left:
            return 0
        own = self._most if self.acceptance is None else self.acceptance.limit()
        return min(own, next((most for count, most in BOUNDS if num_running <= count), 0))

    def step_ended(self, record: StepRecord, batch: ScheduledBatch) -> None:
        last = self._last
        self._last = record
        count = record.num_decode_tokens
        if last is None or not last.num_running or batch.prefills or not count:
            return  # idle time, or another kind of step
        size = self._size(count)
        has_waited = record.start_time >= last.time if self._overlap else self.asks
        is_drafted = record.num_draft_tokens > 0 or (has_waited and not size.num_left)
        size.note(record.time - last.time, 1.0 + record.num_accepted_tokens / count, is_drafted=is_drafted)

    def _size(self, num_running: int) -> BatchSize:
        return self._sizes[max(0, num_running - 1).bit_length()]

    def __str__(self) -> str:
        return "the lengths of drafts"
