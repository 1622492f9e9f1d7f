"""nanovllm: an inference engine for the causal language models of `transformers`."""

from __future__ import annotations

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Loaded on first use, so that `nanovllm.scheduler` and the command line's help do not wait for torch.
_HOMES = {
    "LLM": "nanovllm.llm",
    "SamplingParams": "nanovllm.sampling_params",
    "EngineConfig": "nanovllm.config",
    "RequestOutput": "nanovllm.outputs",
    "CompletionOutput": "nanovllm.outputs",
    "RequestMetrics": "nanovllm.outputs",
    "EngineStats": "nanovllm.outputs",
    "ModelLoadError": "nanovllm.loader",
    "UnsupportedModelError": "nanovllm.model_probe",
    "StepError": "nanovllm.errors",
    "EngineDeadError": "nanovllm.errors",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "EngineDeadError",
    "EngineStats",
    "ModelLoadError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StepError",
    "UnsupportedModelError",
]

if TYPE_CHECKING:
    from nanovllm.config import EngineConfig
    from nanovllm.errors import EngineDeadError, StepError
    from nanovllm.llm import LLM
    from nanovllm.loader import ModelLoadError
    from nanovllm.model_probe import UnsupportedModelError
    from nanovllm.outputs import CompletionOutput, EngineStats, RequestMetrics, RequestOutput
    from nanovllm.sampling_params import SamplingParams


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Importing torch and transformers makes a million objects; looking through them for garbage again and again, while
    # there is none, takes a second of three.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return getattr(import_module(_HOMES[name]), name)
    finally:
        if was_enabled:
            gc.enable()
