"""Incremental detokenization, in time linear in the number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

# A character has at most four bytes, hence at most three byte tokens while it is unfinished. Text that still ends in a
# replacement character after more tokens starts with invalid bytes, and is not held back.
MAX_UNFINISHED = 3
MAX_PENDING = 6
# Most tokens of the window: tokens without text are kept as context up to here.
MAX_WINDOW = 8


class IncrementalDetokenizer:
    """Appends each character to `text` once all of its bytes are there.

    A token's text may depend on the previous token (spaces, byte fallback), so each decode covers a short window: the
    tokens of the last piece of text and all later ones. A token may end one character and begin the next::

        tokens   [ settled | pending ...   ]      pending: they end in an unfinished character
        text     [ settled | early | \ufffd ]      early: whole characters of pending tokens, appended already

    Args:
        decode_ids: the text of some tokens.
        texts: text of each token of whole characters, and "" of any other; None if only `decode_ids` knows.
    """

    def __init__(self, decode_ids: Callable[[list[int]], str], texts: Mapping[int, str] | None = None) -> None:
        self.text = ""
        self._texts = texts
        self._decode_ids = decode_ids
        self._window: list[int] = []
        self._num_settled = 0  # tokens of the window with text appended already
        self._num_early = 0  # characters of pending tokens that have been appended

    def add(self, token_id: int) -> None:
        is_settled = len(self._window) == self._num_settled and not self._num_early
        if is_settled and self._texts is not None and (new := self._texts[token_id]):
            self.text += new
            self._window, self._num_settled = [token_id], 1
            return
        self._window.append(token_id)
        settled = self._decode(self._num_settled)
        end = len(self._window)
        text = self._decode(end)
        if text.endswith("\ufffd"):
            self._append(text.rstrip("\ufffd"), len(settled))
            if end - self._num_settled <= MAX_PENDING:
                return
            end, text = self._longest_whole_prefix()
        if len(text) <= len(settled):  # a token without text: a special token, or a space before its word
            if end > MAX_WINDOW:
                del self._window[self._num_settled : end]
            else:
                self._num_settled = end
            return
        self._append(text, len(settled))
        self._num_early -= len(text) - len(settled)
        self._window = self._window[self._num_settled :]
        self._num_settled = end - self._num_settled

    def _append(self, text: str, num_settled: int) -> None:
        """Append the new part of the window's text; its first num_settled characters belong to settled tokens."""
        new = text[num_settled + self._num_early :]
        self.text += new
        self._num_early += len(new)

    def unfinished_text(self) -> str:
        """Text of the pending tokens, with replacement characters: the rest of the text if no token follows."""
        return self._decode(len(self._window))[len(self._decode(self._num_settled)) + self._num_early :]

    def _longest_whole_prefix(self) -> tuple[int, str]:
        """(length, text) of the longest prefix of the window that splits no character."""
        last = len(self._window)
        for end in range(last - 1, last - MAX_UNFINISHED - 1, -1):
            text = self._decode(end)
            if not text.endswith("\ufffd"):
                break
        return end, text

    def _decode(self, end: int) -> str:
        return self._decode_ids(self._window[:end])


def plain_detokenizer(tokenizer: Any, *, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
    """A detokenizer by the tokenizer's own `decode`."""
    return IncrementalDetokenizer(partial(decode, tokenizer, skip_special_tokens=skip_special_tokens))


def decode(tokenizer: Any, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
    """Text of the tokens, with or without special ones, without clean-up of spaces."""
    text: str = tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    return text
