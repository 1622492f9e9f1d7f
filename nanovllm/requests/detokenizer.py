"""Text of a growing list of tokens, in time linear in its length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# A character has at most four bytes, hence at most three byte tokens while it is unfinished. What still ends in a
# replacement character after more tokens than these begins with invalid bytes, which need not be waited for.
MAX_UNFINISHED = 3
MAX_PENDING = 6
# Tokens without text are kept as context, but no more than this.
MAX_WINDOW = 8


class IncrementalDetokenizer:
    """Appends each character as soon as it is whole.

    A token's text may depend on the one before (spaces, byte fallback), so each decode covers a short window: the
    tokens of the last piece of text and those behind it. A token may end one character and begin the next::

        tokens   [ settled | pending ...   ]      pending: they end in an unfinished character
        text     [ settled | early | \ufffd ]      early: whole characters of pending tokens, appended already
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self.text = ""
        self._decode_ids = decode_function(tokenizer, skip_special_tokens=skip_special_tokens)
        self._window: list[int] = []
        self._num_settled = 0  # tokens of the window whose text has been appended
        self._num_early = 0  # characters of the tokens behind them that have been appended

    def add(self, token_id: int) -> None:
        self._window.append(token_id)
        settled = self._decode(self._num_settled)
        end = len(self._window)
        text = self._decode(end)
        if text.endswith("\ufffd"):
            self._append(text.rstrip("\ufffd"), len(settled))
            if end - self._num_settled <= MAX_PENDING:
                return
            end, text = self._before_the_unfinished()
        if len(text) <= len(settled):  # no text of its own: a special token, or a space that waits for its word
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
        """Append what is new of the window's text, of which so many characters belong to settled tokens."""
        new = text[num_settled + self._num_early :]
        self.text += new
        self._num_early += len(new)

    def unfinished_text(self) -> str:
        """Text of the tokens that wait for more, as it is: what is to be shown of them if no more come."""
        return self._decode(len(self._window))[len(self._decode(self._num_settled)) + self._num_early :]

    def _before_the_unfinished(self) -> tuple[int, str]:
        """The longest part of the window that cuts through no character, and its text."""
        last = len(self._window)
        for end in range(last - 1, last - MAX_UNFINISHED - 1, -1):
            text = self._decode(end)
            if not text.endswith("\ufffd"):
                break
        return end, text

    def _decode(self, end: int) -> str:
        return self._decode_ids(self._window[:end])


def decode(tokenizer: Any, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
    """Text of the tokens, with or without special ones, exactly as the tokenizer's vocabulary spells it."""
    text: str = tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    return text


def decode_function(tokenizer: Any, *, skip_special_tokens: bool) -> Callable[[list[int]], str]:
    """`decode` for one tokenizer, by the shortest way.

    For a few tokens most of the time of transformers' `decode` goes into looking at what kind of argument it was given.
    What it calls in the end is called at once here, unless a subclass or an owner decodes in a way of its own.
    """
    # Imported with the tokenizer, and not before: a front starts its replicas first.
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    own = type(tokenizer)
    is_plain = (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and own.decode is PreTrainedTokenizerBase.decode
        and own._decode is PreTrainedTokenizerFast._decode
        and not {"decode", "_decode"} & vars(tokenizer).keys()
    )
    if not is_plain:
        return lambda token_ids: decode(tokenizer, token_ids, skip_special_tokens=skip_special_tokens)
    backend_decode = tokenizer.backend_tokenizer.decode
    return lambda token_ids: backend_decode(token_ids, skip_special_tokens=skip_special_tokens)
