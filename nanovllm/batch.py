"""The scheduler's decision for one step, as an immutable record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from nanovllm.sequence import Sequence

# The runner's answers in place of a token: a row of the model's logits is not finite, or what the request asks for left
# no token that could be drawn.
NON_FINITE = -1
NOTHING_LEFT = -2

NULL_BLOCK = 0  # never handed out: padded reads and writes go there


class ScheduledSequence(NamedTuple):
    """One sequence's share of a step (a named tuple: one is built per running request and step)."""

    sequence: Sequence
    start: int  # position of its first new token
    num_new_tokens: int
    samples: bool  # True when its last known token is computed, so that the next one is drawn
    block_table: list[int]  # the list at scheduling time: it may grow, but never changes what it held
    num_computed_before: int  # computed tokens before this step's prefix hits: where a failed step returns to


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """The sequences of one step, decodes first.

    num_decodes: entries of sequences that lacked just one token when the step began; the others are chunks of prefills.
    """

    step_id: int
    entries: tuple[ScheduledSequence, ...]
    num_decodes: int = 0

    @property
    def prefills(self) -> tuple[ScheduledSequence, ...]:
        return self.entries[self.num_decodes :]

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_new_tokens for entry in self.entries)

    @property
    def sampling(self) -> list[Sequence]:
        """The sequences that draw a token in this step, in batch order."""
        return [entry.sequence for entry in self.entries if entry.samples]

    @property
    def sampled_positions(self) -> list[int]:
        """The position of each of these tokens in its sequence."""
        return [entry.start + entry.num_new_tokens for entry in self.entries if entry.samples]
