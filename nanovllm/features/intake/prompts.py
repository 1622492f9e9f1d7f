"""Prompts with ends of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

PROMPT_FORMS = ("prompt", "prompt_token_ids")  # keys of a prompt that is a dictionary


class ChatPrompt(list[int]):
    """Token ids of a conversation.

    Args:
        end_token_ids: tokens that end its answer, further to the model's end-of-sequence tokens.
        media: `Media`, its pictures.
    """

    def __init__(self, token_ids: Iterable[int], end_token_ids: tuple[int, ...] = (), media: Any = None) -> None:
        super().__init__(token_ids)
        self.end_token_ids = end_token_ids
        self.media = media


def like(prompt: list[int], token_ids: list[int]) -> list[int]:
    """Token ids that go on, or end, where a prompt does, with its ends and its pictures."""
    if not isinstance(prompt, ChatPrompt):
        return token_ids
    media = None if prompt.media is None else prompt.media.cut(len(token_ids))
    return ChatPrompt(token_ids, prompt.end_token_ids, media)


def plain_prompt(given: Mapping[str, Any]) -> Any:
    """Text or token ids of {"prompt": ...} or {"prompt_token_ids": ...}; raises TypeError for anything else."""
    values = {name: value for name, value in given.items() if value is not None}
    for name in values:
        if name not in PROMPT_FORMS:
            raise TypeError(
                f"a prompt has the key {name!r}; it is a string, a list of token ids, or a dictionary with one of them "
                f"as {' or '.join(PROMPT_FORMS)}. Give options of a request by their keywords."
            )
    if not values:
        raise TypeError(f"a prompt is a dictionary without {' or '.join(PROMPT_FORMS)}; give one of them.")
    return values.get("prompt_token_ids", values.get("prompt"))
