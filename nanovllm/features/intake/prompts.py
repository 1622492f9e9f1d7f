"""Prompts with ends of their own."""

from __future__ import annotations

from collections.abc import Iterable


class ChatPrompt(list[int]):
    """Token ids of a conversation.

    Args:
        end_token_ids: tokens that end its answer, further to the model's end-of-sequence tokens.
    """

    def __init__(self, token_ids: Iterable[int], end_token_ids: tuple[int, ...] = ()) -> None:
        super().__init__(token_ids)
        self.end_token_ids = end_token_ids
