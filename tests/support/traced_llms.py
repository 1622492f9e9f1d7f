"""An `LLM` over the tiny model that writes a trace."""

from nanovllm import SamplingParams
from tests.support import llms

OPTIONS = llms.OPTIONS


def params(max_tokens=12, **options):
    return SamplingParams(**({"temperature": 0.0, "max_tokens": max_tokens} | options))


def open_llm(trace, **options):
    return llms.open_llm(trace=trace, **options)
