"""Text of a growing list of tokens, in time linear in its length."""

from __future__ import annotations

from typing import Any

# A character has at most four bytes, hence at most four byte tokens: whatever still ends in a replacement character
# after more than these is not an unfinished character but invalid.
MAX_PENDING_TOKENS = 6


class IncrementalDetokenizer:
    """Appends the text of each token as soon as it is a whole character.

    A token's text may depend on the one before (spaces, byte fallback), so each decode covers a short window: the
    tokens of the last piece of text and those behind it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._num_settled = 0  # tokens of the window whose text has been appended

    def add(self, token_id: int) -> None:
        self._window.append(token_id)
        settled = decode(self._tokenizer, self._window[: self._num_settled])
        text = decode(self._tokenizer, self._window)
        is_whole = not text.endswith("\ufffd") or len(self._window) - self._num_settled > MAX_PENDING_TOKENS
        if len(text) > len(settled) and is_whole:
            self.text += text[len(settled) :]
            self._window = self._window[self._num_settled :]
            self._num_settled = len(self._window)


def decode(tokenizer: Any, token_ids: list[int]) -> str:
    """Text of the tokens without special ones, exactly as the tokenizer's vocabulary spells it."""
    return tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
