"""Prepares the CUDA graphs of an engine, with the layers that they capture, and rehearses options."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from nanovllm.batch import ScheduledBatch, ScheduledSequence
from nanovllm.fast.gpu.capturable import why_not_captured
from nanovllm.fast.gpu.compared_steps import run_few_decodes, run_many_decodes, run_some_rows
from nanovllm.fast.gpu.compile_ahead import compile_ahead
from nanovllm.fast.gpu.cuda_graphs import GraphExecutor
from nanovllm.fast.gpu.rehearsal import rehearse_at_start
from nanovllm.fast.paths import FastPaths
from nanovllm.fast.replaced_layers import FastLayers
from nanovllm.features.costs.buckets import runs_as_decodes
from nanovllm.features.engine_config import EngineConfig
from nanovllm.model import ModelBinding
from nanovllm.model_runner import Executor, ModelRunner


class GraphPaths(FastPaths):
    """Steps of a GPU in shapes that graphs capture."""

    def __init__(self, *, has_mixers: bool) -> None:
        self._lays_runs_apart = not has_mixers  # a recurrent layer has rows one by one
        super().__init__()
        self._executor: GraphExecutor

    def obstacle_to_graphs(self, binding: ModelBinding, config: EngineConfig) -> str | None:
        return why_not_captured(binding, config.block_size)

    def prepare_layers(self, binding: ModelBinding, config: EngineConfig) -> None:
        layers = FastLayers(binding)
        may_fuse = not binding.is_live and not binding.mixers
        if may_fuse:
            layers.merge_linears()
        compile_ahead(binding, config)
        if may_fuse:
            layers.fuse_rotary()

    def build_executor(self, runner: ModelRunner) -> Executor:
        arguments = runner.binding, runner.config, runner.sampler, runner.pools
        if runner.binding.mixers:
            from nanovllm.fast.gpu.state_graphs import StateGraphExecutor

            self._executor = StateGraphExecutor(*arguments)
        else:
            self._executor = GraphExecutor(*arguments)
        return self._executor

    def prepare(self, runner: ModelRunner) -> None:
        binding = runner.binding
        config = runner.config
        if not runner.choice.compiles or runner.choice.kernels:
            return
        steps = binding, config, self._executor.run_layers
        if not FastLayers(binding).use_kernel_layers(partial(run_some_rows, *steps), partial(run_many_decodes, *steps)):
            FastLayers(binding).compile_layers()
        self._stack_layers(runner)
        self._executor.warm_up()
        if not binding.is_live:
            rehearse_at_start(runner, self._executor.capture_seen_head)

    def _stack_layers(self, runner: ModelRunner) -> None:
        config = runner.config
        steps = runner.binding, config, self._executor.run_layers
        FastLayers(runner.binding).stack_layers(config.block_size, partial(run_few_decodes, *steps))

    def memory_moved(self, runner: ModelRunner) -> None:
        """Stack layers anew after caches or weights got other addresses; graphs are captured while idle or by need."""
        if runner.choice.compiles and not runner.choice.kernels:
            self._stack_layers(runner)
        self._executor.warm_up(captures=False)

    def entries(self, batch: ScheduledBatch) -> Sequence[ScheduledSequence]:
        return runs_as_decodes(batch.entries) if batch.draws_runs and self._lays_runs_apart else batch.entries

    def use_idle_time(self, runner: ModelRunner) -> bool:
        if super().use_idle_time(runner):
            return True
        runner.follow_last_stream()
        return self._executor.capture_ahead()
