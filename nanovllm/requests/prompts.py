"""Prompts: how texts become token ids, and forms other than plain text and plain token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

_FORMS = ("prompt", "prompt_token_ids")


class Texts:
    """How texts are tokenised: at once, and without bad words, which are refused. `Pieces` lets others go between."""

    def encode(
        self, text: str, encode: Callable[[str], list[int]], whole: Callable[[str], list[int]], limit: int | None
    ) -> list[int]:
        """Token ids of a text.

        Args:
            encode: tokenises a piece, without special tokens around it.
            whole: tokenises a text with them, if they are wanted.
            limit: maximum of the model's length; None for any number of tokens.

        Raises PromptTooLongError for a text that has as many tokens, if that is known before the end.
        """
        return whole(text)

    def prepare(self) -> None:
        """Prepare for the first text."""

    def spellings_of(self, bad_words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Token ids of each word at the start of a text and after a space, without duplicates."""
        raise ValueError("this engine was built without bad words; leave bad_words out.")


class ChatPrompt(list[int]):
    """Token ids of a conversation.

    Args:
        end_token_ids: tokens that end its answer, further to the model's end-of-sequence tokens.
    """

    def __init__(self, token_ids: Iterable[int], end_token_ids: tuple[int, ...] = ()) -> None:
        super().__init__(token_ids)
        self.end_token_ids = end_token_ids


def plain_prompt(given: Mapping[str, Any]) -> Any:
    """Text or token ids of {"prompt": ...} or {"prompt_token_ids": ...}; raises TypeError for anything else."""
    values = {name: value for name, value in given.items() if value is not None}
    for name in values:
        if name not in _FORMS:
            raise TypeError(
                f"a prompt has the key {name!r}; it is a string, a list of token ids, or a dictionary with one of them "
                f"as {' or '.join(_FORMS)}. Give options of a request by their keywords."
            )
    if not values:
        raise TypeError(f"a prompt is a dictionary without {' or '.join(_FORMS)}; give one of them.")
    return values.get("prompt_token_ids", values.get("prompt"))
