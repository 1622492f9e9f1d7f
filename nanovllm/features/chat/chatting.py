"""`chat` and `apply_chat_template` of `LLM`."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from typing import Any

from nanovllm.features.chat.chat import NOT_FOR_TEMPLATES, Message
from nanovllm.features.intake.headless import check_head
from nanovllm.features.sampling_params import SamplingParams
from nanovllm.outputs import RequestOutput

Messages = SequenceABC[Message] | SequenceABC[SequenceABC[Message]]


class Chatting:
    """Mixin of `LLM`."""

    def chat(
        self: Any,
        messages: Messages,
        sampling_params: SamplingParams | SequenceABC[SamplingParams] | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer conversations through the tokenizer's chat template, with the options of `generate`.

        Answers also end at the token with which the template ends them.

        Args:
            messages: one conversation, a list of {"role": ..., "content": ...}, or a list of conversations.
            tools: functions that the template describes to the model, as OpenAI defines them.
            chat_template: Jinja template in place of the tokenizer's.
            chat_template_kwargs: variables of the template, such as {"enable_thinking": False}.
            add_generation_prompt: begin an answer at the end of the conversation.
            continue_final_message: continue the last message; needs add_generation_prompt=False.
        """
        check_head(self._open_engine().input_processor.limits)
        prompts = self.apply_chat_template(
            messages,
            tools=tools,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        outputs: list[RequestOutput] = self.generate(prompts, sampling_params, **options)
        return outputs

    def apply_chat_template(
        self: Any,
        messages: Messages,
        *,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[list[int]]:
        """Token ids of one conversation or several, ready for the answer; always a list of prompts.

        Texts that spell a control token are encoded as plain text, see `allow_control_tokens_in_messages`. Arguments as
        in `chat`.
        """
        variables = chat_template_kwargs or {}
        if names := NOT_FOR_TEMPLATES & variables.keys():
            raise ValueError(f"chat_template_kwargs holds {min(names)!r}, which is no variable of the chat template.")
        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message continues the last message; set add_generation_prompt=False.")
        options = variables | {"chat_template": chat_template, "add_generation_prompt": add_generation_prompt}
        if continue_final_message:
            options["continue_final_message"] = True
        chat = self._open_engine().input_processor.parts.chat
        prompts: list[list[int]] = chat.apply(messages, tools=tools, **options)
        return prompts
