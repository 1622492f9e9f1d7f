"""A grammar's state after the tokens of one sample, and the bit mask of tokens allowed next."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from time import thread_time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanovllm.features.structured_output import GrammarError

# CPU seconds for the masks of all samples of one compiled form: a mask slower than its allowance draws on the reserve,
# a faster one refills it. A list of characters, the slowest useful form, takes half of its allowance; an ambiguous
# rule, such as "a: a a | X", takes more with each token.
RESERVE_SECONDS = 0.05
# allowance for a mask, and for each of its words
MASK_SECONDS = 2e-3
WORD_SECONDS = 1e-6

EXPECTATION_DECAY = 0.9  # a mask: texts differ, and a step has to hold its slowest masks


class MaskBudget:
    """CPU time that the samples of one compiled form spent on masks beyond their allowance.

    llguidance's limits count items of its parser, and the time per item grows with their number.

    allowed: CPU seconds per mask.
    expected: seconds of the next mask: of the slowest of the last ones.
    """

    def __init__(self, num_words: int) -> None:
        self.allowed = MASK_SECONDS + num_words * WORD_SECONDS
        self.expected = 0.0
        self._excess = 0.0

    @property
    def is_exceeded(self) -> bool:
        return self._excess > RESERVE_SECONDS

    @property
    def has_excess(self) -> bool:
        return self._excess > 0.0

    def add(self, seconds: float, num_tokens: int) -> None:
        """Count a mask and the tokens consumed for it: several when a request is resumed."""
        self.expect(seconds / max(1, num_tokens))
        self._excess = max(0.0, self._excess + seconds - self.allowed * max(1, num_tokens))

    def expect(self, seconds: float) -> None:
        self.expected = max(seconds, EXPECTATION_DECAY * self.expected)


class Lexers:
    """One form, compiled several times: its states at the start of the output, each with a separate lexer.

    llguidance locks a lexer for the whole of a mask, and copies of a state share it. So masks run in parallel only
    across lexers.

    budget: time budget for the masks of all samples.
    compile_state: function that compiles the form again; None if no lexer can be added.
    """

    def __init__(self, state: Any, num_words: int) -> None:
        self.budget = MaskBudget(num_words)
        self.states = [state]
        self.compile_state: Callable[[], Any] | None = None
        self._growing = threading.Lock()

    def grow(self, count: int) -> None:
        """Compile up to so many lexers, in another thread; does nothing while one compiles."""
        if self.compile_state is not None and self._growing.acquire(blocking=False):
            threading.Thread(target=self._compile, args=(count,), name="nanovllm-lexers", daemon=True).start()

    def _compile(self, count: int) -> None:
        try:
            while self.compile_state is not None and len(self.states) < count:
                self.states.append(self.compile_state())
        except ValueError:  # the form is at its limit: masks go on with the lexers that exist
            self.compile_state = None
        finally:
            self._growing.release()


class Matcher:
    """Follows one sample's output; used by one thread at a time.

    Args:
        state: llguidance's `LLMatcher`, after the first `num_tokens` tokens.
        name: name of its field of `SamplingParams`, for errors.
        num_words: 32-bit words of a mask.
        lexers: lexers that it shares with its copies.

    lexer: index of the state's lexer.
    lexer_id: a number that no other lexer has.
    """

    __slots__ = ("lexer", "lexer_id", "lexers", "name", "num_tokens", "num_words", "state")

    def __init__(
        self, state: Any, name: str, num_words: int, num_tokens: int = 0, lexers: Lexers | None = None, lexer: int = 0
    ) -> None:
        self.state = state
        self.lexers = Lexers(state, num_words) if lexers is None else lexers
        self.lexer, self.lexer_id = lexer, id(self.lexers) + lexer
        self.name = name
        self.num_words = num_words
        self.num_tokens = num_tokens

    @property
    def is_usable(self) -> bool:
        """Whether a copy can follow another output: lexers and budget, shared by all copies, are within limits."""
        mask = np.zeros(self.num_words, np.int32)
        try:
            for state in self.lexers.states:
                Matcher(state.deep_copy(), self.name, self.num_words, lexers=self.lexers).fill(mask)
        except GrammarError:
            return False
        return not self.lexers.budget.is_exceeded

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Write the allowed tokens to mask [num_words]: bit i % 32 of word i // 32 for token i.

        Raises GrammarError if this exceeds llguidance's limits for one token.
        """
        begin = thread_time()
        self.state.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self.lexers.budget.expect(thread_time() - begin)
        self.check()

    def follow(self, token_ids: Iterable[int], address: int) -> None:
        """Consume tokens of the output, and write the next mask [num_words] to this address.

        Raises GrammarError for a forbidden token, and once the masks of its form have exceeded their budget.
        """
        budget = self.lexers.budget
        if budget.is_exceeded:
            raise GrammarError(
                f"{self.name} takes too long for its masks: more than {1e3 * RESERVE_SECONDS:g} ms of a processor "
                f"beyond {1e3 * budget.allowed:.1f} ms each. Simplify it: rules that can read a text in many "
                "ways cost most"
            )
        begin = thread_time()
        num_before = self.num_tokens
        for token_id in token_ids:
            self.consume(token_id)
        self.state.unsafe_compute_mask_ptr(address, 4 * self.num_words)
        budget.add(thread_time() - begin, self.num_tokens - num_before)
        self.check()

    def consume(self, token_id: int) -> None:
        """Consume one token of the output; raises GrammarError if the grammar forbids it."""
        self.state.consume_token(token_id)
        self.check()
        self.num_tokens += 1

    def rollback(self, num_tokens: int) -> None:
        """Undo the last tokens; raises ValueError for more than were consumed."""
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"{num_tokens} tokens cannot be taken back of {self.num_tokens}.")
        self.state.rollback(num_tokens)
        self.check()
        self.num_tokens -= num_tokens

    def accepted(self, token_ids: list[int]) -> int:
        """The number of these tokens, from the first on, that the grammar allows after those consumed."""
        return int(self.state.validate_tokens(token_ids))

    def forced(self) -> list[int]:
        """Tokens that spell the only text with which the output can go on; empty if there are several."""
        return list(self.state.compute_ff_tokens())

    def is_complete(self) -> bool:
        """Whether the output may end here."""
        return bool(self.state.is_accepting())

    @property
    def mask_seconds(self) -> float:
        """Expected seconds of its next mask."""
        return self.lexers.budget.expected

    def copy(self) -> Matcher:
        """An independent matcher in the same state; thread-safe while no thread changes this one."""
        return Matcher(self.state.deep_copy(), self.name, self.num_words, self.num_tokens, self.lexers, self.lexer)

    def move(self, lexer: int, token_ids: Sequence[int]) -> None:
        """Go on with another lexer, if it takes the tokens consumed so far: token_ids [num_tokens]."""
        state = self.lexers.states[lexer].deep_copy()
        if state.consume_tokens(token_ids):
            self.state, self.lexer, self.lexer_id = state, lexer, id(self.lexers) + lexer

    def check(self) -> None:
        """Raise GrammarError after an error of llguidance, which no later call undoes."""
        if self.state.is_error():
            message = shortened(self.state.get_error())
            raise GrammarError(f"{self.name} cannot be followed any further ({message})")


def shortened(message: str) -> str:
    """One of llguidance's messages on one line, up to 300 characters."""
    message = message.split("<state>")[0].split("<non-verbose")[0]
    words = " ".join(message.split())
    return words if len(words) <= 300 else words[:297] + "..."
