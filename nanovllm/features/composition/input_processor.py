"""Composes the input processor that serves every kind of request; for the composition roots."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from nanovllm.features.chat.chat import ChatTemplate
from nanovllm.features.chat.turn_end import log_ends
from nanovllm.features.composition.merging import merged_metrics
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.engine_stats import Goals
from nanovllm.features.intake.headless import without_head
from nanovllm.features.intake.pieces import Pieces
from nanovllm.features.intake.prompts import ChatPrompt, plain_prompt
from nanovllm.features.intake.token_texts import detokenizer_of
from nanovllm.features.sampling_params import SamplingParams
from nanovllm.requests import InputProcessor, RequestLimits, RequestParts, check_token_ids, check_unused

if TYPE_CHECKING:
    from nanovllm.features.grammar.compiler import GrammarCompiler


logger = logging.getLogger("nanovllm")


class AllParts(RequestParts):
    """Conversations, structured outputs, every option of a request, and texts in pieces.

    Attributes:
        texts: tokenises texts.
        adapters: `Adapter`s that requests may name, by name.
        goals: Goals in force, which may follow the costs.
    """

    params = SamplingParams
    completed = staticmethod(SamplingParams.completed)
    detokenizer = staticmethod(detokenizer_of)
    merged_metrics = staticmethod(merged_metrics)

    def __init__(self, tokenizer: Any, config: EngineConfig, limits: RequestLimits) -> None:
        self._tokenizer = tokenizer
        self.pictures: Any = None  # `PictureReader`
        self.adapters: dict[str, Any] = {}
        self._config = config
        self._limits = limits
        self.texts = Pieces(tokenizer)
        self.encode = self.texts.encode  # type: ignore[method-assign]
        self.goals: Callable[[], Goals] = lambda: config

    @cached_property
    def chat(self) -> ChatTemplate:
        """The tokenizer's chat template, for the first conversation."""
        return ChatTemplate(self._tokenizer, self._config, self._limits.eos_token_ids, self._limits.num_logits)

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """The compiler of structured outputs, made on first use."""
        from nanovllm.features.grammar.compiler import GrammarCompiler  # imports llguidance

        ends = (*self._limits.eos_token_ids, *self.chat.end_token_ids)
        return GrammarCompiler(self._tokenizer, self._limits.num_logits, ends)

    def use_pictures(self, reader: Any) -> None:
        """Let prompts and conversations have pictures, read by a `PictureReader`."""
        self.pictures = reader
        if self._tokenizer is not None:
            self.chat.pictures = reader

    def plain(self, prompt: Any, tokenize: Callable[..., list[int]]) -> Any:
        """See `RequestParts`: a dictionary is read, with the pictures of a model that takes some."""
        return plain_prompt(prompt) if self.pictures is None else self.pictures.plain(prompt, tokenize)

    def ended(self, prompt: Any, token_ids: list[int], params: SamplingParams) -> list[int]:
        """See `RequestParts`: attaches the template's end tokens to chats, and to prompts of structured outputs."""
        if not params.embeds and not self._limits.has_head:
            raise ValueError(without_head(self._limits))
        start = params.prompt_logprobs_start
        length = len(token_ids)
        if 0 < length <= start:
            raise ValueError(
                f"prompt_logprobs_start is {start}, but the prompt has {length} tokens; it must be at most "
                f"{length - 1}."
            )
        max_model_len = self._config.max_model_len
        if 0 < max_model_len - length < params.min_tokens:
            raise ValueError(
                f"min_tokens is {params.min_tokens}, but behind a prompt of {length} tokens max_model_len "
                f"({max_model_len}) leaves room for {max_model_len - length}."
            )
        if isinstance(prompt, ChatPrompt):
            if prompt.media is not None and len(token_ids) < len(prompt):
                raise ValueError("truncate_prompt_tokens would cut a prompt with pictures; leave it out.")
            return ChatPrompt(token_ids, prompt.end_token_ids, prompt.media)
        return token_ids if params.structured_output is None else ChatPrompt(token_ids, self.chat.end_token_ids)

    def fields_of(self, params: SamplingParams) -> dict[str, Any]:
        limits = self._limits
        vocab_size = self._limits.num_logits
        for name in ("allowed_token_ids", "logit_bias"):
            check_token_ids(name, getattr(params, name), limits)
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > vocab_size:
                raise ValueError(f"{name} is {count}, more tokens than the vocabulary has; at most {vocab_size}.")
        if params.prompt_logprobs is not None and not limits.has_base_model:
            raise ValueError(
                f"prompt_logprobs is {params.prompt_logprobs}, and {limits.model_name} has no base model apart "
                "from its head, whose logits could be made in pieces. Leave it out."
            )
        if params.embeds and not limits.has_base_model:
            raise ValueError(
                f"{limits.model_name} has no base model apart from its head, whose hidden states could be an embedding."
            )
        if params.itl_goal is not None or params.ttft_goal is not None:
            _check_goals(params, self.goals())
        if self._tokenizer is None:
            check_unused("bad_words", params.bad_words)
            check_unused("structured_output", params.structured_output)
        words = params.bad_words
        form = params.structured_output
        return {
            "bad_words": words and self.texts.spellings_of(words),
            "matcher": form and self.grammars.matcher(form),
        }


def _check_goals(params: SamplingParams, in_force: Goals) -> None:
    """Raise ValueError for a goal that is stricter than the engine's."""
    for name in ("itl_goal", "ttft_goal"):
        goal = getattr(params, name)
        least = getattr(in_force, name)
        if goal is not None and (least is None or goal < least):
            has = "none" if least is None else f"{least:g} s"
            remedy = f"the engine option {name}" if least is None else f"at least {least:g} s"
            raise ValueError(
                f"{name} of a request is {goal:g} s, and that of the engine is {has}; a request may only wait longer. "
                f"Set {remedy}, or leave it out."
            )


def build_input_processor(
    tokenizer: Any, config: EngineConfig, limits: RequestLimits, clock: Callable[[], float] = time.monotonic
) -> InputProcessor:
    """An input processor that serves every kind; arguments as for `InputProcessor`."""
    return InputProcessor(tokenizer, config, limits, clock, AllParts(tokenizer, config, limits))


def log_ends_of(processor: InputProcessor) -> None:
    """Log the tokens that end answers, or that the model gives none."""
    limits = processor.limits
    if not limits.has_head:
        logger.warning("%s", without_head(limits))
    elif processor.tokenizer is not None:
        log_ends(processor.tokenizer, limits.eos_token_ids, processor.parts.chat.end_token_ids)
