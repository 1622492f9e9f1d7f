"""Draft tokens of a step, which its launch and its draw see at the end of the sequences' known tokens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from nanovllm.batch import NoDrafts
from nanovllm.features.structured_output import GrammarError
from nanovllm.sequence import Sequence

T = TypeVar("T")


class Drafts(NoDrafts):
    """Draft tokens of a step's sequences: guesses at the tokens after its last known one.

    While a step is launched or drawn (`with drafts:`), token_ids end with the drafts: each row sees those before it.

    num_accepted: Number of each sequence's drafts that equal the draws, once the step is read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_accepted: dict[Sequence, int] = {}

    def __enter__(self) -> None:
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

    def around(self, call: Callable[..., T]) -> Callable[..., T]:
        """The function `call`, run while token_ids end with the drafts."""

        def entered(*args: Any) -> T:
            with self:
                return call(*args)

        return entered

    def hide(self) -> None:
        """Remove the drafts from token_ids and matchers, if they are there; the step must be in flight."""
        for sequence, token_ids in self.items():
            del sequence.token_ids[sequence.num_known_tokens - len(token_ids) - 1 :]
            matcher = sequence.matcher
            if matcher is not None and matcher.num_tokens > sequence.num_output_tokens:
                with suppress(GrammarError):  # a matcher over its limits raises again at the next mask
                    matcher.rollback(matcher.num_tokens - sequence.num_output_tokens)
