"""Builds the tokenizer of a GGUF file from its vocabulary, merges or scores, and the name of its pre-tokenizer."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from nanovllm.errors import ModelLoadError, UnsupportedModelError
from nanovllm.models.gguf.config import TOKEN_IDS
from nanovllm.models.gguf.file import GGUFFile

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # token types; a missing type means NORMAL
_SPACE = "▁"  # SentencePiece's symbol for a space

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{{L}}\p{{N}}]?{0}*{1}+{2}|[^\r\n\p{{L}}\p{{N}}]?{0}+{1}*{2}"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = _CASED.format(_UPPER, _LOWER, "") + r"|\p{N}" + _REST
_GPT4O = _CASED.format(_UPPER, _LOWER, _CONTRACTIONS + "?") + r"|\p{N}{1,3}" + _REST
# Patterns by the name of a pre-tokenizer (tokenizer.ggml.pre): "" splits words as GPT-2, "digits" splits single digits
# first.
_SPLITS = {
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "jais", "trillion"), ""),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b"), "digits"),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": _TEKKEN,
}
_BEGINS = frozenset({"llama3", "llama-v3", "llama-bpe"})  # texts begin with BOS unless the file says otherwise
_WHOLE_WORDS = _BEGINS | {"tekken"}  # words of the vocabulary skip merges
_COMPOSED = frozenset({"qwen2", "deepseek-r1-qwen"})  # text is normalised to Unicode NFC first


def build_tokenizer(file: GGUFFile) -> Any:
    """The tokenizer, with its special tokens and chat templates.

    Raises ModelLoadError if the file has none, UnsupportedModelError for an unknown kind or pre-tokenizer.
    """
    from transformers import PreTrainedTokenizerFast

    if not file.has_tokenizer:
        raise ModelLoadError(f"{file.path} has no tokenizer (tokenizer.ggml.tokens); pass tokenizer=...")
    metadata = file.metadata
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise _unknown(file, "tokenizer.ggml.model", kind, ("gpt2", "llama"))
    if kind == "llama" and metadata.get("tokenizer.ggml.remove_extra_whitespaces", False):
        raise _unknown(file, "tokenizer.ggml.remove_extra_whitespaces", True, ("false",))
    tokenizer = _byte_level(file) if kind == "gpt2" else _sentencepiece(file)
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    of_kind = {
        number: [
            AddedToken(token, normalized=False) for token, each in zip(tokens, kinds, strict=True) if each == number
        ]
        for number in (_CONTROL, _USER_DEFINED)
    }
    tokenizer.add_special_tokens(of_kind[_CONTROL])
    tokenizer.add_tokens(of_kind[_USER_DEFINED])
    ids = {role: metadata.get(f"tokenizer.ggml.{key}") for role, key in TOKEN_IDS.items()}
    roles = {f"{role}_token": tokens[token] for role, token in ids.items() if token is not None}
    begins = kind == "llama" or metadata.get("tokenizer.ggml.pre") in _BEGINS
    adds = {"add_bos_token": begins, "add_eos_token": False}
    adds = {name: metadata.get(f"tokenizer.ggml.{name}", default) for name, default in adds.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=file.of_architecture("context_length"),
        chat_template=_chat_template(file),
        clean_up_tokenization_spaces=False,
        **roles,
        **({name: True for name, value in adds.items() if value}),
    )


def _unknown(file: GGUFFile, key: str, value: Any, known: Any) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{file.path}: {key} is {value!r}, which is not read; known are {', '.join(known)}. "
        "Pass tokenizer=... with the folder or hub id of the model's own."
    )


def _chat_template(file: GGUFFile) -> str | dict[str, str] | None:
    """The chat template, or several by name."""
    prefix = "tokenizer.chat_template."
    default = file.metadata.get("tokenizer.chat_template")
    named = {key.removeprefix(prefix): text for key, text in file.metadata.items() if key.startswith(prefix)}
    return {"default": default, **named} if named and default is not None else default


def _byte_level(file: GGUFFile) -> Tokenizer:
    name = file.metadata.get("tokenizer.ggml.pre")
    if name not in _SPLITS:
        raise _unknown(file, "tokenizer.ggml.pre", name, _SPLITS)
    vocab = {token: index for index, token in enumerate(file.metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in file.metadata.get("tokenizer.ggml.merges", ())]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=name in _WHOLE_WORDS))
    split = _SPLITS[name]
    if split in ("", "digits"):
        words = pre_tokenizers.ByteLevel(add_prefix_space=False)
        before: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split else []
    else:
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        before = [pre_tokenizers.Split(Regex(split), behavior="isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, words])
    if name in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GGUFFile) -> Tokenizer:
    metadata = file.metadata
    is_gemma = file.architecture.startswith("gemma")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    if is_gemma:  # runs of spaces are stored as such
        tokens = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    vocab = {token: index for index, token in enumerate(tokens)}
    if "tokenizer.ggml.merges" in metadata:
        merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    else:
        merges = _merges_of(file, vocab, by_position=is_gemma)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", not is_gemma)
    before = [normalizers.Prepend(_SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", _SPACE)])
    after = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    return tokenizer


def _merges_of(file: GGUFFile, vocab: dict[str, int], *, by_position: bool) -> list[tuple[str, str]]:
    """Merges implied by SentencePiece's scores: all pairs of tokens that form a token, the best result first.

    Args:
        by_position: rank results by token id instead of score: Gemma's merges follow its ids.
    """
    scores = file.metadata.get("tokenizer.ggml.scores")
    if scores is None and not by_position:
        raise ModelLoadError(f"{file.path} has neither merges nor scores of its tokens; pass tokenizer=...")
    merged = {_NORMAL, _USER_DEFINED} if by_position else {_NORMAL}
    kinds = file.metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(vocab))
    ranks = range(len(vocab)) if by_position else [-score for score in scores or ()]
    pairs = []
    for token, index in vocab.items():
        if kinds[index] not in merged:
            continue
        rank = ranks[index]
        for at in range(1, len(token)):
            left = vocab.get(token[:at])
            right = vocab.get(token[at:])
            if left is not None and right is not None:
                pairs.append((rank, index, left, right, at, token))
    pairs.sort()
    return [(token[:at], token[at:]) for *_, at, token in pairs]
