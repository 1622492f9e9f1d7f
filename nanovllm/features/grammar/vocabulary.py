"""Converts a tokenizer for llguidance, without markers (tokens that stand for no text) in tokenised text."""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection
from typing import Any

# Disjoint token sets: a token belongs to the first expression that matches it. Where a grammar allows all texts of an
# expression, its set is allowed at once; other tokens are tested one by one. Long tokens and tokens with quotes or line
# breaks took most of the time in free text. The first three and the fifth are llguidance's defaults.
SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(rf'[^"\\\x00-\x1F\x7F]{times}' for times in ("{1,10}", "{1,30}", "{1,128}", "+")),
    r"(?s:.){1,30}",
    r"(?s:.){1,128}",
]


def open_vocabulary(text: str, num_tokens: int, eos_token_ids: Collection[int]) -> Any:
    """llguidance's `LLTokenizer` from the text of `vocabulary_text`.

    Args:
        num_tokens: size of the vocabulary; ids without a token are never allowed.
    """
    from llguidance import LLTokenizer

    return LLTokenizer(text, n_vocab=num_tokens, eos_token=list(eos_token_ids), slices=SLICES)


def vocabulary_text(tokenizer: Any, eos_token_ids: Collection[int]) -> str:
    """A tokenizer of the `tokenizers` library, as JSON for llguidance.

    llguidance tokenises text that a grammar forces, and the tokenizer would turn `</s>` there into a marker: one token
    that stands for no text. This prevents that. Other added tokens keep their text, unless they decode to another
    text: those become markers.

    Args:
        eos_token_ids: markers too, if they are added tokens.
    """
    # A "normalized" added token matches its normalised text: here a random word that no form contains, then the marker.
    # Patterns are made while the tokenizer is read; llguidance then removes each Prepend, so text gets no such word.
    head, separator, model = tokenizer.backend_tokenizer.to_str().partition(',"model":')  # megabytes, not parsed
    found = json.loads(head + "}")
    found["normalizer"] = {
        "type": "Sequence",
        "normalizers": [*filter(None, [found["normalizer"]]), {"type": "Prepend", "prepend": uuid.uuid4().hex}],
    }
    for token in found["added_tokens"]:
        token["special"] |= token["id"] in eos_token_ids or not _is_text(token, tokenizer)
        token["normalized"] = is_marker(token["content"], token["special"])
        token["lstrip"] = token["rstrip"] = False  # adjacent white space is text
    found["truncation"] = found["padding"] = None
    return f"{json.dumps(found)[:-1]}{separator}{model}"


def _is_text(token: dict[str, Any], tokenizer: Any) -> bool:
    """Whether an added token decodes to its text after other text: a decoder may insert a space."""
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    before = tokenizer.encode("a", add_special_tokens=False)
    content = token["content"]
    decoded = tokenizer.decode([*before, token["id"]], **options)
    beginning = tokenizer.decode(before, **options)
    return decoded in (beginning + content, beginning + content.replace("▁", " "))  # SentencePiece's space


def is_marker(content: str, special: bool) -> bool:
    """Whether llguidance treats an added token as a marker."""
    return special or (content.startswith("<") and content.endswith(">"))


def makes_markers(vocabulary: Any, tokenizer: Any) -> bool:
    """Whether text still becomes a marker: the tokenizer's model may have markers in its own vocabulary."""
    return any(
        vocabulary.is_special_token(token_id)
        for added in tokenizer.added_tokens_decoder.values()
        for token_id in vocabulary.tokenize_str(added.content)
    )
