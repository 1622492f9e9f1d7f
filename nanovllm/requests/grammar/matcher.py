"""A grammar's state behind the tokens of one sample: the tokens that may come next, as a bit mask."""

from __future__ import annotations

from collections.abc import Iterable
from time import thread_time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanovllm.core.structured_output import GrammarError

# Of a processor, for the masks of all samples of one compiled form: a mask that takes longer than its allowance draws
# on the reserve, and one that takes less refills it. A list of characters, the slowest of useful forms, takes half of
# its allowance; an ambiguous rule, such as "a: a a | X", more with each token.
RESERVE_SECONDS = 0.05
MASK_SECONDS, WORD_SECONDS = 2e-3, 1e-6  # allowed for a mask, and for each of its words


class Work:
    """The time that the samples of one compiled form have taken for their masks beyond what these are allowed.

    llguidance's own limits count items of its parser; how long each of them takes grows with their number.

    allowed: seconds of a processor for each mask.
    """

    def __init__(self, num_words: int) -> None:
        self.allowed = MASK_SECONDS + num_words * WORD_SECONDS
        self._excess = 0.0

    @property
    def is_over(self) -> bool:
        return self._excess > RESERVE_SECONDS

    def add(self, seconds: float, num_tokens: int) -> None:
        """Count a mask, and the tokens consumed before it: many where a request is resumed."""
        self._excess = max(0.0, self._excess + seconds - self.allowed * max(1, num_tokens))


class Matcher:
    """Follows one sample's output; used by one thread at a time.

    Args:
        state: llguidance's `LLMatcher`, behind the first `num_tokens` tokens.
        name: of the field of `SamplingParams` that it comes from, for errors.
        num_words: 32-bit words of a mask.
        work: shared with its copies.
    """

    __slots__ = ("_state", "_work", "name", "num_tokens", "num_words")

    def __init__(self, state: Any, name: str, num_words: int, num_tokens: int = 0, work: Work | None = None) -> None:
        self._state = state
        self._work = Work(num_words) if work is None else work
        self.name = name
        self.num_words = num_words
        self.num_tokens = num_tokens

    @property
    def is_usable(self) -> bool:
        """Whether a copy can follow another output: the lexer and the work that all copies share are within limits."""
        try:
            self.copy().fill(np.zeros(self.num_words, np.int32))
        except GrammarError:
            return False
        return not self._work.is_over

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Write the tokens that may come next into mask [num_words]: bit i % 32 of word i // 32 for token i.

        Raises GrammarError if that takes more work than llguidance's limits for one token.
        """
        self._state.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()

    def follow(self, token_ids: Iterable[int], address: int) -> None:
        """Consume tokens of the output, and write the mask behind them to this address.

        Raises GrammarError, also once the masks of its form have taken too long.
        """
        if self._work.is_over:
            raise GrammarError(
                f"{self.name} takes too long for its masks: more than {1e3 * RESERVE_SECONDS:g} ms of a processor "
                f"beyond {1e3 * self._work.allowed:.1f} ms each. Simplify it: rules that can read a text in many ways "
                "cost most"
            )
        begin, num_before = thread_time(), self.num_tokens
        for token_id in token_ids:
            self.consume(token_id)
        self._state.unsafe_compute_mask_ptr(address, 4 * self.num_words)
        self._work.add(thread_time() - begin, self.num_tokens - num_before)
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
        return Matcher(self._state.deep_copy(), self.name, self.num_words, self.num_tokens, self._work)

    def _check(self) -> None:
        if self._state.is_error():
            message = shortened(self._state.get_error())
            raise GrammarError(f"{self.name} cannot be followed any further ({message})")


def shortened(message: str) -> str:
    """The first lines of one of llguidance's messages, on one line."""
    message = message.split("<state>")[0].split("<non-verbose")[0]
    words = " ".join(message.split())
    return words if len(words) <= 300 else words[:297] + "..."
