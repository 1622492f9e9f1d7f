"""Composes the input processor that serves every kind of request; for the composition roots."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nanovllm.core.config import EngineConfig
from nanovllm.requests.chat import ChatTemplate
from nanovllm.requests.input_processor import InputProcessor, RequestLimits
from nanovllm.requests.pieces import Pieces

if TYPE_CHECKING:
    from nanovllm.requests.grammar.compiler import GrammarCompiler


def build_input_processor(
    tokenizer: Any, config: EngineConfig, limits: RequestLimits, clock: Callable[[], float] = time.monotonic
) -> InputProcessor:
    """An input processor that serves every kind; arguments as for `InputProcessor`."""
    texts = Pieces(tokenizer)
    return InputProcessor(tokenizer, config, limits, clock, make_chat=_chat, make_grammars=_grammars, texts=texts)


def _chat(processor: InputProcessor) -> ChatTemplate:
    limits = processor.limits
    return ChatTemplate(processor.tokenizer, processor.config, limits.eos_token_ids, limits.num_logits)


def _grammars(processor: InputProcessor) -> GrammarCompiler:
    from nanovllm.requests.grammar.compiler import GrammarCompiler  # with llguidance

    ends = (*processor.limits.eos_token_ids, *processor.chat.end_token_ids)
    return GrammarCompiler(processor.tokenizer, processor.limits.num_logits, ends)
