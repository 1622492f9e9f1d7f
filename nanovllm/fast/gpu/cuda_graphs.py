"""Runs a step on a GPU with one copy to the device and two CUDA graphs: a forward pass, then head and draw.

The first reads the previous step's sampled tokens, fills the block masks, runs the model's layers and stores the hidden
states of the sampled rows; it is captured by shape. The second computes logits and tokens; it is captured by number of
samples. Shapes are captured at start-up and while idle: a step of another shape runs as a larger one, or without a
graph. Requests wait for a capture only with a live module, after `weights_changed`, and after many steps of one shape
without a graph.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from tqdm import tqdm

from nanovllm.attention import AttentionStep, use_write_kernel
from nanovllm.batch import ScheduledBatch
from nanovllm.device import find_kernel, own_code, to_device
from nanovllm.fast.attention.flex_gpu import build_gpu_attention
from nanovllm.fast.attention.tiles import Tiles
from nanovllm.fast.gpu.capturable import runs_whole, splits_head, weight_addresses
from nanovllm.fast.gpu.draft_graphs import DraftGraphs, HeadInputs
from nanovllm.fast.gpu.forward_graphs import ForwardGraphs, HeadGraphs
from nanovllm.fast.gpu.graph_pool import GraphPool
from nanovllm.fast.gpu.head_extras import HeadExtras
from nanovllm.fast.gpu.stacked_steps import StackedSteps, build_stacked_steps, reads_own_rows
from nanovllm.fast.gpu.step_inputs import RowInputs, SampleInputs, StepPacking, draw_tensors
from nanovllm.fast.layers.stacked_layers import unstack_layers
from nanovllm.features.costs.buckets import Buckets, GraphShape, HeadShape
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.forward_passes import head_step
from nanovllm.features.groups.cache_pools import CachePools
from nanovllm.features.logprobs.logprobs import StepLogprobs
from nanovllm.features.packed_steps import StepFeature
from nanovllm.layout import BatchLayout
from nanovllm.model import ModelBinding
from nanovllm.model_runner import ModelRunner, with_sampled
from nanovllm.sampler import DrawInputs, Sampler

if TYPE_CHECKING:
    from nanovllm.fast.gpu.adapter_graphs import AdapterGraphs

logger = logging.getLogger("nanovllm")


class GraphExecutor:
    """Runs the `flex` backend on a GPU.

    Args:
        binding: model with compiled layers and allocated caches.
        config: options, fully resolved.
        pools: KV pools of the cache groups.
    """

    further_inputs: tuple[StepFeature, ...] = ()  # inputs of a packed step besides those of every model
    captures_chunks = True

    def __init__(self, binding: ModelBinding, config: EngineConfig, sampler: Sampler, pools: CachePools) -> None:
        use_write_kernel()
        if binding.device.type == "cuda":
            binding.caches.clear = find_kernel("kv_writes", "clear_blocks") or binding.caches.clear
        self._binding = binding
        self._config = config
        self._sampler = sampler
        self._block_size = config.block_size
        self._captures = config.cuda_graphs
        self._buckets = Buckets(config, only_decodes=not self.captures_chunks)
        max_blocks = -(-config.max_model_len // config.block_size)
        self.backend = build_gpu_attention(
            binding.layers, binding.device, config, pools, max_decodes=self._buckets.max_decodes,
            max_tiles=self._buckets.max_tiles,
        )  # fmt: skip
        kernel = find_kernel("layer_parts", "with_sampled") if binding.device.type == "cuda" else None
        self._with_sampled = kernel or torch.compile(own_code(with_sampled), fullgraph=True, dynamic=True)
        max_samples = self._buckets.max_decodes
        rows = RowInputs(pools.kind_groups(binding.layers))
        self._drafts = getattr(binding.passes, "head_layer", None)
        of_head = () if self._drafts is None else (HeadInputs(self._drafts, config.block_size, pools),)
        self.features = SampleInputs(), rows, *self.further_inputs, *of_head, self.backend.inputs
        self._packing = cache(partial(StepPacking, max_samples=max_samples, features=self.features))
        largest = self._packing(self._buckets.largest())
        with torch.inference_mode(False):
            num_words = largest.num_words + len(pools.groups) * config.max_num_seqs * max_blocks
            num_words += self._buckets.max_rows + 2 * config.max_loras + 3  # rows of adapters by slot
            self._inputs = torch.zeros(num_words, dtype=torch.int32, device=binding.device)
            self._sampled = torch.zeros(max_samples, dtype=torch.int64, device=binding.device)
        self._extras = HeadExtras(max_samples, binding.device)
        if binding.ranks is not None:
            from nanovllm.fast.gpu.rank_sampler import RankExtras

            self._extras = RankExtras(sampler, max_samples, binding.device)
        self._draw_inputs = largest.views(self._inputs)  # same offsets for every shape
        self._has_head_apart: bool | None = splits_head(binding)  # None: to be determined again
        # Output of the first graph: [max_samples, hidden_size], or logits where the head is not computed apart.
        self._states: Tensor | None = None
        self._logits: Tensor | None = None  # [max_samples, vocab_size], for steps that the host's sampler finishes
        self.stacked: StackedSteps | None = None
        self._pool = GraphPool(binding.device)
        self._forwards = ForwardGraphs(self._buckets, may_wait=config.tensor_parallel_size == 1)
        self._heads = HeadGraphs()
        self._lacking: deque[GraphShape | HeadShape] = deque()  # not yet captured by `warm_up`
        self._addresses = weight_addresses(binding)  # addresses of the weights that the graphs read

    def adapter_slots(self, runner: ModelRunner, max_loras: int) -> AdapterGraphs:
        """Slots of adapters, with graphs of the steps that use them."""
        from nanovllm.fast.gpu.adapter_graphs import AdapterGraphs

        return AdapterGraphs(runner, max_loras)

    def draft_steps(self) -> DraftGraphs:
        """Steps of the model's head alone, with graphs of their own."""
        return DraftGraphs(self, self._drafts)

    def launch(
        self, batch: ScheduledBatch, layout: BatchLayout, tiles: Tiles, report: StepLogprobs | None
    ) -> Callable[[], Tensor]:
        """Compute a step; returns its draw: of tokens [num_samples] int64, valid until the next launch.

        A step of plain sequences alone has no report.
        """
        chains = self._binding.stacked is not None and reads_own_rows(layout, self._block_size)
        if self.stacked and report is None and not chains and (draw_stacked := self.stacked.launch(batch, layout)):
            return draw_stacked
        sequences = batch.sampling
        positions = layout.sampled_positions.tolist()
        sampler = self._sampler
        count = len(sequences)
        extras = self._extras.needed(sequences, positions)
        draws = None if extras is None else self._extras.draw_inputs(sequences, positions)
        head = HeadShape(0, draws is not None, draws is not None and draws.has_filters(), *(extras or ()))
        head = head._replace(num_samples=self._buckets.num_samples(count, is_rare=head.is_rare))
        shape = self._buckets.shape(layout, max(int(chains), len(tiles.blocks)), is_wide=tiles.has_wide_groups)
        # Reports read more than the sampled rows, and a user's hook must run in each step.
        is_whole = (report is not None and report.reads_rows) or runs_whole(self._binding)
        if not is_whole and self._captures:
            shape = self._captured_shape(shape, head if count else None)
        if batch.copies:
            self._binding.caches.copy_blocks(batch.copies, self._block_size)
        self._upload(shape, layout, tiles, draws)
        if not is_whole:
            self._run(self._forwards.graphs.get(shape), partial(self._forward, shape))
        elif report is not None:
            report.shift_prompt_rows(shape.num_decodes - layout.num_decodes)

        @torch.no_grad()
        def draw() -> Tensor:
            latest = partial(sampler.stage.inputs, layout, sequences, self._sampled)
            errors = {} if report is None else report.errors
            if head.is_rare and self._extras.upload(head, sequences, positions, latest, errors):
                self._pool.synchronize()
                self._heads.drop_penalising()
            if is_whole:
                self._run_whole(shape, head, report)
            elif count:
                self._heads.add_step(head)
                self._run(self._heads.graphs.get(head), partial(self._head, head))
            if head.num_top is not None and report is not None:
                report.add_measured(range(count), self._extras.measured(head, count))
            if draws is None and count:
                assert self._logits is not None
                self._sampled[:count] = sampler.sample(self._logits[:count], sequences, positions, latest(), report)
            return self._sampled[:count]

        return draw if is_whole else partial(self._extras.begin_draw, head, sequences, positions, draw, report)

    def run_layers(self, layout: BatchLayout) -> Tensor:
        """A step's forward pass without its graph; returns the states between the two graphs."""
        tiles = self.backend.plan(layout)
        shape = self._buckets.shape(layout, len(tiles.blocks))
        self._upload(shape, layout, tiles, None)
        return self._forward(shape)

    @staticmethod
    def _run(graph: torch.cuda.CUDAGraph | None, run: Callable[[], object]) -> None:
        (run if graph is None else graph.replay)()

    def _upload(self, shape: GraphShape, layout: BatchLayout, tiles: Tiles, draws: DrawInputs | None) -> None:
        packing = self._packing(shape)
        # PyTorch's allocator reuses pinned memory only when the copy from it is done.
        buffer = torch.empty(packing.num_words_for(layout), dtype=torch.int32, device="cpu", pin_memory=True)
        packing.pack(layout, tiles, draws, buffer.numpy())
        if (given := self._binding.passes.given) is not None:
            given.place(packing.views(buffer.numpy()).positions, shape.num_decodes - layout.num_decodes)
        self._begin(layout)
        self._inputs[: len(buffer)].copy_(buffer, non_blocking=True)

    def _begin(self, layout: BatchLayout) -> None:
        self._extras.launch_late_draw()  # it reads the inputs of the step before
        for group, of_group in enumerate((layout, *layout.others)):
            if len(of_group.blocks_to_clear):
                begun = to_device(of_group.blocks_to_clear, self._binding.device)
                self._binding.caches.clear_blocks(begun, self._block_size, group=group)

    def _attention_step(self, shape: GraphShape) -> tuple[AttentionStep, Tensor, Tensor, Tensor]:
        """The packed step's masks, token ids, positions and slot mapping ([num_rows] int64 each)."""
        inputs = self._packing(shape).views(self._inputs)
        if self._drafts is not None:
            self._drafts.sources, self._drafts.targets = inputs.head_sources, inputs.head_targets
        with torch.no_grad():
            token_ids = self._with_sampled(inputs.token_ids, self._sampled)
            step = AttentionStep(self.backend.fill(inputs), shape.num_rows, inputs.slot_mapping)
        return step, token_ids, inputs.positions, inputs.slot_mapping

    @property
    def _splits_head(self) -> bool:
        if self._has_head_apart is None:
            self._has_head_apart = splits_head(self._binding)
        return self._has_head_apart

    def _forward(self, shape: GraphShape) -> Tensor:
        """The forward pass of the packed step, captured by shape."""
        inputs = self._attention_step(shape)
        sample_rows = self._draw_inputs.sample_rows
        if self._splits_head:
            hidden_states = self._binding.passes.hidden_states
            states = self._binding.compute_step(hidden_states, *inputs).index_select(0, sample_rows)
        else:
            states = self._binding.forward_step(*inputs, sample_rows)
        if self._states is None:
            with torch.inference_mode(False):
                self._states = torch.zeros_like(states)
        with torch.no_grad():
            return self._states.copy_(states)

    def _head(self, head: HeadShape) -> None:
        """Logits of the hidden states, and tokens if the head draws; captured by number of samples."""
        assert self._states is not None
        states = self._states[: head.num_samples]
        self._take_logits(head_step(self._binding, states) if self._splits_head else states, head)

    def _run_whole(self, shape: GraphShape, head: HeadShape, report: StepLogprobs | None) -> None:
        """The step as one forward pass from tokens to logits."""
        rows = self._draw_inputs.sample_rows[: head.num_samples]
        compute = partial(self._binding.passes.whole, report)
        self._take_logits(self._binding.compute_step(compute, *self._attention_step(shape), rows), head)

    def _take_logits(self, logits: Tensor, head: HeadShape) -> None:
        count = head.num_samples
        with torch.no_grad():
            if head.draws:
                inputs = draw_tensors(self._draw_inputs, count)
                changed = self._extras.penalised(logits, self._sampled) if head.penalises else logits
                self._sampled[:count] = self._sampler.draw(changed, inputs, **self._extras.draw_options(head))
                if head.num_top is not None:
                    self._extras.measure(logits, self._sampled[:count], head.num_top)
                return
            if self._logits is None:
                with torch.inference_mode(False):
                    self._logits = logits.new_zeros(len(self._sampled), logits.shape[1])
            self._logits[:count].copy_(logits)

    def _captured_shape(self, shape: GraphShape, head: HeadShape | None = None) -> GraphShape:
        """The captured shape that a step runs as; its own where none holds it. Its head is captured if that is due."""
        if self._lacking:  # the model was changed, or an interrupt ended an earlier call
            self._capture_lacking()
        # Nothing is captured for a live module while idle, since it is its owner's then.
        if self._binding.is_live and shape not in self._forwards.graphs and self._buckets.may_capture(shape):
            self._capture_forward(shape)
        own = shape
        shape = self._forwards.shape_for_step(shape, at_any_cost=self.backend.compiles_each_size)
        self._forwards.capture_due(own, self._capture_forward)  # offline nothing is idle
        if head is not None and self._heads.is_due(head):
            self._capture_head(head)
        return shape

    def _capture(self, shape: GraphShape | HeadShape, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """Capture `run`, after a trial, over inputs of padding alone; before the coming step's inputs are sent."""
        self._extras.launch_late_draw()  # it reads the inputs of the step before
        sampled = self._sampled.clone()  # tokens of the step before, for the coming one
        self._clear_inputs()
        try:
            graph = self._pool.capture(run, frees_trial=isinstance(shape, HeadShape) and shape.copies_logits)
        finally:
            self._sampled.copy_(sampled)
        logger.debug("captured %s", shape)
        return graph

    def _clear_inputs(self) -> None:
        """Fill every input of both graphs with padding alone, of all sizes: no entry is an earlier step's."""
        for inputs in filter(torch.is_tensor, (self._inputs, self._sampled, self._states)):
            inputs.zero_()
        self._extras.clear()

    def _capture_forward(self, shape: GraphShape) -> None:
        if not self._forwards.graphs:
            self._addresses = weight_addresses(self._binding)
        if self._forwards.is_full:
            self._pool.synchronize()
            self._forwards.make_room()
        self._forwards.add(shape, self._capture(shape, partial(self._forward, shape)))

    def _capture_head(self, head: HeadShape) -> bool:
        """Returns whether the head has a graph now; the first forward pass allocates its inputs."""
        if self._captures and self._states is not None and head not in self._heads.graphs:
            self._heads.graphs[head] = self._capture(head, partial(self._head, head))
        return head in self._heads.graphs

    def warm_up(self, *, captures: bool = True) -> None:
        """Compile the step's code and capture the usual shapes; without `captures`, later: while idle, or by need."""
        if self._splits_head:
            parts = self._binding, self._config, self.run_layers
            self.stacked = build_stacked_steps(*parts, sampled=self._sampled, begin=self._begin)
        if not captures:
            self._lacking.clear()
            self._addresses = weight_addresses(self._binding)
            shapes = [shape for shape in self._start_up() if isinstance(shape, GraphShape)]
            self._forwards.usual.extendleft(reversed(shapes))
            return
        if self._captures:
            self._lacking.extend(self._start_up())
            self._capture_lacking()
            return
        for shape in dict.fromkeys(self._buckets.common()):
            self._clear_inputs()
            self._forward(shape)

    def _start_up(self) -> list[GraphShape | HeadShape]:
        if self._binding.is_live:  # its graphs may not last
            return [*self._buckets.common()]
        return self._buckets.at_start(compiles_each_size=self.backend.compiles_each_size)

    def _capture_lacking(self) -> None:
        """Capture the shapes still missing from start-up; after an interrupt, the next call captures the rest."""
        with tqdm(total=len(self._lacking), desc="Capturing CUDA graphs", leave=False, disable=None) as progress:
            while self._lacking:
                shape = self._lacking[0]
                try:
                    if isinstance(shape, HeadShape):
                        self._capture_head(shape)
                    else:
                        self._capture_forward(shape)
                except Exception:  # not an interrupt: the next step runs with the graphs captured so far
                    self._lacking.clear()
                    raise
                self._lacking.popleft()
                progress.update()

    def capture_ahead(self) -> bool:
        """Capture one shape: missing from start-up, else missed by steps, else usual; False if none is left."""
        if self._lacking:
            self._capture_lacking()
            return True
        if self.capture_seen_head():
            return True
        shape = self._forwards.next_ahead() if self._captures else None
        if shape is not None:
            self._capture_forward(shape)
        return shape is not None

    def capture_seen_head(self) -> bool:
        """Capture a head with rare options that a step had; False if none is left."""
        head = self._heads.next_seen()
        return head is not None and self._capture_head(head)

    def model_changed(self, *, in_place: bool) -> None:
        """Drop graphs that no longer fit the model: they read weights by address.

        Args:
            in_place: True if only the weights can have changed.
        """
        addresses = weight_addresses(self._binding)
        if in_place and self._addresses == addresses:
            return
        self._drop_graphs()
        unstack_layers(self._binding)
        self._addresses = addresses
        if not self._binding.is_live and self._captures:
            self._lacking.extend(self._start_up())
        if not in_place:
            self._has_head_apart = None

    def _drop_graphs(self) -> None:
        if self._forwards.graphs or self._heads.graphs:
            self._pool.synchronize()
            self._forwards.clear()
            self._heads.graphs.clear()
            self._pool.reset()
        self._extras.drop_late_draw()
        self._lacking.clear()
        self._states = self._logits = self.stacked = None

    close = _drop_graphs
