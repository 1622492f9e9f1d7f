"""The scheduler's decision for one step, as an immutable record."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from nanovllm.outputs import ErrorKind, FinishReason
from nanovllm.sequence import Sequence

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
    """Record the error that a runner's answer stands for; returns the finish reason of its sequence."""
    if answer == EMBEDDED:
        return "stop"
    sequence.error_kind, error = SAMPLING_ERRORS[answer]
    if answer == NON_FINITE or not sequence.error:  # The error of a logits processor that raised stays
        sequence.error = f"request {sequence.request_id!r}: {error.format(len(sequence.token_ids))}"
    return "error"


NULL_BLOCK = 0  # never allocated: padded reads and writes go there


class ScheduledSequence(NamedTuple):
    """One sequence's share of a step (a named tuple: one is built per running request and step)."""

    sequence: Sequence
    start: int  # position of its first new token
    num_new_tokens: int  # 0 for a sample that draws from the last row of the entry before, of the same prompt
    num_samples: int  # tokens drawn from its last rows: 1 if these reach its last known token, else 0; several: a run
    block_table: list[int]  # the list at scheduling time: it may grow, but its blocks never change
    num_computed_before: int  # its computed tokens, without this step's hits: a failed step returns there
    draft: tuple[int, ...] = ()  # guesses at the tokens after its last known one, which its last rows verify


class Copy(NamedTuple):
    """A copy of a block within a cache group's pool: K and V of all its layers."""

    group: int
    source: int
    destination: int


class StepResults(Protocol):
    """Results of a step besides its tokens."""

    def record(self, sequences: SequenceABC[Sequence], token_ids: list[int]) -> None:
        """Write the results into the sequences of `ScheduledBatch.sampling`, before these take their tokens."""


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """The sequences of one step: decodes, then those with drafts, then chunks of prefills.

    num_decodes: entries of sequences that lacked just one token when the step began; each draws one.
    copies: block copies to run before the forward pass, which may write to their sources. All sources are read before
        any destination is written; no block is a destination twice.
    budget: token budget of the step.
    drafted: entries with drafts, of sequences that would decode otherwise. They compute the last known token and the
        drafts, and draw after each.
    prefills: the chunks, and forks without rows.
    sampling: the sequence of each token drawn in this step, in batch order; one that draws a run comes once for each.
        At most max_num_seqs tokens in all, since their logits take memory.
    draws_runs: True if some sequence draws more than one token.
    """

    step_id: int
    entries: tuple[ScheduledSequence, ...]
    num_decodes: int = 0
    copies: tuple[Copy, ...] = ()
    budget: int = 0
    drafted: tuple[ScheduledSequence, ...] = field(init=False)
    prefills: tuple[ScheduledSequence, ...] = field(init=False)
    sampling: tuple[Sequence, ...] = field(init=False)
    draws_runs: bool = field(init=False)

    def __post_init__(self) -> None:
        others = self.entries[self.num_decodes :]
        sampling = [entry.sequence for entry in self.entries[: self.num_decodes]]
        sampling += [entry.sequence for entry in others for _ in range(entry.num_samples)]
        drafted = tuple([entry for entry in others if entry.draft])
        object.__setattr__(self, "drafted", drafted)
        object.__setattr__(self, "prefills", others[len(drafted) :])
        object.__setattr__(self, "sampling", tuple(sampling))
        object.__setattr__(self, "draws_runs", any(entry.num_samples > 1 for entry in others))

    @property
    def draws_late(self) -> bool:
        """Whether some row can be drawn only once the host has read a token in flight."""
        return any(s.needs_host_tokens and s.num_in_flight_tokens > n for s, _, _, n, *_ in self.entries if n)

    @property
    def runs(self) -> dict[Sequence, int]:
        """Number of tokens before the drawn ones, of each sequence that draws several."""
        if not self.draws_runs:
            return {}
        runs = [entry for entry in self.entries[self.num_decodes :] if entry.num_samples > 1]
        return {entry.sequence: entry.start + entry.num_new_tokens - entry.num_samples + 1 for entry in runs}

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_new_tokens for entry in self.entries)
