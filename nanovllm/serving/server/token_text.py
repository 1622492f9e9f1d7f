"""Text and bytes of single tokens, for log-probabilities."""

from __future__ import annotations

import functools
import re
from typing import Any

from tokenizers import pre_tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """Return the byte-level alphabet: printable bytes map to themselves, unprintable ones to U+0100 and up."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    own = {chr(byte): byte for byte in range(256) if chr(byte) in alphabet}
    unprintable = [byte for byte in range(256) if chr(byte) not in own]
    return own | {chr(0x100 + number): byte for number, byte in enumerate(unprintable)}


class TokenText:
    """Text and bytes of a tokenizer's tokens, cached per token id.

    Args:
        tokenizer: None formats each token as its id.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}
        self._is_byte_level = tokenizer is not None and "ByteLevel" in str(
            getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", "")
        )

    def text(self, token_id: int) -> str:
        return self._entry(token_id)[0]

    def byte_values(self, token_id: int) -> list[int]:
        return list(self._entry(token_id)[1])

    def _entry(self, token_id: int) -> tuple[str, bytes]:
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._look_up(token_id)
        return found

    def _look_up(self, token_id: int) -> tuple[str, bytes]:
        if self._tokenizer is None:
            return str(token_id), str(token_id).encode()
        spelling = self._tokenizer.convert_ids_to_tokens(token_id)
        if spelling is None:  # embeddings may have more rows than the tokenizer has tokens
            return "", b""
        if spelling in self._tokenizer.all_special_tokens:
            return spelling, spelling.encode()
        if single := _BYTE_TOKEN.fullmatch(spelling):
            encoded = bytes([int(single[1], 16)])
        elif self._is_byte_level and all(character in _byte_of_character() for character in spelling):
            encoded = bytes(_byte_of_character()[character] for character in spelling)
        else:
            encoded = spelling.replace("▁", " ").encode()  # SentencePiece's space
        return encoded.decode(errors="replace"), encoded
