"""A tokenizer as llguidance reads it, in which text becomes no marker."""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection
from typing import Any

# Sets of tokens, each those that its expression matches and none before it does. Where a grammar allows all texts of an
# expression, its tokens are allowed at once, and the others are tried one by one: long tokens and those with quotes and
# line breaks took most of the time of free text. The first three and the fifth are llguidance's own.
SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(rf'[^"\\\x00-\x1F\x7F]{times}' for times in ("{1,10}", "{1,30}", "{1,128}", "+")),
    r"(?s:.){1,30}",
    r"(?s:.){1,128}",
]


def open_vocabulary(text: str, num_tokens: int, eos_token_ids: Collection[int]) -> Any:
    """llguidance's `LLTokenizer` of what `vocabulary_text` returns.

    Args:
        num_tokens: ids of the vocabulary; those that the tokenizer lacks are never allowed.
    """
    from llguidance import LLTokenizer

    return LLTokenizer(text, n_vocab=num_tokens, eos_token=list(eos_token_ids), slices=SLICES)


def vocabulary_text(tokenizer: Any, eos_token_ids: Collection[int]) -> str:
    """A tokenizer of the `tokenizers` library, as JSON for llguidance.

    llguidance has the tokenizer split the text that a grammar forces, and a tokenizer finds its markers there: of the
    text `</s>` it makes one token, which stands for no text. Here no text holds a marker; other added tokens keep
    their text, except those that decode to another text: they are markers here.

    Args:
        eos_token_ids: markers too, if they are added tokens.
    """
    # A "normalized" added token is looked for as the normalizer leaves it: a marker behind a word that no form holds.
    # The pattern is made while the tokenizer is read; then llguidance takes out each Prepend, and text gets no word.
    head, separator, model = tokenizer.backend_tokenizer.to_str().partition(',"model":')  # megabytes, left as they are
    found = json.loads(head + "}")
    found["normalizer"] = {
        "type": "Sequence",
        "normalizers": [*filter(None, [found["normalizer"]]), {"type": "Prepend", "prepend": uuid.uuid4().hex}],
    }
    for token in found["added_tokens"]:
        token["special"] |= token["id"] in eos_token_ids or not _is_text(token, tokenizer)
        token["normalized"] = is_marker(token["content"], token["special"])
        token["lstrip"] = token["rstrip"] = False  # white space beside it is text
    found["truncation"] = found["padding"] = None
    return f"{json.dumps(found)[:-1]}{separator}{model}"


def _is_text(token: dict[str, Any], tokenizer: Any) -> bool:
    """Whether an added token's text stands behind other text as it is: a decoder may put a space between."""
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    before, content = tokenizer.encode("a", add_special_tokens=False), token["content"]
    decoded = tokenizer.decode([*before, token["id"]], **options)
    beginning = tokenizer.decode(before, **options)
    return decoded in (beginning + content, beginning + content.replace("▁", " "))  # SentencePiece's space


def is_marker(content: str, special: bool) -> bool:
    """Whether an added token stands for no text to llguidance."""
    return special or (content.startswith("<") and content.endswith(">"))


def makes_markers(vocabulary: Any, tokenizer: Any) -> bool:
    """Whether text becomes a marker all the same: by the tokenizer's model, if it has markers among its own pieces."""
    return any(
        vocabulary.is_special_token(token_id)
        for added in tokenizer.added_tokens_decoder.values()
        for token_id in vocabulary.tokenize_str(added.content)
    )
