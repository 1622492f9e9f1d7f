"""An `LLM` over the tiny model that writes a trace."""

from __future__ import annotations

from typing import Any

from nanovllm import LLM, SamplingParams, TraceWriter
from tests.support.tiny_models import tiny_model, tiny_tokenizer

OPTIONS: dict[str, Any] = {"enforce_eager": True, "block_size": 16, "num_kv_blocks": 129, "max_model_len": 512}


def params(max_tokens: int = 12, **options: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": max_tokens} | options))


def open_llm(trace: TraceWriter, **options: Any) -> LLM:
    return LLM(tiny_model(num_layers=1), tokenizer=tiny_tokenizer(), trace=trace, **(OPTIONS | options))
