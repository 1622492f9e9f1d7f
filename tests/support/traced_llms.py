"""An `LLM` over the tiny model that writes a trace."""

from nanovllm import LLM, SamplingParams
from tests.support.tiny_models import tiny_model, tiny_tokenizer

OPTIONS = {"enforce_eager": True, "block_size": 16, "num_kv_blocks": 129, "max_model_len": 512}


def params(max_tokens=12, **options):
    return SamplingParams(**({"temperature": 0.0, "max_tokens": max_tokens} | options))


def open_llm(trace, **options):
    return LLM(tiny_model(num_layers=1), tokenizer=tiny_tokenizer(), trace=trace, **(OPTIONS | options))
