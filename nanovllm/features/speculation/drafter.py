"""`Drafter`, the source of draft tokens, and `DraftRequest`, the part of a request that it sees."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from typing import Protocol

from nanovllm.features.sampling_params import SamplingParams
from nanovllm.sequence import Sequence


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One sample of a request, for which draft tokens are wanted.

    sequence: the engine's; do not change it.
    max_tokens: drafts beyond so many are dropped.
    """

    sequence: Sequence
    max_tokens: int

    @property
    def request_id(self) -> str:
        return self.sequence.request_id

    @property
    def index(self) -> int:
        """Number of the sample in its request."""
        return self.sequence.index

    @property
    def params(self) -> SamplingParams:
        return self.sequence.params

    @property
    def seed(self) -> int:
        """Seed of the sample's noise: a token's noise is a function of (seed, position, token id)."""
        return self.sequence.seed

    @property
    def cache_salt(self) -> str:
        """Texts of one salt must not reach requests of another."""
        return self.sequence.cache_salt

    @property
    def num_tokens(self) -> int:
        """Known tokens, prompt and output: the position of the first draft."""
        return len(self.sequence.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return self.sequence.num_prompt_tokens

    @property
    def token_ids(self) -> list[int]:
        """A copy of all known tokens, prompt and output."""
        return self.tokens_from(0)

    def tokens_from(self, start: int) -> list[int]:
        """A copy of the known tokens from position `start` on; below 0 counts from the end."""
        return self.sequence.token_ids[start:].tolist()


class Drafter(Protocol):
    """A source of draft tokens for `LLM(..., speculation=drafter)`.

    The model verifies every draft, so a bad one costs time and never changes an output. Called in the engine's
    thread before each step: all requests wait for it.
    """

    def propose(self, requests: SequenceABC[DraftRequest]) -> Iterable[SequenceABC[int]]:
        """Guess the tokens that follow each request's known ones: one list of token ids each, maybe empty."""
