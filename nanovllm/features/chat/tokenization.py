"""Texts and conversations to token ids and back, for `AsyncLLM`."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from functools import partial
from typing import Any, cast

from nanovllm.features.chat.chat import Message
from nanovllm.features.sampling_params import SamplingParams


class AsyncTokenization:
    """Mixin of `AsyncLLM`; each call is work of its client, see `Intake`."""

    async def tokenize(self: Any, prompt: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the tokenizer's special tokens if `add_special_tokens`."""
        work = partial(self._input_processor.tokenize, prompt, add_special_tokens=add_special_tokens)
        return cast(list[int], await self.prepare(work, prompt))

    async def apply_chat_template(
        self: Any,
        messages: SequenceABC[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        answer_params: SamplingParams | None = None,
        **template_options: Any,
    ) -> list[int]:
        """Token ids of a conversation, ready for the answer; arguments as in `chat`.

        Args:
            answer_params: parameters of an answer, for which a conversation may be too long; None for any length.
        """
        limit = None if answer_params is None else self._input_processor.limit_of(answer_params)
        work = partial(self._input_processor.parts.chat.apply_to, messages, limit, tools=tools, **template_options)
        return cast(list[int], await self.prepare(work, (messages, tools)))

    async def detokenize(self: Any, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids; all must be in the tokenizer's vocabulary."""
        work = partial(self.tokenizer.decode, token_ids, skip_special_tokens=skip_special_tokens)
        return cast(str, await self.prepare(work, token_ids))

    @property
    def takes_pictures(self: Any) -> bool:
        """Whether messages may have pictures."""
        return hasattr(self._input_processor.parts.pictures, "registry")
