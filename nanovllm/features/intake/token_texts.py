"""Texts of single tokens, for tokenizers in which no token changes the text of another that holds whole characters."""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from nanovllm.requests import IncrementalDetokenizer, plain_detokenizer


class TokenTexts(dict[int, str]):
    """Text of each token of whole characters, "" of any other token; decoded once a token.

    A byte-level decoder joins the bytes of its tokens, and whole characters are the same after any other bytes. At most
    one text for each token of the vocabulary.
    """

    def __init__(self, backend: Any, *, skip_special_tokens: bool) -> None:
        super().__init__()
        self._decode = partial(backend.decode, skip_special_tokens=skip_special_tokens)

    def __missing__(self, token_id: int) -> str:
        text: str = self._decode([token_id])
        found = self[token_id] = "" if "\ufffd" in text else text
        return found


# By tokenizer: its backend, and texts with and without special tokens.
_known: WeakKeyDictionary[Any, tuple[Any, tuple[TokenTexts, TokenTexts] | None]] = WeakKeyDictionary()


def token_texts(tokenizer: Any, backend: Any, *, skip_special_tokens: bool) -> TokenTexts | None:
    """Texts that all requests of a tokenizer share; None if its decoder is of another kind.

    Args:
        backend: the tokenizer's backend, from `plain_backend`.
    """
    found = _known.get(tokenizer)
    if found is None or found[0] is not backend:
        from tokenizers.decoders import ByteLevel

        texts = None
        if type(backend.decoder) is ByteLevel:
            texts = (TokenTexts(backend, skip_special_tokens=False), TokenTexts(backend, skip_special_tokens=True))
        found = _known[tokenizer] = (backend, texts)
    return None if found[1] is None else found[1][skip_special_tokens]


def plain_backend(tokenizer: Any) -> Any:
    """The `tokenizers.Tokenizer` that does all decoding; None if a subclass or an instance overrides `decode`.

    For few tokens transformers' `decode` spends most of its time on checks of its argument.
    """
    # Imported with the tokenizer, not at module import: a front process starts its replicas first.
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    own = type(tokenizer)
    is_plain = (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and own.decode is PreTrainedTokenizerBase.decode
        and own._decode is PreTrainedTokenizerFast._decode
        and not {"decode", "_decode"} & vars(tokenizer).keys()
    )
    return tokenizer.backend_tokenizer if is_plain else None


def detokenizer_of(tokenizer: Any, *, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
    """A detokenizer with the fastest decoding that gives the tokenizer's own texts."""
    if (backend := plain_backend(tokenizer)) is None:
        return plain_detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    texts = token_texts(tokenizer, backend, skip_special_tokens=skip_special_tokens)
    return IncrementalDetokenizer(partial(backend.decode, skip_special_tokens=skip_special_tokens), texts)
