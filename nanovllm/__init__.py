"""nanovllm: an inference engine for the causal language models of `transformers`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nanovllm.process.gc_control import collector_paused
from nanovllm.process.waiting_threads import limit_spins

__version__ = "0.2.0"
limit_spins()

# Loaded on first use, so that `nanovllm.scheduler` and the command line's help do not wait for torch.
_HOMES = {
    "LLM": "nanovllm.features.llm",
    "AsyncLLM": "nanovllm.async_llm",
    "SamplingParams": "nanovllm.core.sampling_params",
    "StructuredOutput": "nanovllm.core.structured_output",
    "EngineConfig": "nanovllm.core.config",
    "RequestOutput": "nanovllm.core.outputs",
    "EmbeddingParams": "nanovllm.core.sampling_params",
    "BeamSearchParams": "nanovllm.features.beams",
    "BeamSearchOutput": "nanovllm.features.beams",
    "BeamSearchSequence": "nanovllm.features.beams",
    "CompletionOutput": "nanovllm.core.outputs",
    "EmbeddingOutput": "nanovllm.requests.score_outputs",
    "ScoreOutput": "nanovllm.requests.score_outputs",
    "ErrorKind": "nanovllm.core.outputs",
    "Logprob": "nanovllm.core.outputs",
    "RequestMetrics": "nanovllm.core.outputs",
    "EngineStats": "nanovllm.core.engine_stats",
    "OutputKind": "nanovllm.core.outputs",
    "StepRecord": "nanovllm.observability.step_records",
    "TraceWriter": "nanovllm.observability.trace_writer",
    "Drafter": "nanovllm.speculation.drafter",
    "DraftRequest": "nanovllm.speculation.drafter",
    "ModelLoadError": "nanovllm.core.errors",
    "UnsupportedModelError": "nanovllm.core.errors",
    "StepError": "nanovllm.core.errors",
    "EngineDeadError": "nanovllm.core.errors",
    "QueueFullError": "nanovllm.core.errors",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "DraftRequest",
    "Drafter",
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
    from nanovllm.core.config import EngineConfig
    from nanovllm.core.engine_stats import EngineStats
    from nanovllm.core.errors import EngineDeadError, ModelLoadError, QueueFullError, StepError, UnsupportedModelError
    from nanovllm.core.outputs import CompletionOutput, ErrorKind, Logprob, OutputKind, RequestMetrics, RequestOutput
    from nanovllm.core.sampling_params import EmbeddingParams, SamplingParams
    from nanovllm.core.structured_output import StructuredOutput
    from nanovllm.features.beams import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from nanovllm.features.llm import LLM
    from nanovllm.observability.step_records import StepRecord
    from nanovllm.observability.trace_writer import TraceWriter
    from nanovllm.requests.score_outputs import EmbeddingOutput, ScoreOutput
    from nanovllm.speculation.drafter import Drafter, DraftRequest


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with collector_paused():
        return getattr(import_module(_HOMES[name]), name)
