"""What a bad word looks like to a model: the token sequences that spell it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Spellings = tuple[tuple[int, ...], ...]


def spellings_of(words: Iterable[str], tokenizer: Any) -> Spellings:
    """The token ids of each word as it stands at the beginning of a text and behind a space, each sequence once.

    Raises ValueError for a word that the tokenizer has no tokens for.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word.lstrip(), " " + word.lstrip()):
            token_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not token_ids:
                raise ValueError(f"bad_words holds {word!r}, for which the tokenizer has no tokens. Remove it.")
            found[token_ids] = None
    return tuple(found)
