"""nanovllm: an inference engine for the causal language models of `transformers`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nanovllm.gc_control import collector_paused

__version__ = "0.1.0"

# Loaded on first use, so that `nanovllm.scheduler` and the command line's help do not wait for torch.
_HOMES = {
    "LLM": "nanovllm.llm",
    "AsyncLLM": "nanovllm.async_llm",
    "SamplingParams": "nanovllm.sampling_params",
    "StructuredOutput": "nanovllm.structured_output",
    "EngineConfig": "nanovllm.config",
    "RequestOutput": "nanovllm.outputs",
    "EmbeddingParams": "nanovllm.sampling_params",
    "CompletionOutput": "nanovllm.outputs",
    "EmbeddingOutput": "nanovllm.outputs",
    "ScoreOutput": "nanovllm.outputs",
    "ErrorKind": "nanovllm.outputs",
    "Logprob": "nanovllm.outputs",
    "RequestMetrics": "nanovllm.outputs",
    "EngineStats": "nanovllm.outputs",
    "OutputKind": "nanovllm.outputs",
    "StepRecord": "nanovllm.observability.step_records",
    "TraceWriter": "nanovllm.observability.trace_writer",
    "ModelLoadError": "nanovllm.errors",
    "UnsupportedModelError": "nanovllm.errors",
    "StepError": "nanovllm.errors",
    "EngineDeadError": "nanovllm.errors",
    "QueueFullError": "nanovllm.errors",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingParams",
    "EngineConfig",
    "EngineDeadError",
    "EngineStats",
    "ErrorKind",
    "Logprob",
    "ModelLoadError",
    "OutputKind",
    "QueueFullError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "ScoreOutput",
    "StepError",
    "StepRecord",
    "StructuredOutput",
    "TraceWriter",
    "UnsupportedModelError",
]

if TYPE_CHECKING:
    from nanovllm.async_llm import AsyncLLM
    from nanovllm.config import EngineConfig
    from nanovllm.errors import EngineDeadError, ModelLoadError, QueueFullError, StepError, UnsupportedModelError
    from nanovllm.llm import LLM
    from nanovllm.observability.step_records import StepRecord
    from nanovllm.observability.trace_writer import TraceWriter
    from nanovllm.outputs import (
        CompletionOutput,
        EmbeddingOutput,
        EngineStats,
        ErrorKind,
        Logprob,
        OutputKind,
        RequestMetrics,
        RequestOutput,
        ScoreOutput,
    )
    from nanovllm.sampling_params import EmbeddingParams, SamplingParams
    from nanovllm.structured_output import StructuredOutput


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with collector_paused():
        return getattr(import_module(_HOMES[name]), name)
