"""From a model's name or module and options to an engine that is ready to step."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from nanovllm.attention.backends import AttentionChoice, preferred_block_size
from nanovllm.block_manager import BlockManager
from nanovllm.config import EngineConfig
from nanovllm.engine import Engine
from nanovllm.errors import UnsupportedModelError
from nanovllm.execution.memory import memory_for_cache
from nanovllm.gc_control import collector_paused
from nanovllm.model import loader
from nanovllm.model.binding import ModelBinding
from nanovllm.model.guard import check_row_counted_scales
from nanovllm.model_runner import ModelRunner
from nanovllm.observability.step_records import OnStep, StepHook, StepObservers
from nanovllm.observability.trace_writer import TraceWriter
from nanovllm.requests.input_processor import InputProcessor, RequestLimits
from nanovllm.scheduler import Scheduler

logger = logging.getLogger("nanovllm")


def build_engine(
    model: str | os.PathLike[str] | nn.Module,
    tokenizer: Any,
    on_step: StepHook | None,
    options: dict[str, Any],
    *,
    trace: TraceWriter | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Engine:
    """Load, hook and warm up a model; `LLM` says what the arguments mean and what is raised, `Engine` what clock is."""
    observers = _observers_from(on_step, trace)
    config = EngineConfig.from_options(**options)
    with collector_paused():
        loaded = loader.load(model, tokenizer, config)
    binding = ModelBinding(loaded.model, is_live=loaded.is_live)
    resolved, choice = resolve_options(binding, loaded, config)
    model_runner = ModelRunner(binding, resolved, choice)
    if trace is not None:
        trace.begin(model_runner.config)
    limits = RequestLimits(
        vocab_size=loaded.vocab_size,
        num_logits=binding.vocab_size,
        max_model_len=model_runner.config.max_model_len,
        model_name=type(loaded.model).__name__,
        has_base_model=binding.has_base_model,
        allow_control_tokens=config.allow_control_tokens_in_messages,
    )
    block_manager = BlockManager(
        model_runner.config.num_kv_blocks,
        model_runner.config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        hash_seed=f"{loaded.identity}:{binding.dtype}",  # whatever the KV of a token depends on besides its prefix
    )
    return Engine(
        model_runner,
        Scheduler(model_runner.config, block_manager),
        InputProcessor(loaded.tokenizer, limits, clock),
        tokenizer=loaded.tokenizer,
        # A config may name an EOS that embedding or head do not have; it can never be sampled.
        eos_token_ids=tuple(token_id for token_id in loaded.eos_token_ids if 0 <= token_id < binding.vocab_size),
        observers=observers,
        clock=clock,
    )


def resolve_options(
    binding: ModelBinding, loaded: loader.LoadedModel, config: EngineConfig
) -> tuple[EngineConfig, AttentionChoice]:
    """Settle every option from what the user set, what the model is and what the device is.

    Limits come first, then the attention backend and CUDA graphs, then the KV cache's size, for which a GPU runs a
    step.
    Raises ValueError for options that contradict one another, the model or the device.
    """
    layer, device, max_model_len = binding.layers[0], binding.device, config.max_model_len
    block_size = preferred_block_size(layer, device, config)
    config = config.resolve_limits(device.type, loaded.max_position_embeddings, block_size=block_size)
    _check_model(binding, config)
    choice = AttentionChoice.for_model(layer, device, config)
    config = replace(config, cuda_graphs=choice.captures(config, device), attention_backend=choice.backend)
    if choice.uses_graphs and not binding.is_live:
        binding.merge_linears()
    resolved = config.resolve_pool(
        binding.caches.num_bytes(config.block_size),
        memory_for_cache(binding, config, choice),
        max_model_len_is_set=max_model_len is not None,
    )
    if resolved.max_model_len < config.max_model_len:
        logger.warning(
            "max_model_len is %d instead of the model's %d: that is what the KV cache holds",
            resolved.max_model_len, config.max_model_len,
        )  # fmt: skip
    return resolved, choice


def _check_model(binding: ModelBinding, config: EngineConfig) -> None:
    """Raise UnsupportedModelError for a model that these limits make inexact."""
    if binding.window is not None and config.max_model_len > binding.window:
        raise UnsupportedModelError(
            f"{type(binding.model).__name__} attends within a sliding window of {binding.window} tokens, which is "
            f"not implemented. It is exact for shorter sequences: set max_model_len to at most {binding.window}."
        )
    check_row_counted_scales(
        binding.model, max_num_batched_tokens=config.max_num_batched_tokens, max_model_len=config.max_model_len
    )


def _observers_from(on_step: StepHook | None, trace: TraceWriter | None) -> StepObservers:
    observers = StepObservers()
    if on_step is not None:
        if not callable(on_step):
            raise TypeError(f"on_step must be callable (it is given a StepRecord for each step), not {on_step!r}.")
        observers.append(OnStep(on_step))
    if trace is not None:
        if not isinstance(trace, TraceWriter):
            raise TypeError(f"trace must be a TraceWriter, such as TraceWriter('out.json'), not {trace!r}.")
        trace.check_unused()
        observers.append(trace)
    return observers
