"""nanovllm: an inference engine for the causal language models of `transformers`."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"
try:
    from nanovllm.fast.host.gc_control import collector_paused
    from nanovllm.fast.host.waiting_threads import limit_spins
except ModuleNotFoundError as missing:
    if not str(missing.name).startswith("nanovllm."):  # a library; else the folder is deleted
        raise
    collector_paused = nullcontext  # type: ignore[assignment]
else:
    limit_spins()

# Loaded on first use, so that `nanovllm.scheduler` and the command line's help do not wait for torch.
_HOMES = {
    "LLM": "nanovllm.serving.llm",
    "AsyncLLM": "nanovllm.serving.async_llm",
    "SamplingParams": "nanovllm.features.sampling_params",
    "StructuredOutput": "nanovllm.features.structured_output",
    "EngineConfig": "nanovllm.features.engine_config",
    "RequestOutput": "nanovllm.outputs",
    "EmbeddingParams": "nanovllm.features.sampling_params",
    "BeamSearchParams": "nanovllm.features.beams.books",
    "BeamSearchOutput": "nanovllm.features.beams.books",
    "BeamSearchSequence": "nanovllm.features.beams.books",
    "CompletionOutput": "nanovllm.outputs",
    "EmbeddingOutput": "nanovllm.features.scoring.score_outputs",
    "ScoreOutput": "nanovllm.features.scoring.score_outputs",
    "ErrorKind": "nanovllm.outputs",
    "Logprob": "nanovllm.outputs",
    "RequestMetrics": "nanovllm.outputs",
    "EngineStats": "nanovllm.features.engine_stats",
    "OutputKind": "nanovllm.outputs",
    "StepRecord": "nanovllm.observability.step_records",
    "TraceWriter": "nanovllm.observability.trace_writer",
    "Drafter": "nanovllm.features.speculation.drafter",
    "DraftRequest": "nanovllm.features.speculation.drafter",
    "ModelLoadError": "nanovllm.errors",
    "UnsupportedModelError": "nanovllm.errors",
    "StepError": "nanovllm.errors",
    "EngineDeadError": "nanovllm.errors",
    "QueueFullError": "nanovllm.errors",
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
    from nanovllm.errors import EngineDeadError, ModelLoadError, QueueFullError, StepError, UnsupportedModelError
    from nanovllm.features.beams.books import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from nanovllm.features.engine_config import EngineConfig
    from nanovllm.features.engine_stats import EngineStats
    from nanovllm.features.sampling_params import EmbeddingParams, SamplingParams
    from nanovllm.features.scoring.score_outputs import EmbeddingOutput, ScoreOutput
    from nanovllm.features.speculation.drafter import Drafter, DraftRequest
    from nanovllm.features.structured_output import StructuredOutput
    from nanovllm.observability.step_records import StepRecord
    from nanovllm.observability.trace_writer import TraceWriter
    from nanovllm.outputs import CompletionOutput, ErrorKind, Logprob, OutputKind, RequestMetrics, RequestOutput
    from nanovllm.serving.async_llm import AsyncLLM
    from nanovllm.serving.llm import LLM


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with collector_paused():
        return getattr(import_module(_HOMES[name]), name)
