"""A grammar's state behind the tokens of one sample: the tokens that may come next, as a bit mask."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanovllm.core.structured_output import GrammarError


class Matcher:
    """Follows one sample's output; used by one thread at a time.

    Args:
        state: llguidance's `LLMatcher`, behind the first `num_tokens` tokens.
        name: of the field of `SamplingParams` that it comes from, for errors.
        num_words: 32-bit words of a mask.
    """

    __slots__ = ("_state", "name", "num_tokens", "num_words")

    def __init__(self, state: Any, name: str, num_words: int, num_tokens: int = 0) -> None:
        self._state = state
        self.name = name
        self.num_words = num_words
        self.num_tokens = num_tokens

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Write the tokens that may come next into mask [num_words]: bit i % 32 of word i // 32 for token i.

        Raises GrammarError if that takes more work than llguidance's limits for one token.
        """
        self._state.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()

    def follow(self, token_ids: Iterable[int], address: int) -> None:
        """Consume tokens of the output, and write the mask behind them to this address; raises GrammarError."""
        for token_id in token_ids:
            self.consume(token_id)
        self._state.unsafe_compute_mask_ptr(address, 4 * self.num_words)
        self._check()

    def consume(self, token_id: int) -> None:
        """Go on behind a token of the output; raises GrammarError for one that the grammar forbids there."""
        self._state.consume_token(token_id)
        self._check()
        self.num_tokens += 1

    def rollback(self, num_tokens: int) -> None:
        """Forget the last tokens."""
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"{num_tokens} tokens cannot be taken back of {self.num_tokens}.")
        self._state.rollback(num_tokens)
        self._check()
        self.num_tokens -= num_tokens

    def is_complete(self) -> bool:
        """Whether the output may end here."""
        return bool(self._state.is_accepting())

    def copy(self) -> Matcher:
        """A matcher of its own behind the same tokens; any thread may copy one that nobody moves."""
        return Matcher(self._state.deep_copy(), self.name, self.num_words, self.num_tokens)

    def _check(self) -> None:
        if self._state.is_error():
            message = shortened(self._state.get_error())
            raise GrammarError(f"{self.name} cannot be followed any further ({message})")


def shortened(message: str) -> str:
    """The first lines of one of llguidance's messages, on one line."""
    message = message.split("<state>")[0].split("<non-verbose")[0]
    words = " ".join(message.split())
    return words if len(words) <= 300 else words[:297] + "..."
