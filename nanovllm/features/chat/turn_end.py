"""Finds the token with which a chat template ends an answer, by rendering conversations that end with one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from nanovllm.features.chat.plain_messages import THOUGHT, PlainMessage
from nanovllm.features.chat.template_trials import (
    CALL_ID,
    MARK,
    NAME,
    OTHER_ID,
    OTHER_NAME,
    OTHER_VALUE,
    VALUE,
    new_call,
)

logger = logging.getLogger("nanovllm")

_QUESTION: PlainMessage = {"role": "user", "content": "a question"}
_ANSWER: PlainMessage = {"role": "assistant", "content": MARK}
_THOUGHT: PlainMessage = dict.fromkeys(THOUGHT, "qthoughtq")
_CALL = new_call(NAME, {"key": VALUE}, CALL_ID)
_OTHER = new_call(OTHER_NAME, {"key": OTHER_VALUE}, OTHER_ID)
# Answers of several parts: none of the tokens between the parts ends the turn.
_WITH_PARTS = (
    _ANSWER | _THOUGHT,
    _ANSWER | {"tool_calls": [_CALL]},
    _ANSWER | {"tool_calls": [_CALL, _OTHER]},
    _ANSWER | _THOUGHT | {"tool_calls": [_CALL, _OTHER]},
)


def turn_end(added: Mapping[str, int], render: Callable[[list[PlainMessage], bool], str]) -> tuple[int, ...]:
    """Id of the added token after the last answer's text; empty if there is none, or it stands within answers too.

    Args:
        added: ids of the tokenizer's added tokens, by spelling.
        render: text of a conversation, with or without the generation prompt; raises if the template refuses it.
    """
    try:
        opening = render([_QUESTION], True)
        ended = render([_QUESTION, _ANSWER], False)
    except Exception:  # templates raise errors of any kind
        return ()
    behind = ended.rpartition(MARK)[2].lstrip()
    spelling = max((text for text in added if text and behind.startswith(text)), key=len, default=None)
    if MARK not in ended or spelling is None:
        return ()
    for answer in _WITH_PARTS:
        with suppress(Exception):  # the template lacks such parts
            if spelling in _inner(opening, render([_QUESTION, answer], False)):
                return ()
    return (added[spelling],)


def _inner(opening: str, rendered: str) -> str:
    """The text of an answer from its beginning to the last of its parts."""
    parts = (MARK, VALUE, OTHER_VALUE, *_THOUGHT.values())
    pairs = enumerate(zip(opening, rendered, strict=False))
    begin = next((place for place, (one, other) in pairs if one != other), min(len(opening), len(rendered)))
    return rendered[begin : max(rendered.rfind(part) for part in parts)]


def added_ids(tokenizer: Any) -> dict[str, int]:
    """Ids of a tokenizer's added tokens, special or not, by spelling."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    return {token.content: token_id for token_id, token in added.items()}


def log_ends(tokenizer: Any, eos_token_ids: Sequence[int], of_chats: Sequence[int]) -> None:
    """Log the tokens that end answers, and the further ones that end answers of chats."""
    spell = getattr(tokenizer, "convert_ids_to_tokens", lambda token_id: "")
    for kind, ids in (("answers", eos_token_ids), ("answers of chats", of_chats)):
        if ids:
            logger.info("%s end at tokens %s", kind, ", ".join(f"{each} {spell(each)}".strip() for each in ids))
