"""The scheduler's decision for one step, as an immutable record."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from nanovllm.core.outputs import ErrorKind, FinishReason
from nanovllm.core.sequence import Sequence
from nanovllm.core.structured_output import GrammarError

T = TypeVar("T")
# The runner's answers in place of a token: a row of the model's logits is not finite, or the request's options forbid
# every token.
NON_FINITE = -1
NOTHING_LEFT = -2
EMBEDDED = -3  # not an error: the request asked for the hidden state of the row
# The error that each gives a request, after "request ...: ".
SAMPLING_ERRORS = {
    NON_FINITE: (
        ErrorKind.INTERNAL,
        "the model's logits after {} tokens are not finite (NaN or infinity); check the weights and the dtype",
    ),
    NOTHING_LEFT: (
        ErrorKind.REQUEST,
        "no token is left to draw after {} tokens: allowed_token_ids, bad_words, structured_output, min_tokens and "
        "logits_processors (or their NaN or +infinity) together forbid every one; allow at least one",
    ),
}


def end_without_token(sequence: Sequence, answer: int) -> FinishReason:
    """Note the error of a runner's answer; returns why its sequence ends."""
    if answer == EMBEDDED:
        return "stop"
    sequence.error_kind, error = SAMPLING_ERRORS[answer]
    if answer == NON_FINITE or not sequence.error:  # The error of a logits processor that raised stays
        sequence.error = f"request {sequence.request_id!r}: {error.format(len(sequence.token_ids))}"
    return "error"


NULL_BLOCK = 0  # never handed out: padded reads and writes go there


class ScheduledSequence(NamedTuple):
    """One sequence's share of a step (a named tuple: one is built per running request and step)."""

    sequence: Sequence
    start: int  # position of its first new token
    num_new_tokens: int  # 0 for a sample that draws from the last row of the entry before, of the same prompt
    num_samples: int  # tokens drawn from its last rows: 1 if its last known token is computed, 0 if not; a run: more
    block_table: list[int]  # the list at scheduling time: it may grow, but its blocks never change
    num_computed_before: int  # Computed tokens before the step's hits; a failed step returns there


class Copy(NamedTuple):
    """A block to be copied within a cache group's pool: K and V of all its layers."""

    group: int
    source: int
    destination: int


class Drafts(dict[Sequence, list[int]]):
    """Draft tokens of a step's sequences: guesses at the tokens after its last known one.

    While a step is launched or drawn (`with drafts:`), token_ids end with the drafts: each row sees those before it.

    num_accepted: Number of each sequence's drafts that equal the draws, once the step is read.
    """

    are_shown = False

    def __init__(self) -> None:
        super().__init__()
        self.num_accepted: dict[Sequence, int] = {}

    def __enter__(self) -> None:
        self.are_shown = True
        for sequence, token_ids in self.items():
            sequence.token_ids.extend(token_ids)

    def __exit__(self, *_: object) -> None:
        self.hide()

    def keep(self, sequence: Sequence) -> bool:
        """Keep states that the step being scheduled overwrites; False without room for them."""
        return True

    def put_back(self, sequence: Sequence, start: int, end: int) -> int:
        """Cut a step that began at `start` back to `end`, or return to kept states; returns the computed tokens."""
        return end

    def free_kept(self) -> None:
        """Free kept states that were not put back."""

    def around(self, call: Callable[[], T]) -> Callable[[], T]:
        """The call with the drafts entered."""

        def entered() -> T:
            with self:
                return call()

        return entered

    def hide(self) -> None:
        """Take the drafts off token_ids, if they are there, and back out of matchers; the step must be in flight."""
        self.are_shown = False
        for sequence, token_ids in self.items():
            del sequence.token_ids[sequence.num_known_tokens - len(token_ids) - 1 :]
            matcher = sequence.matcher
            if matcher is not None and matcher.num_tokens > sequence.num_output_tokens:
                with suppress(GrammarError):  # over its limits; it says so again at the next mask
                    matcher.rollback(matcher.num_tokens - sequence.num_output_tokens)


NO_DRAFTS = Drafts()


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """The sequences of one step: decodes, then those with drafts, then chunks of prefills.

    num_decodes: entries of sequences that lacked just one token when the step began; each draws one.
    copies: executed before the forward pass, which may write to their sources. All sources are read before any
        destination is written; no block is a destination twice.
    budget: tokens that the step might have.
    drafts: of sequences that would decode otherwise. Their entries compute the last known token and the drafts, and
        draw after each.
    prefills: the chunks, and forks without rows.
    sampling: the sequence of each token drawn in this step, in batch order; one that draws a run comes once for each.
        At most max_num_seqs tokens in all, since their logits take memory.
    draws_runs: whether some sequence draws more than one token.
    """

    step_id: int
    entries: tuple[ScheduledSequence, ...]
    num_decodes: int = 0
    copies: tuple[Copy, ...] = ()
    budget: int = 0
    drafts: Drafts = field(default_factory=lambda: NO_DRAFTS)
    prefills: tuple[ScheduledSequence, ...] = field(init=False)
    sampling: list[Sequence] = field(init=False)
    draws_runs: bool = field(init=False)

    def __post_init__(self) -> None:
        others = self.entries[self.num_decodes :]
        sampling = [entry.sequence for entry in self.entries[: self.num_decodes]]
        sampling += [entry.sequence for entry in others for _ in range(entry.num_samples)]
        object.__setattr__(self, "prefills", others[len(self.drafts) :])
        object.__setattr__(self, "sampling", sampling)
        object.__setattr__(self, "draws_runs", any(entry.num_samples > 1 for entry in others))

    @property
    def draws_late(self) -> bool:
        """Whether a row is drawn only once the host has read a token in flight."""
        return any(s.needs_host_tokens and s.num_in_flight_tokens > n for s, _, _, n, _, _ in self.entries if n)

    @property
    def drafted(self) -> tuple[ScheduledSequence, ...]:
        """The entries with drafts."""
        return self.entries[self.num_decodes : self.num_decodes + len(self.drafts)]

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_new_tokens for entry in self.entries)
