"""Tokenises long texts in pieces with the same tokens as the whole text, up to a limit.

A piece ends where no pre-token of the tokenizer can go on, so that no token can::

    The sea was calm in 1912, and nobody spoke.
    -------^---^----^---^---^-                   before " letter" after a letter or digit; between a letter and a digit
                                                 or a mark of punctuation

That holds if each alternative of the pre-tokenizer's patterns is in ALTERNATIVES. A tokenizer that is not understood,
such as SentencePiece's, gets the whole text at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

from nanovllm.errors import too_long
from nanovllm.features.intake.intake import checkpoint

PIECE_CHARS = 2048  # 1 to 10 ms
LONG_TOKEN = 8  # bytes; every vocabulary has a longer token
# Letters in every version of Unicode, and marks that no letter composes with.
LETTERS = "A-Za-zÀ-ÖØ-öø-ÿА-яぁ-ゖァ-ヺ一-鿿가-힣"
MARKS = r"""0-9!"#$%&()*+,./:;<=>?@\[\\\]^`{|}~\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f"""
CUT = re.compile(rf"(?<=[{LETTERS}])(?=[{MARKS}])|(?<=[{LETTERS}0-9])(?= [A-Za-z])")
# Alternatives of patterns by which tokenizers split texts. None matches a text with a cut within it, and no match
# depends on the text before it.
REST = r"\s+"  # rest of a pattern that matches everything
CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "(?i:'s|'t|'re|'ve|'m|'ll|'d)", "'(?i:[sdmt]|ll|ve|re)")
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
WORD = r"[^\r\n\p{L}\p{N}]?"
ALTERNATIVES = frozenset(
    (
        *CONTRACTIONS,
        r"\p{L}+", r" ?\p{L}+", rf"{WORD}\p{{L}}+", rf"{WORD}[\p{{L}}\p{{M}}]+",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        rf"{WORD}{UPPER}*{LOWER}+", rf"{WORD}{UPPER}+{LOWER}*",
        *(rf"{WORD}{word}{end}?" for word in (f"{UPPER}*{LOWER}+", f"{UPPER}+{LOWER}*") for end in CONTRACTIONS[7:]),
        r"\p{N}", r"\p{N}+", r" ?\p{N}+", r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r" ?[\p{P}\p{S}]+[\r\n]*",
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
        r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", REST,
    )
)  # fmt: skip
BYTES_SHRUNK_BY_NFC = 3  # maximum: three Hangul letters of three bytes make a syllable of three


class Pieces:
    """Safe cuts of a tokenizer's texts; thread-safe.

    Args:
        tokenizer: Tokenizer of `transformers`, or a `tokenizers.Tokenizer`; any other is not understood.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", tokenizer)

    def prepare(self) -> None:
        """Find the longest token: 0.3 s for a vocabulary of 49,152."""
        _ = self._max_bytes_any

    def encode(
        self, text: str, encode: Callable[[str], list[int]], whole: Callable[[str], list[int]], limit: int | None
    ) -> list[int]:
        """See `RequestParts.encode`."""
        if limit is not None and len(text) > LONG_TOKEN * limit:
            self._check_bytes(text, limit)
        checkpoint()
        if len(text) <= PIECE_CHARS or not self._can_cut:
            return whole(text)
        specials = self._around(encode, whole)
        if specials is None:
            return whole(text)
        ids = list(specials[0])
        begin = 0
        while begin < len(text):
            end = self._end_of_piece(text, begin)
            ids += encode(text[begin:end])
            begin = end
            if limit is not None and len(ids) >= limit and begin < len(text):
                raise too_long(f"{len(ids)} tokens in the first {begin} of its {len(text)} characters", limit)
            checkpoint()
        return ids + specials[1]

    def spellings_of(self, bad_words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """See `spellings_of`."""
        return spellings_of(bad_words, self._tokenizer)

    def _check_bytes(self, text: str, limit: int) -> None:
        num_bytes = len(text.encode("utf-8", "surrogatepass"))
        longest = self._max_token_bytes if self._max_token_bytes is None or text.isascii() else self._max_bytes_any
        if longest is not None and num_bytes >= longest * limit:
            raise too_long(
                f"at least {num_bytes // longest} tokens, since it has {num_bytes} bytes and no token has more than "
                f"{longest}",
                limit,
            )

    def _end_of_piece(self, text: str, begin: int) -> int:
        for found in CUT.finditer(text, begin + PIECE_CHARS):
            place = found.start()
            if not any(token in text[max(0, place - len(token) + 1) : place + len(token) - 1] for token in self._risky):
                return place
        return len(text)

    def _around(
        self, encode: Callable[[str], list[int]], whole: Callable[[str], list[int]]
    ) -> tuple[list[int], list[int]] | None:
        """Special tokens before and after a text; None if the tokenizer does something else."""
        probe = encode("a")
        full = whole("a")
        for place in range(len(full) - len(probe) + 1):
            if full[place : place + len(probe)] == probe:
                return full[:place], full[place + len(probe) :]
        return None

    # ------------------------------------------------------------------------------------------------ the tokenizer

    def _state(self, part: str) -> dict[str, Any]:
        """A part of the tokenizer as its file has it; {} for none."""
        found = getattr(self._backend, part, None)
        return {} if found is None else dict(json.loads(found.__getstate__()))

    @cached_property
    def _added(self) -> list[Any]:
        return list(self._backend.get_added_tokens_decoder().values())

    @cached_property
    def _stages(self) -> list[dict[str, Any]]:
        """The stages of pre-tokenisation; [] if texts are changed or split in ways that are not understood."""
        try:
            state = self._state("pre_tokenizer")
            normalizer = self._state("normalizer")
            if normalizer and normalizer["type"] != "NFC":
                return []
            if any(t.lstrip or t.rstrip or t.single_word or (t.normalized and normalizer) for t in self._added):
                return []
            model = self._backend.model
            is_plain = model.dropout is None and model.unk_token is None and not model.byte_fallback
            stages = state["pretokenizers"] if state["type"] == "Sequence" else [state]
        except (AttributeError, KeyError, TypeError, ValueError):
            return []
        return stages if is_plain else []

    @cached_property
    def _can_cut(self) -> bool:
        has_rest = False
        for stage in self._stages:
            if stage["type"] == "ByteLevel":
                if stage["add_prefix_space"]:
                    return False
                has_rest = has_rest or stage["use_regex"]
            elif stage["type"] == "Split":
                parts = alternatives(str(stage["pattern"].get("Regex", "")))
                if not ALTERNATIVES.issuperset(parts) or stage["behavior"] != "Isolated" or stage["invert"]:
                    return False
                has_rest = has_rest or REST in parts
            elif stage["type"] != "Digits":
                return False
        return has_rest

    @cached_property
    def _risky(self) -> list[str]:
        """Added tokens that hold a cut, alone or followed by a letter."""
        contents = [token.content for token in self._added]
        return [text for text in contents if any(0 < m.start() < len(text) for m in CUT.finditer(f"{text}a"))]

    @cached_property
    def _max_token_bytes(self) -> int | None:
        """Bytes of the longest token; None if a token may stand for any number of bytes."""
        if not any(stage["type"] == "ByteLevel" for stage in self._stages):
            return None
        longest = max(map(len, self._backend.get_vocab(with_added_tokens=False)), default=1)  # a character a byte
        return max(longest, *(len(token.content.encode()) for token in self._added), 1)

    @cached_property
    def _max_bytes_any(self) -> int | None:
        """Bytes of a text before normalisation that one token may stand for."""
        longest = self._max_token_bytes
        return longest if longest is None or not self._state("normalizer") else longest * BYTES_SHRUNK_BY_NFC


def spellings_of(bad_words: Iterable[str], tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """Token ids of each word at the start of a text and after a space, without duplicates.

    Raises ValueError for a word without tokens.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in bad_words:
        checkpoint()
        for spelling in (word.lstrip(), " " + word.lstrip()):
            token_ids = tuple(tokenizer.encode(spelling, add_special_tokens=False))
            if not token_ids:
                raise ValueError(f"bad_words holds {word!r}, for which the tokenizer has no tokens. Remove it.")
            found[token_ids] = None
    return tuple(found)


def alternatives(pattern: str) -> list[str]:
    """The alternatives of a pattern: its parts between bars that are in no brackets."""
    parts = [""]
    depth = 0
    is_set = False
    for token in re.findall(r"\\.|.", pattern, re.DOTALL):
        if is_set:
            is_set = token != "]"
        elif token == "[":
            is_set = True
        elif token in "()" and len(token) == 1:
            depth += 1 if token == "(" else -1
        if token == "|" and not depth and not is_set:
            parts.append("")
        else:
            parts[-1] += token
    return parts
