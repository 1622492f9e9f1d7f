"""Applies chat templates such that only the template can write control tokens, such as <|im_start|>.

::

    message     'x<|im_end|>'                       must not end its turn
    rendered    <|im_start|>user\\nxM<M|Mi...<|im_end|>      M: a marker before each character of the spelling
    encoded     A0'user\\nx<|im_end|>'A1            A: an added token that stands for a control token

A copy of the tokenizer treats control tokens as text, and has aliases for the template's own. One pass encodes the
whole text, so spaces absorbed by tokens and prefixes added by tokenizers stay the same.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Tokenizer

from nanovllm.features.intake.pieces import Pieces

# Digits, since templates trim, change case and escape non-ASCII text; random, so that no message can contain them.
MARKER_DIGITS = 20


class ChatEncoder:
    """Encodes conversations; texts that spell a control token become plain text.

    Control tokens are the tokenizer's special tokens. Other added tokens, such as Qwen's <tool_call> and <think>, are
    text that models write: an earlier answer keeps them, and roles do not depend on them. A spelling that a template
    joins from several texts is not detected.

    Without such a spelling the ids equal `apply_chat_template`'s, as they always do for tokenizers other than
    transformers' two common classes.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._pieces = Pieces(tokenizer)

    def prepare(self) -> None:
        """Make the copy of the tokenizer: 0.3 s for a vocabulary of 49,152."""
        if self._control:
            _ = self._plain

    def encode(self, conversation: Any, tools: Any, options: Mapping[str, Any], limit: int | None = None) -> list[int]:
        """Token ids of one conversation; raises ValueError if the tokenizer has no plain text for a control token.

        Args:
            limit: Most tokens, as `Pieces.encode` takes it.
        """
        marker = "".join(secrets.choice("0123456789") for _ in range(MARKER_DIGITS))
        found: list[str] = []

        def mark(match: re.Match[str]) -> str:
            found.append(match[0])
            return "".join(marker + character for character in match[0])

        given = [list(conversation), tools, {name: value for name, value in options.items() if name != "chat_template"}]
        if self._control:
            marked = _each_text(given, lambda text: self._spelling.sub(mark, text))
            if found or self._matches_normalized:
                rendered = self._tokenizer.apply_chat_template(
                    marked[0], tools=marked[1], tokenize=False, **(dict(options) | marked[2])
                )
                return self._encode_rendered(rendered, marker, limit)
        return self.rendered_ids(given[0], tools, options, limit)

    def rendered_ids(self, conversation: Any, tools: Any, options: Mapping[str, Any], limit: int | None) -> list[int]:
        """Token ids by the tokenizer's own `apply_chat_template`, in pieces."""
        if not getattr(self._tokenizer, "is_fast", False) or "tokenize" in options:
            return list(self._tokenizer.apply_chat_template(conversation, tools=tools, return_dict=False, **options))

        def encode(piece: str) -> list[int]:
            return list(self._tokenizer(piece, add_special_tokens=False)["input_ids"])

        rendered = self._tokenizer.apply_chat_template(conversation, tools=tools, tokenize=False, **options)
        return self._pieces.encode(rendered, encode, encode, limit)

    def _encode_rendered(self, rendered: str, marker: str, limit: int | None = None) -> list[int]:
        written = re.compile(f"(?<!{marker})(?:{self._spelling.pattern})")  # control tokens of the template
        if self._plain is None:
            ids: list[int] = []
            begin = 0
            for match in written.finditer(rendered):
                ids += self._text_ids(rendered[begin : match.start()].replace(marker, ""))
                ids.append(self._control[match[0]])
                begin = match.end()
            return ids + self._text_ids(rendered[begin:].replace(marker, ""))
        plain, aliases, control_ids = self._plain
        text = written.sub(lambda match: aliases[match[0]], rendered).replace(marker, "")

        def encode(piece: str) -> list[int]:
            return list(plain.encode(piece, add_special_tokens=False).ids)

        ids = self._plain_pieces.encode(text, encode, encode, limit)
        self._check_plain(ids)
        return [control_ids.get(token_id, token_id) for token_id in ids]

    def _text_ids(self, text: str) -> list[int]:
        """Token ids of text by a Python tokenizer, which has no copy with aliases."""
        if not text:
            return []
        ids = list(self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])
        self._check_plain(ids)
        return ids

    def _check_plain(self, ids: list[int]) -> None:
        present = set(ids)
        for spelling, token_id in self._control.items():
            if token_id in present:
                raise ValueError(
                    f"the tokenizer makes its control token {spelling!r} of a message's plain text. Leave it out of "
                    "the messages, or set allow_control_tokens_in_messages."
                )

    # ----------------------------------------------------------------------------------------------- the tokenizer's

    @cached_property
    def _plain_pieces(self) -> Pieces:
        return Pieces(None if self._plain is None else self._plain[0])

    @cached_property
    def _added(self) -> list[AddedToken]:
        """The control tokens."""
        # Costs nothing: the tokenizer imported it.
        from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

        if not isinstance(self._tokenizer, (PreTrainedTokenizer, PreTrainedTokenizerFast)):
            return []
        named = set(self._tokenizer.all_special_tokens)  # Python tokenizers do not mark all of them as special
        added = [t for t in self._tokenizer.added_tokens_decoder.values() if t.special or t.content in named]
        named -= {token.content for token in added}
        return [token for token in (*added, *(AddedToken(text, normalized=False) for text in named)) if token.content]

    @cached_property
    def _control(self) -> dict[str, int]:
        """Ids of control tokens by spelling."""
        return {token.content: self._tokenizer.convert_tokens_to_ids(token.content) for token in self._added}

    @cached_property
    def _spelling(self) -> re.Pattern[str]:
        return re.compile("|".join(re.escape(text) for text in sorted(self._control, key=len, reverse=True)))

    @cached_property
    def _matches_normalized(self) -> bool:
        """Whether control tokens match normalised text, such as other cases, which only the copy reads as text."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return backend is not None and backend.normalizer is not None and any(token.normalized for token in self._added)

    @cached_property
    def _plain(self) -> tuple[Tokenizer, dict[str, str], dict[int, int]] | None:
        """(copy with control tokens as text, alias by spelling, control token id by alias id).

        A copy, since other threads use the tokenizer.
        """
        from transformers import PreTrainedTokenizerFast

        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            return None
        copy = Tokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
        copy.no_truncation()
        copy.no_padding()
        copy.encode_special_tokens = True
        secret = secrets.token_hex(16)
        aliases = {token.content: f"\ue000{secret}{number}\ue000" for number, token in enumerate(self._added)}
        flags = ("single_word", "lstrip", "rstrip", "normalized")  # decide how a token matches its surroundings
        copy.add_tokens(
            [
                AddedToken(aliases[token.content], special=False, **{name: getattr(token, name) for name in flags})
                for token in self._added
            ]
        )
        ids = {text: copy.token_to_id(alias) for text, alias in aliases.items()}
        control_ids = {alias_id: self._control[text] for text, alias_id in ids.items() if alias_id is not None}
        return copy, aliases, control_ids


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of nested lists and mappings with `change` applied to all strings, including keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_each_text(key, change): _each_text(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_each_text(item, change) for item in value]
    return value
