"""Turns conversations into token ids: checks them and applies the tokenizer's chat template."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from nanovllm.core.validation import texts
from nanovllm.requests.control_tokens import ChatEncoder

Message = Mapping[str, Any]


def with_chat_template(tokenizer: Any, file: str) -> Any:
    """A copy of a tokenizer with the chat template of a file; raises ValueError without a tokenizer."""
    if tokenizer is None:
        raise ValueError(f"chat_template is {file!r}, and there is no tokenizer to use it; pass tokenizer=...")
    changed = copy.copy(tokenizer)
    changed.chat_template = Path(file).expanduser().read_text(encoding="utf-8")
    return changed


class ChatTemplate:
    """A tokenizer's chat template; stateless, hence thread-safe.

    Args:
        tokenizer: if None or without a template, every call raises ValueError.
        allow_control_tokens: see `EngineConfig.allow_control_tokens_in_messages`.
    """

    def __init__(self, tokenizer: Any, *, allow_control_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._encoder = ChatEncoder(tokenizer)
        self._allows_control_tokens = allow_control_tokens

    def prepare(self) -> None:
        """Prepare the encoder ahead of the first message that spells a control token."""
        if getattr(self._tokenizer, "chat_template", None) and not self._allows_control_tokens:
            self._encoder.prepare()

    def apply(self, messages: SequenceABC[Message] | SequenceABC[SequenceABC[Message]]) -> list[list[int]]:
        """Token ids of one conversation or several, with the generation prompt; always a list of prompts."""
        if not isinstance(messages, SequenceABC) or isinstance(messages, str) or not messages:
            raise ValueError(f"messages must be a conversation or a list of them, not {messages!r}.")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        for conversation in conversations:
            _check_conversation(conversation)
        return [self.apply_to(conversation) for conversation in conversations]

    def apply_to(
        self, conversation: Any, *, tools: list[dict[str, Any]] | None = None, **template_options: Any
    ) -> list[int]:
        """Token ids of one conversation.

        Args:
            tools: function definitions for the template, in OpenAI's format.
            template_options: options of the template, such as `enable_thinking`; add_generation_prompt is True by
                default.
        """
        template = template_options.get("chat_template") or getattr(self._tokenizer, "chat_template", None)
        if self._tokenizer is None or not template:
            raise ValueError("chat needs a tokenizer with a chat template; use generate, or pass another tokenizer.")
        _check_conversation(conversation)
        texts("messages", list(conversation))
        texts("tools", tools)
        texts("template_options", template_options)
        template_options = {"add_generation_prompt": True} | template_options
        try:
            if not self._allows_control_tokens:
                return self._encoder.encode(conversation, tools, template_options)
            return list(
                self._tokenizer.apply_chat_template(
                    list(conversation), tools=tools, return_dict=False, **template_options
                )
            )
        except TemplateError as error:  # for example, a template may require an order of roles
            raise ValueError(f"the tokenizer's chat template refuses this conversation: {error}") from error


def _check_conversation(conversation: Any) -> None:
    is_list = isinstance(conversation, SequenceABC) and not isinstance(conversation, str)
    if not is_list or not conversation or not all(map(_is_message, conversation)):
        raise ValueError(f"a conversation is a list of {{'role': ..., 'content': ...}}, not {conversation!r}.")


def _is_message(item: Any) -> bool:
    return isinstance(item, Mapping) and "role" in item and "content" in item
