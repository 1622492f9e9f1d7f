"""How many drafts a step verifies: fewer beside more running sequences, and none for a while after they lost time.

::

    steps of about so many sequences    | 64 with drafts | 16 without | 64 with drafts | 64 ... | 16 without | ...
    tokens a second were lower with drafts              ^ | 256 without, or more | 64 with drafts | ...

No figure is needed before: steps are measured as they come. Outputs depend on no length.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from nanovllm.batch import ScheduledBatch
from nanovllm.observability.step_records import Observer, StepRecord

BOUNDS = ((16, 7), (64, 3))  # up to so many running sequences, so many drafts of each; beyond them none
WINDOW = 64  # Steps with drafts until they are compared
PLAIN_WINDOW = 16  # Steps without; their times differ less, since no luck of drafts is in them
WINDOWS = 16  # Comparisons that drafts win until steps without them are measured anew
REST, LONGEST_REST = 256, 4096  # Steps without drafts after a loss; twice as many after each one in a row
SLOWEST = 8  # One step of so many is left out: compilations, captures, and what else the machine does


@dataclass(slots=True)
class BatchSize:
    """Measured steps of about one number of running sequences.

    drafted: (seconds, tokens of a sequence) of each step with drafts, or that waited for them in vain.
    plain: The same of the last steps without.
    num_left: Steps that still run without drafts.
    rest: Such steps after the next loss.
    num_won: Comparisons since steps without drafts were measured.
    """

    drafted: list[tuple[float, float]] = field(default_factory=list)
    plain: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=PLAIN_WINDOW))
    num_left: int = 0
    rest: int = REST
    num_won: int = 0

    def note(self, seconds: float, num_tokens: float, *, is_drafted: bool) -> None:
        """Note a step; once there are enough of both ways, compare them."""
        self.num_left -= self.num_left > 0
        (self.drafted if is_drafted else self.plain).append((seconds, num_tokens))
        if len(self.drafted) < WINDOW or self.num_left:
            return
        if lacking := PLAIN_WINDOW - len(self.plain):
            self.num_left = lacking
            return
        has_won = _rate(self.drafted) >= _rate(self.plain)
        self.drafted.clear()
        self.num_won += 1
        if has_won:
            self.rest = REST
        else:
            self.num_left, self.rest = self.rest, min(2 * self.rest, LONGEST_REST)
        if self.num_won == WINDOWS:
            self.num_won = 0
            self.plain.clear()


def _rate(steps: Iterable[tuple[float, float]]) -> float:
    """Tokens a second of one sequence."""
    ordered = sorted(steps)
    seconds, num_tokens = zip(*ordered[: len(ordered) - len(ordered) // SLOWEST], strict=True)
    return float(sum(num_tokens) / max(sum(seconds), 1e-9))


class DraftLengths(Observer):
    """Most drafts of a sequence in a step, by the number of running ones and the steps that ended.

    asks: Whether the step placed last asked for drafts.

    Args:
        most: bound of the engine's options.
        overlap: Whether steps without drafts run ahead.
    """

    def __init__(self, most: int, *, overlap: bool) -> None:
        self.asks = False
        self._most, self._overlap = most, overlap
        self._sizes: defaultdict[int, BatchSize] = defaultdict(BatchSize)  # by the power of two
        self._last: StepRecord | None = None

    def limit(self, num_running: int) -> int:
        """Most drafts of each of so many running sequences in the next step."""
        if self._size(num_running).num_left:
            return 0
        return min(self._most, next((most for count, most in BOUNDS if num_running <= count), 0))

    def step_ended(self, record: StepRecord, batch: ScheduledBatch) -> None:
        last, self._last = self._last, record
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
