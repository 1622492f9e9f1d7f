"""Prompts for the middle between a prefix and a suffix (fill in the middle, FIM), by a tokenizer's own markers.

::

    prefix first    <PRE> prefix <SUF> suffix <MID>        the model goes on with the middle
    suffix first    <SUF> suffix <PRE> prefix <MID>

Texts are encoded between marker ids, never with them, so a text that spells a marker stays text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nanovllm.config import text
from nanovllm.features.intake.pieces import Pieces

ANCHOR = "☺"  # joins no other character in vocabularies of SentencePiece


@dataclass(frozen=True, slots=True)
class InfillMarkers:
    """Marker tokens of a family of models.

    middle: None where the prefix ends the prompt.
    file, repository: tokens before the parts of a repository, if the family knows any.
    ends: further tokens that end a middle.
    """

    prefix: str
    suffix: str
    middle: str | None
    is_suffix_first: bool = False
    file: str | None = None
    repository: str | None = None
    ends: tuple[str, ...] = ()


# By the models that were trained with them; the first row with all markers in the vocabulary counts.
MARKERS = {
    "Qwen Coder": InfillMarkers(
        "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", file="<|file_sep|>", repository="<|repo_name|>",
        ends=("<|fim_pad|>", "<|endoftext|>"),
    ),
    "CodeGemma": InfillMarkers("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", file="<|file_separator|>"),
    "Granite 4": InfillMarkers("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", ends=("<|fim_pad|>",)),
    "StarCoder 2, Granite Code": InfillMarkers(
        "<fim_prefix>", "<fim_suffix>", "<fim_middle>", file="<file_sep>", repository="<repo_name>",
        ends=("<fim_pad>", "<|endoftext|>"),
    ),
    "StarCoder": InfillMarkers(
        "<fim_prefix>", "<fim_suffix>", "<fim_middle>", file="<filename>", ends=("<fim_pad>", "<|endoftext|>")
    ),
    "Granite 3": InfillMarkers("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ends=("<fim_pad>",)),
    "SantaCoder": InfillMarkers("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<fim-pad>", "<|endoftext|>")),
    "CodeLlama": InfillMarkers("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),
    "DeepSeek Coder": InfillMarkers(
        "<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>", ends=("<|EOT|>",)
    ),
    "Codestral": InfillMarkers("[PREFIX]", "[SUFFIX]", None, is_suffix_first=True),
    "Seed Coder": InfillMarkers("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", is_suffix_first=True),
    "GLM 4": InfillMarkers("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
}  # fmt: skip


class Infill:
    """Prompts of one tokenizer for a middle; stateless, hence thread-safe.

    stop_token_ids: tokens that end a middle, in addition to the model's end-of-sequence tokens.
    """

    def __init__(self, tokenizer: Any, markers: InfillMarkers) -> None:
        self._tokenizer, self._markers, self._pieces = tokenizer, markers, Pieces(tokenizer)
        named = (markers.prefix, markers.suffix, markers.middle, markers.file, markers.repository, *markers.ends)
        self._ids = {name: _token_id(tokenizer, name) for name in named if name is not None}
        self.stop_token_ids = tuple(sorted({found for found in self._ids.values() if found is not None}))
        spellings = sorted((name.lstrip("▁") for name in self._ids), key=len, reverse=True)
        self._spelling = re.compile("|".join(map(re.escape, spellings)))

    def prompts(
        self,
        prefixes: Sequence[str | list[int]],
        suffix: str,
        *,
        files: Sequence[tuple[str, str]] = (),
        begun: str = "",
    ) -> list[list[int]]:
        """Token ids of a prompt for the middle of each prefix; raises ValueError for half of a surrogate pair.

        Args:
            prefixes: texts or token ids before the middle.
            files: (name, text) of other files, for the model to read.
            begun: text with which the middle begins.
        """
        markers = self._markers
        head = self._begin() + self._files(files)
        after = self._marker(markers.suffix) + self._encode("the suffix", suffix, joins=True)
        middle = self._marker(markers.middle) + self._encode("the prompt", begun, joins=True)
        found = []
        for prefix in prefixes:
            ids = prefix if isinstance(prefix, list) else self._encode("the prefix", prefix)
            before = self._marker(markers.prefix) + ids
            found.append(head + (after + before if markers.is_suffix_first else before + after) + middle)
        return found

    # ------------------------------------------------------------------------------------------------------- parts

    def _marker(self, name: str | None) -> list[int]:
        found = None if name is None else self._ids[name]
        return [] if found is None else [found]

    def _files(self, files: Sequence[tuple[str, str]]) -> list[int]:
        """Other files before the prompt: each after its marker, or below a line with its name."""
        marker = self._marker(self._markers.file)
        found = self._marker(self._markers.repository) + self._encode("the files", "repository\n") if files else []
        if not marker:
            found = []
        for name, content in files:
            found += marker + self._encode("a file", f"{name}\n{content}\n")
        return found + marker if files else []

    def _begin(self) -> list[int]:
        """Special tokens that the tokenizer puts before a text."""
        plain = self._ids_of("x")
        full = list(self._tokenizer("x")["input_ids"])
        return full[: full.index(plain[0])] if plain and plain[0] in full else []

    def _encode(self, name: str, given: str, *, joins: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            joins: leave out the space that tokenizers of SentencePiece put before a text.
        """
        if not given:
            return []
        text(name, given)
        pieces = []
        begin = 0
        for match in self._spelling.finditer(given):  # a spelling in two pieces is no marker
            pieces.append(given[begin : match.start() + 1])
            begin = match.start() + 1
        pieces.append(given[begin:])
        first = self._joined(pieces[0]) if joins else self._ids_of(pieces[0])
        return first + [token_id for piece in pieces[1:] for token_id in self._joined(piece)]

    def _joined(self, piece: str) -> list[int]:
        ids = self._ids_of(piece)
        anchor = self._ids_of(ANCHOR)
        if not ids or not str(self._tokenizer.convert_ids_to_tokens(anchor[0])).startswith("▁"):
            return ids
        anchored = self._ids_of(ANCHOR + piece)
        return anchored[len(anchor) :] if anchored[: len(anchor)] == anchor else ids

    def _ids_of(self, piece: str) -> list[int]:
        def encode(part: str) -> list[int]:
            return list(self._tokenizer(part, add_special_tokens=False)["input_ids"])

        return self._pieces.encode(piece, encode, encode, None)


def infill_of(tokenizer: Any) -> Infill | None:
    """FIM prompts of a tokenizer; None if it has no markers of `MARKERS`."""
    if tokenizer is None or not hasattr(tokenizer, "convert_tokens_to_ids"):
        return None
    for markers in MARKERS.values():
        needed = (markers.prefix, markers.suffix, markers.middle, markers.file)
        if all(_token_id(tokenizer, name) is not None for name in needed if name is not None):
            return Infill(tokenizer, markers)
    return None


def _token_id(tokenizer: Any, name: str) -> int | None:
    """Id of a token by its spelling; None if the vocabulary lacks it."""
    found = tokenizer.convert_tokens_to_ids(name)
    return found if isinstance(found, int) and tokenizer.convert_ids_to_tokens(found) == name else None
