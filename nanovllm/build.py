"""From a model's name or module and options to an engine that is ready to step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from torch import nn

from nanovllm.attention.backends import preferred_block_size
from nanovllm.config import EngineConfig
from nanovllm.engine import Engine
from nanovllm.gc_control import collector_paused
from nanovllm.model import loader
from nanovllm.model.binding import ModelBinding
from nanovllm.model.guard import check_row_counted_scales
from nanovllm.model.probe import UnsupportedModelError
from nanovllm.model_runner import ModelRunner
from nanovllm.observability.step_records import StepHook, Tracer
from nanovllm.observability.trace_writer import TraceWriter


def open_engine(
    model: str | os.PathLike[str] | nn.Module,
    tokenizer: Any,
    on_step: StepHook | None,
    options: dict[str, Any],
    *,
    trace: TraceWriter | None = None,
    tracer: Tracer | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Engine:
    """Load, hook and warm up a model.

    Arguments and errors are those of `LLM`; `tracer` (where there is no trace) and `clock` are those of `Engine`.
    """
    if on_step is not None and not callable(on_step):
        raise TypeError(f"on_step must be callable (it is given a StepRecord for each step), not {on_step!r}.")
    if trace is not None:
        if not isinstance(trace, TraceWriter):
            raise TypeError(f"trace must be a TraceWriter, such as TraceWriter('out.json'), not {trace!r}.")
        trace.check_unused()
    config = EngineConfig.from_options(**options)
    with collector_paused():
        loaded = loader.load(model, tokenizer, config)
    binding = ModelBinding(loaded.model, is_live=loaded.is_live)
    limits = config.resolve_limits(
        binding.device.type, loaded.max_position_embeddings, block_size=preferred_block_size(binding, config)
    )
    if binding.window is not None and limits.max_model_len > binding.window:
        raise UnsupportedModelError(
            f"{type(loaded.model).__name__} attends within a sliding window of {binding.window} tokens, which is "
            f"not implemented. It is exact for shorter sequences: set max_model_len to at most {binding.window}."
        )
    check_row_counted_scales(
        loaded.model, max_num_batched_tokens=limits.max_num_batched_tokens, max_model_len=limits.max_model_len
    )
    model_runner = ModelRunner(binding, limits, max_model_len_is_set=config.max_model_len is not None)
    if trace is not None:
        trace.begin(model_runner.config)
    return Engine(
        model_runner,
        tokenizer=loaded.tokenizer,
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        model_identity=loaded.identity,
        on_step=on_step,
        tracer=tracer if trace is None else trace,
        clock=clock,
    )
