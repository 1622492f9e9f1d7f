"""Turns conversations into token ids: shapes their messages for the chat template and applies it."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Sequence as SequenceABC
from pathlib import Path
from typing import Any

from nanovllm.features.chat.control_tokens import ChatEncoder
from nanovllm.features.chat.plain_messages import PlainMessage, pictures_taken, plain_messages
from nanovllm.features.chat.template_folds import Conversation, Tools
from nanovllm.features.chat.template_losses import complete_form, probes_of
from nanovllm.features.chat.template_messages import TemplateMessages
from nanovllm.features.chat.template_trials import TemplateTrials
from nanovllm.features.chat.turn_end import added_ids, turn_end
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.intake.prompts import ChatPrompt
from nanovllm.features.option_checks import texts

logger = logging.getLogger("nanovllm")

Message = Mapping[str, Any]

# Arguments of `apply_chat_template` that are not variables of the template.
NOT_FOR_TEMPLATES = {
    "self", "conversation", "conversations", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs", "sanitize_control_tokens",
    "answer_params",
}  # fmt: skip
LOSSY = "the chat template leaves text out of some conversations in every form, such as that of messages[%d] (role %r)"
MAX_TEMPLATES = 16  # findings about templates that are kept, since a caller may bring one with each conversation


def with_chat_template(tokenizer: Any, file: str) -> Any:
    """A copy of a tokenizer with the chat template of a file; raises ValueError without a tokenizer."""
    if tokenizer is None:
        raise ValueError(f"chat_template is {file!r}, and there is no tokenizer to use it; pass tokenizer=...")
    changed = copy.copy(tokenizer)
    changed.chat_template = Path(file).expanduser().read_text(encoding="utf-8")
    return changed


class ChatTemplate:
    """A tokenizer's chat template; thread-safe.

    Args:
        tokenizer: tokenizer with a template; with None, or without a template, every call raises ValueError.
        config: configuration with allow_control_tokens_in_messages and chat_template_content_format.
        eos_token_ids: tokens that end every answer.
        num_logits: number of tokens that can be sampled; None for any.
    """

    def __init__(
        self,
        tokenizer: Any,
        config: EngineConfig,
        eos_token_ids: Collection[int] = (),
        num_logits: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.pictures: Any = None  # `PictureReader`
        self._encoder = ChatEncoder(tokenizer)
        self._allows_control_tokens = config.allow_control_tokens_in_messages
        self._content_format = config.chat_template_content_format
        self._eos_token_ids = eos_token_ids
        self._num_logits = num_logits
        self._shapers: dict[str, TemplateMessages] = {}  # template's source -> shaper
        self._ends: dict[str, tuple[int, ...]] = {}  # likewise
        self._lossy: set[str] = set()  # sources of templates that the log names as such

    def prepare(self) -> None:
        """Prepare the encoder ahead of the first message that spells a control token."""
        if getattr(self._tokenizer, "chat_template", None) and not self._allows_control_tokens:
            self._encoder.prepare()

    def apply(self, messages: Any, **options: Any) -> list[list[int]]:
        """Token ids of one conversation or several; always a list of prompts.

        Args:
            messages: a conversation, or a list or iterator of them.
            options: Template options, as `apply_to` takes them.
        """
        if isinstance(messages, Iterator):
            messages = list(messages)
        if not isinstance(messages, SequenceABC) or isinstance(messages, str) or not messages:
            raise ValueError(f"messages must be a conversation or a list of them, not {messages!r}.")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        for conversation in conversations:
            _check_conversation(conversation)
        return [self.apply_to(conversation, **options) for conversation in conversations]

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens with which the tokenizer's template ends an answer, without eos_token_ids."""
        has_template = self._tokenizer is not None and getattr(self._tokenizer, "chat_template", None)
        return self._ends_of(self._source(None, None)) if has_template else ()

    def apply_to(
        self, conversation: Any, limit: int | None = None, /, *, tools: Tools = None, **template_options: Any
    ) -> ChatPrompt:
        """Token ids of one conversation, with the generation prompt by default.

        Args:
            limit: number of tokens at which it is too long; None for any number.
            tools: function definitions for the template, in OpenAI's format.
            template_options: options of the template, such as `enable_thinking`, add_generation_prompt,
                continue_final_message, and chat_template, which replaces the tokenizer's.
        """
        _check_conversation(conversation)
        source = self._source(template_options.get("chat_template"), tools)
        texts("messages", list(conversation))
        texts("tools", tools)
        texts("template_options", template_options)
        options = {"add_generation_prompt": True} | template_options
        if options.get("chat_template") is None:
            options.pop("chat_template", None)
        shaper = self._shaper(source)
        plain = plain_messages(conversation)
        shaped = shaper.shaped(plain, tools or None)

        def render(messages: list[PlainMessage], tools: Tools) -> str:
            return self._render(pictures_taken(shaper.finished(messages))[0], tools, options)

        form, lost = complete_form(render, shaped, probes_of(plain))
        if form is None:
            raise ValueError(_named(render, shaped))
        if lost is not None and source not in self._lossy:
            self._lossy.add(source)
            logger.warning(LOSSY, lost, plain[lost]["role"])
        finished, pictures = pictures_taken(shaper.finished(form[0]))
        token_ids = self._encode(finished, form[1], options, limit)
        return self._prompt(token_ids, self._ends_of(source), pictures)

    # ------------------------------------------------------------------------------------------------------- parts

    def _prompt(self, token_ids: list[int], ends: tuple[int, ...], pictures: list[Any]) -> ChatPrompt:
        if not pictures:
            return ChatPrompt(token_ids, ends)
        if self.pictures is None:
            raise ValueError("the conversation has a picture, and this engine reads text alone.")
        prompt: ChatPrompt = self.pictures.prompt(token_ids, pictures, ends)
        return prompt

    def _source(self, given: str | None, tools: Tools) -> str:
        """Source of the template for a conversation; raises ValueError without one."""
        if self._tokenizer is None or not (given or getattr(self._tokenizer, "chat_template", None)):
            raise ValueError("chat needs a tokenizer with a chat template; use generate, or pass another tokenizer.")
        if hasattr(self._tokenizer, "get_chat_template"):
            return str(self._tokenizer.get_chat_template(given, tools))  # the template for tools, if there are several
        return str(given or self._tokenizer.chat_template)

    def _shaper(self, source: str) -> TemplateMessages:
        if source not in self._shapers:
            options = {"add_generation_prompt": True, "chat_template": source}
            trials = TemplateTrials(source, lambda messages: self._render(messages, None, options))
            if len(self._shapers) >= MAX_TEMPLATES:
                self._shapers.clear()
                self._ends.clear()
                self._lossy.clear()
            self._shapers[source] = TemplateMessages(trials, self._content_format)
        return self._shapers[source]

    def _ends_of(self, source: str) -> tuple[int, ...]:
        if (found := self._ends.get(source)) is None:
            shaper = self._shaper(source)

            def render(messages: list[PlainMessage], begins_answer: bool) -> str:
                options = {"add_generation_prompt": begins_answer, "chat_template": source}
                return self._render(shaper.finished(messages), None, options)

            size = math.inf if self._num_logits is None else self._num_logits
            ends = turn_end(added_ids(self._tokenizer), render)
            found = tuple(each for each in ends if each < size and each not in self._eos_token_ids)
            self._ends[source] = found
        return found

    def _render(self, messages: list[PlainMessage], tools: Tools, options: Mapping[str, Any]) -> str:
        return str(self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options))

    def _encode(
        self, messages: list[PlainMessage], tools: Tools, options: Mapping[str, Any], limit: int | None
    ) -> list[int]:
        encode = self._encoder.rendered_ids if self._allows_control_tokens else self._encoder.encode
        return encode(messages, tools, options, limit)


def _refusal(render: Callable[..., str], messages: list[PlainMessage], tools: Tools) -> str | None:
    """The template's words about a conversation that it refuses; None if it takes it."""
    try:
        render(messages, tools)
    except Exception as error:  # a template may raise anything, such as a TypeError for a text that it adds to a list
        return str(error) or type(error).__name__
    return None


def _named(render: Callable[..., str], shaped: Conversation) -> str:
    """The error for a conversation that the template refuses in every form, with the first message that it refuses."""
    messages, tools = shaped
    words = _refusal(render, messages, tools)
    # lengths of beginnings that the template takes and refuses
    taken = 0
    refused = len(messages)
    while refused - taken > 1:
        middle = (taken + refused) // 2
        if _refusal(render, messages[:middle], tools) == words:
            refused = middle
        else:
            taken = middle
    role = messages[refused - 1]["role"]
    return f"messages[{refused - 1}] (role {role!r}): the chat template refuses this conversation: {words}"


def _check_conversation(conversation: Any) -> None:
    is_list = isinstance(conversation, SequenceABC) and not isinstance(conversation, str)
    if not is_list or not conversation or not all(map(_is_message, conversation)):
        raise ValueError(f"a conversation is a list of {{'role': ..., 'content': ...}}, not {conversation!r}.")


def _is_message(item: Any) -> bool:
    is_mapping = isinstance(item, Mapping) and isinstance(item.get("role"), str)
    return is_mapping and ("content" in item or item["role"] == "assistant")
