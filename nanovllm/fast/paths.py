"""Prepares compiled or packed layers and kernels for rows, and rehearses options."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from nanovllm.fast.attention.backends import AttentionChoice
from nanovllm.fast.fast_draws import sampler_parts
from nanovllm.fast.gpu.rehearsal import rehearse
from nanovllm.fast.replaced_layers import FastLayers
from nanovllm.fast.row_kernels import load_row_kernels
from nanovllm.features.costs.dummy_batches import Spans, comparison_spans, dummy_batch, warm_up_spans
from nanovllm.features.states.mixers import Mixers
from nanovllm.features.states.state_kernels import add_kernels
from nanovllm.model_runner import Executor, ModelRunner, StepPaths


class FastPaths(StepPaths):
    """Steps of a CPU, or of a GPU without graphs."""

    def __init__(self) -> None:
        self.num_rehearsed = 0

    def sampler_parts(self, choice: AttentionChoice) -> dict[str, Any]:
        row_kernels = load_row_kernels() if choice.kernels else None
        return sampler_parts(compiles=choice.uses_graphs, row_kernels=row_kernels, build_stage=self.build_stage)

    def build_executor(self, runner: ModelRunner) -> Executor:
        binding = runner.binding
        mixers = binding.mixers
        if isinstance(mixers, Mixers) and binding.device.type == "cpu" and not runner.config.enforce_eager:
            with binding.installed():
                add_kernels(mixers)
        return super().build_executor(runner)

    def prepare(self, runner: ModelRunner) -> None:
        binding = runner.binding
        config = runner.config
        choice = runner.choice
        if choice.compiles and not choice.kernels:
            FastLayers(binding).compile_layers()
            execute_dummies(runner, warm_up_spans(config))
        elif runner.device.type == "cpu" and not binding.is_live:  # faster than compiled layers, and ready at once
            run_batches = [partial(execute_dummies, runner, spans) for spans in comparison_spans(config)]
            kernels = next(iter(choice.kernels), None)
            FastLayers(binding).pack_weights(kernels, config.max_num_batched_tokens, *run_batches)

    def use_idle_time(self, runner: ModelRunner) -> bool:
        is_left = rehearse(runner, self.num_rehearsed)
        self.num_rehearsed += is_left
        return is_left


def execute_dummies(runner: ModelRunner, batches: Iterable[Spans]) -> None:
    for spans in batches:
        runner.launch(dummy_batch(runner.binding, runner.config, spans))  # no draw: it needs no preparation
