"""The executor of CUDA graphs for models with recurrent states: graphs of decodes, and steps with chunks without.

A graph reads and writes the slots of states that the packed step names; the pool and these numbers keep their
addresses. Padding reads and writes the null block. The shapes of a recurrent layer's chunks vary from step to step, so
steps with chunks are launched one by one, laid out and padded as the others.
"""

from __future__ import annotations

from torch import Tensor

from nanovllm.attention import AttentionStep
from nanovllm.batch import NULL_BLOCK
from nanovllm.fast.attention.tiles import Tiles
from nanovllm.fast.gpu.cuda_graphs import GraphExecutor
from nanovllm.fast.gpu.step_inputs import StateInputs
from nanovllm.features.costs.buckets import GraphShape
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.groups.cache_pools import CachePools
from nanovllm.features.states.mixers import Mixers, StatePart
from nanovllm.features.states.state_kernels import add_kernels
from nanovllm.layout import BatchLayout
from nanovllm.model import ModelBinding
from nanovllm.sampler import DrawInputs, Sampler


class StateGraphExecutor(GraphExecutor):
    """See `GraphExecutor`; the group of states is the last of `pools`."""

    further_inputs = (StateInputs(),)
    captures_chunks = False

    def __init__(self, binding: ModelBinding, config: EngineConfig, sampler: Sampler, pools: CachePools) -> None:
        assert isinstance(binding.mixers, Mixers)
        self._mixers = binding.mixers
        super().__init__(binding, config, sampler, pools.paged)
        with binding.installed():
            add_kernels(self._mixers)

    def warm_up(self, *, captures: bool = True) -> None:
        super().warm_up(captures=captures)
        shape = self._buckets.with_chunks()
        self._clear_inputs()
        self._mixers.set_parts([StatePart(slice(0, shape.num_rows), False, None, slice(NULL_BLOCK, NULL_BLOCK + 1))])
        self._forward(shape)  # compiles the calls of chunks

    def _upload(self, shape: GraphShape, layout: BatchLayout, tiles: Tiles, draws: DrawInputs | None) -> None:
        super()._upload(shape, layout, tiles, draws)
        if shape.num_tiles:
            num_padding = shape.num_decodes - layout.num_decodes
            self._mixers.begin_step(layout.others[-1], self._binding.device, num_padding)

    def _attention_step(self, shape: GraphShape) -> tuple[AttentionStep, Tensor, Tensor, Tensor]:
        if not shape.num_tiles:
            inputs = self._packing(shape).views(self._inputs)
            self._mixers.set_decodes(inputs.state_reads, inputs.state_writes)
        return super()._attention_step(shape)
