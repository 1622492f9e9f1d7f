"""Runs a step on a GPU with one copy to the device and two CUDA graphs: a forward pass, then head and draw.

The first takes the tokens that the previous step sampled, fills the block masks, runs the model's layers and leaves the
hidden states of the sampled rows; it is captured by shape. The second makes logits and tokens of them; it is captured
by the number of samples alone. Shapes are captured at start-up and while idle: a step of another shape runs as a larger
one, or without a graph. Requests wait for captures of a live module, and for those after `weights_changed`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor
from tqdm import tqdm

from nanovllm.attention.block_mask import own_code
from nanovllm.attention.flex_gpu import GpuFlexAttention, StepTables
from nanovllm.attention.flex_gpu_options import KernelOptions
from nanovllm.attention.kv_writes import use_write_kernel
from nanovllm.attention.operator import AttentionStep
from nanovllm.attention.tiles import Tiles
from nanovllm.batch import ScheduledBatch
from nanovllm.batch_layout import BatchLayout
from nanovllm.config import EngineConfig
from nanovllm.device import DEVICE_LOCK, to_device
from nanovllm.execution.buckets import Buckets, GraphShape, HeadShape
from nanovllm.execution.graph_inputs import StepInputs, StepPacking, with_sampled
from nanovllm.execution.graph_pool import GraphPool
from nanovllm.model.binding import ModelBinding
from nanovllm.sampling.draw import DrawInputs, DrawTensors, draw_suffices
from nanovllm.sampling.logprobs import StepLogprobs
from nanovllm.sampling.penalties import LatestTokens
from nanovllm.sampling.sampler import Sampler

logger = logging.getLogger("nanovllm")

MAX_GRAPHS = 192  # forward passes; the one that was not used for longest makes room
GRAPH_BYTES_PER_LAYER = 64 * 2**10  # what a captured forward pass takes of the device


class GraphExecutor:
    """Runs the `flex` and `flash` backends on a GPU.

    Args:
        binding: with compiled layers and its caches allocated.
        config: fully resolved.
    """

    def __init__(self, binding: ModelBinding, config: EngineConfig, sampler: Sampler) -> None:
        block_size = config.block_size
        options = KernelOptions.for_layer(binding.layers[0], binding.device, block_size)
        use_write_kernel()
        self._binding = binding
        self._sampler = sampler
        self._block_size = block_size
        self._captures = config.cuda_graphs
        self._buckets = Buckets(config)
        max_blocks = -(-config.max_model_len // block_size)
        self.backend = GpuFlexAttention(
            options=options,
            max_decodes=self._buckets.max_decodes,
            max_tiles=self._buckets.max_tiles,
            max_blocks=max_blocks,
            num_blocks=config.num_kv_blocks,
            uses_flash=config.attention_backend == "flash",
            device=binding.device,
        )
        self._with_sampled = torch.compile(own_code(with_sampled), fullgraph=True, dynamic=True)
        max_samples = self._buckets.max_decodes
        self._packing = cache(lambda shape: StepPacking(shape, block_size, max_samples))
        largest = self._packing(self._buckets.largest())
        with torch.inference_mode(False):
            num_words = largest.num_words + config.max_num_seqs * max_blocks
            self._inputs = torch.zeros(num_words, dtype=torch.int32, device=binding.device)
            self._sampled = torch.zeros(max_samples, dtype=torch.int64, device=binding.device)
        self._draw_inputs = largest.views(self._inputs)  # at the same place for every shape
        self._splits_head = binding.splits_head()
        # Between the two graphs: [max_samples, hidden_size], or logits where the head is not computed apart.
        self._states: Tensor | None = None
        self._logits: Tensor | None = None  # [max_samples, vocab_size], for steps that the host's sampler finishes
        self._pool = GraphPool(binding.device)
        self._forwards: OrderedDict[GraphShape, torch.cuda.CUDAGraph] = OrderedDict()
        self._heads: dict[HeadShape, torch.cuda.CUDAGraph] = {}
        self._runs_as: dict[GraphShape, GraphShape] = {}  # of shapes that are not captured
        self._missed: dict[GraphShape, None] = {}  # the same ever since; captured when there is time
        self._usual = deque(self._buckets.usual())  # captured after those
        self._addresses: list[int] = []  # of the weights that the graphs read

    def launch(self, batch: ScheduledBatch, layout: BatchLayout, tiles: Tiles, report: StepLogprobs) -> Tensor:
        """Compute a step; returns its sampled tokens [num_samples] int64, valid until the next launch."""
        sequences, positions = batch.sampling, layout.sampled_positions.tolist()
        count, draws = len(sequences), None
        if draw_suffices(sequences, positions):
            draws = DrawInputs.from_sequences(sequences, positions)
        head = HeadShape(self._buckets.num_samples(count), draws is not None, draws is not None and draws.has_filters())
        shape = self._buckets.shape(layout, len(tiles.blocks))
        # Prompt logits are read in pieces, and a hook is the owner's own code, to be called in each step.
        is_whole = report.prompt is not None or self._binding.has_hooks()
        if not is_whole and self._captures:
            shape = self._captured_shape(shape)
        self._upload(shape, layout, tiles, draws)
        if is_whole:
            report.shift_prompt_rows(shape.num_decodes - layout.num_decodes)
            self._run_whole(shape, head, report)
        else:
            self._run(self._forwards.get(shape), partial(self._forward, shape))
            if count:
                self._run(self._head_graph(head), partial(self._head, head))
        if draws is None and count:
            assert self._logits is not None
            with torch.no_grad():
                latest = LatestTokens(layout.token_ids[layout.sample_rows], self._sampled)
                self._sampled[:count] = self._sampler.sample(self._logits[:count], sequences, positions, latest, report)
        return self._sampled[:count]

    @staticmethod
    def _run(graph: torch.cuda.CUDAGraph | None, run: Callable[[], None]) -> None:
        if graph is not None:
            graph.replay()
        else:
            run()

    def _upload(self, shape: GraphShape, layout: BatchLayout, tiles: Tiles, draws: DrawInputs | None) -> None:
        packing = self._packing(shape)
        blocks = layout.blocks_to_clear
        num_words = packing.num_words + int(layout.table_lengths.sum())
        # Pinned memory that PyTorch's allocator gives again only when the copy from it is done.
        buffer = torch.empty(num_words, dtype=torch.int32, device="cpu", pin_memory=True)
        packing.pack(layout, tiles, draws, buffer.numpy())
        self._inputs[:num_words].copy_(buffer, non_blocking=True)
        if len(blocks):
            begun = to_device(blocks, self._binding.device)
            self._binding.caches.clear_blocks(begun, self._block_size, by_kernel=True)

    # -------------------------------------------------------------------------------------------------- the step

    def _attention_step(self, shape: GraphShape) -> tuple[AttentionStep, Tensor, Tensor, Tensor]:
        """The packed step's masks, and its token ids, positions and slot mapping [num_rows] int64."""
        inputs = self._packing(shape).views(self._inputs)
        with torch.no_grad():
            token_ids = self._with_sampled(inputs.token_ids, self._sampled)
            plan = self.backend.fill(tables_of(inputs, shape))
        return AttentionStep(plan, shape.num_rows), token_ids, inputs.positions, inputs.slot_mapping

    def _forward(self, shape: GraphShape) -> None:
        """The forward pass of the packed step, captured by shape."""
        inputs, sample_rows = self._attention_step(shape), self._draw_inputs.sample_rows
        if self._splits_head:
            states = self._binding.hidden_step(*inputs).index_select(0, sample_rows)
        else:
            states = self._binding.forward_step(*inputs, sample_rows)
        if self._states is None:
            with torch.inference_mode(False):
                self._states = torch.zeros_like(states)
        with torch.no_grad():
            self._states.copy_(states)

    def _head(self, head: HeadShape) -> None:
        """Logits of the hidden states, and tokens if they are drawn here; captured by number of samples."""
        assert self._states is not None
        states = self._states[: head.num_samples]
        self._take_logits(self._binding.head(states) if self._splits_head else states, head)

    def _run_whole(self, shape: GraphShape, head: HeadShape, report: StepLogprobs) -> None:
        """The step as one forward pass from tokens to logits."""
        rows = self._draw_inputs.sample_rows[: head.num_samples]
        self._take_logits(self._binding.forward_step(*self._attention_step(shape), rows, report), head)

    def _take_logits(self, logits: Tensor, head: HeadShape) -> None:
        count = head.num_samples
        with torch.no_grad():
            if head.draws:
                inputs = DrawTensors(*(values[:count] for values in self._draw_inputs.draws))
                self._sampled[:count] = self._sampler.draw(logits, inputs, has_filters=head.has_filters)
                return
            if self._logits is None:
                with torch.inference_mode(False):
                    self._logits = logits.new_zeros(len(self._sampled), logits.shape[1])
            self._logits[:count].copy_(logits)

    # ---------------------------------------------------------------------------------------------------- graphs

    def _captured_shape(self, shape: GraphShape) -> GraphShape:
        """The captured shape that a step runs as; its own where none holds it."""
        if self._binding.is_live:  # nothing is captured while idle, since it is its owner's then
            if shape not in self._forwards:
                self._capture_forward(shape)
        elif not self._forwards:  # the model was changed
            self.warm_up()
        if shape in self._forwards:
            self._forwards.move_to_end(shape)
            return shape
        if shape not in self._runs_as:
            at_any_cost = self.backend.compiles_each_size
            self._runs_as[shape] = self._buckets.stand_in(shape, self._forwards, at_any_cost=at_any_cost) or shape
            self._missed[shape] = None
        return self._runs_as[shape]

    def _capture_forward(self, shape: GraphShape) -> None:
        if not self._forwards:
            self._addresses = self._binding.weight_addresses()
        while len(self._forwards) >= MAX_GRAPHS:
            with DEVICE_LOCK:
                torch.cuda.synchronize(self._binding.device)
                self._forwards.popitem(last=False)
        self._inputs.zero_()  # a step of padding alone
        self._forwards[shape] = self._pool.capture(partial(self._forward, shape))
        self._runs_as.clear()
        logger.debug("captured %s", shape)

    def _head_graph(self, head: HeadShape) -> torch.cuda.CUDAGraph | None:
        if self._captures and head not in self._heads:
            inputs, sampled = self._inputs.clone(), self._sampled.clone()  # of the step that waits for it
            self._heads[head] = self._pool.capture(partial(self._head, head))
            self._inputs.copy_(inputs)
            self._sampled.copy_(sampled)
            logger.debug("captured %s", head)
        return self._heads.get(head)

    def warm_up(self) -> None:
        """Compile what steps need and capture the shapes that usually come, the largest first.

        Where each number of decodes would be compiled for, only a few of them; for a live module, whose graphs may not
        last, as well.
        """
        shapes = dict.fromkeys(self._buckets.common())
        if not self._captures:
            for shape in shapes:
                self._inputs.zero_()
                self._forward(shape)
            return
        heads: list[HeadShape] = []
        if not self._binding.is_live:
            heads = self._buckets.heads()
            if not self.backend.compiles_each_size:
                shapes |= dict.fromkeys(self._buckets.coarse())
        with tqdm(total=len(shapes) + len(heads), desc="Capturing CUDA graphs", leave=False, disable=None) as progress:
            for shape in shapes:
                self._capture_forward(shape)
                progress.update()
            for head in heads:
                self._head_graph(head)
                progress.update()

    def capture_ahead(self) -> bool:
        """Capture one more shape: one that a step ran without, else one of the usual; False if none is left.

        After `model_changed` has dropped all, it is `warm_up` again.
        """
        if self._captures and not self._forwards:
            self.warm_up()
            return True
        while self._captures and (self._missed or self._usual) and len(self._forwards) < MAX_GRAPHS:
            shape = self._missed.popitem()[0] if self._missed else self._usual.popleft()
            if shape not in self._forwards:
                self._capture_forward(shape)
                return True
        return False

    def model_changed(self, *, in_place: bool) -> None:
        """Drop the graphs if they no longer compute what the model does: they read weights by address.

        Args:
            in_place: whether nothing but the weights can have changed.
        """
        if self._forwards and not (in_place and self._addresses == self._binding.weight_addresses()):
            self._drop_graphs()

    def _drop_graphs(self) -> None:
        if self._forwards or self._heads:
            with DEVICE_LOCK:
                torch.cuda.synchronize(self._binding.device)
            self._forwards.clear()
            self._heads.clear()
            self._pool.reset()
            self._usual = deque(self._buckets.usual())
        self._states = self._logits = None

    def close(self) -> None:
        self._drop_graphs()


def tables_of(inputs: StepInputs, shape: GraphShape) -> StepTables:
    return StepTables(
        inputs.tables, inputs.decode_tables, inputs.decode_blocks, inputs.positions[: shape.num_decodes],
        inputs.tile_tables, inputs.tile_blocks, inputs.tile_is_used, inputs.tile_rows,
        inputs.chunk_rows,
    )  # fmt: skip
