"""Runs a step on a GPU with one copy to the device and one launch: a CUDA graph for each shape.

A graph takes the tokens that the previous step sampled, fills the block masks, runs the model and samples. It is
captured at the first step of its shape, or earlier while idle. All graphs share one memory pool: they run one at a
time.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from nanovllm.attention.block_mask import own_code
from nanovllm.attention.flex_gpu import GpuFlexAttention, StepTables
from nanovllm.attention.flex_gpu_options import KernelOptions
from nanovllm.attention.operator import AttentionStep, use_write_kernel
from nanovllm.attention.tiles import Tiles
from nanovllm.batch import ScheduledBatch
from nanovllm.batch_layout import BatchLayout
from nanovllm.config import EngineConfig
from nanovllm.device import DEVICE_LOCK, to_device
from nanovllm.execution.buckets import Buckets, GraphShape
from nanovllm.execution.graph_inputs import StepInputs, StepPacking, with_sampled
from nanovllm.interrupts import interrupts_let_through
from nanovllm.model.binding import ModelBinding
from nanovllm.sampling.logprobs import StepLogprobs
from nanovllm.sampling.penalties import LatestTokens
from nanovllm.sampling.sampler import DrawInputs, Sampler, needs_logits_only

logger = logging.getLogger("nanovllm")

MAX_GRAPHS = 128  # the one that was not used for longest makes room
GRAPH_BYTES_PER_LAYER = 64 * 2**10  # what a captured graph takes of the device


class GraphExecutor:
    """Runs the `flex` and `flash` backends on a GPU, a captured graph for each shape.

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
        self._buckets = Buckets(config, options)
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
        self._packing = cache(lambda shape: StepPacking(shape, block_size))
        self._graphs: OrderedDict[GraphShape, torch.cuda.CUDAGraph] = OrderedDict()
        with torch.inference_mode(False):
            num_words = StepPacking(self._buckets.largest(), block_size).num_words + config.max_num_seqs * max_blocks
            self._inputs = torch.zeros(num_words, dtype=torch.int32, device=binding.device)
            self._sampled = torch.zeros(self._buckets.max_decodes, dtype=torch.int64, device=binding.device)
        self._logits: Tensor | None = None  # [max_samples, vocab_size], for steps that the host's sampler finishes
        self._usual = deque(self._buckets.usual())  # to be captured when there is time
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(binding.device)  # for captures
        self._addresses: list[int] = []  # of the weights that the graphs read

    def launch(self, batch: ScheduledBatch, layout: BatchLayout, tiles: Tiles, report: StepLogprobs) -> Tensor:
        """Compute a step; returns its sampled tokens [num_samples] int64, valid until the next launch."""
        sequences, positions = batch.sampling, batch.sampled_positions
        shape = self._buckets.shape(layout, len(tiles.blocks), draws=needs_logits_only(sequences, positions))
        if report.prompt is None:
            run = self._runner_of(shape)
        else:  # prompt logits are read in pieces, which no graph has captured
            report.shift_prompt_rows(shape.num_decodes - layout.num_decodes)
            run = partial(self._run, shape, report)
        draws = DrawInputs.from_sequences(sequences, positions) if shape.draws else None
        self._upload(shape, layout, tiles, draws)
        run()
        count = len(sequences)
        if not shape.draws:
            assert self._logits is not None
            with torch.no_grad():
                latest = LatestTokens(layout.token_ids[layout.sample_rows], self._sampled)
                self._sampled[:count] = self._sampler.sample(self._logits[:count], sequences, positions, latest, report)
        return self._sampled[:count]

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

    def _run(self, shape: GraphShape, report: StepLogprobs | None = None) -> None:
        """The whole step of a shape on the packed inputs; this is what a graph captures."""
        inputs = self._packing(shape).views(self._inputs)
        with torch.no_grad():
            token_ids = self._with_sampled(inputs.token_ids, self._sampled)
            plan = self.backend.fill(tables_of(inputs, shape))
        step = AttentionStep(plan, shape.num_rows)
        logits = self._binding.forward_step(
            step, token_ids, inputs.positions, inputs.slot_mapping, inputs.sample_rows, report
        )
        with torch.no_grad():
            self._finish(shape, inputs, logits)

    def _finish(self, shape: GraphShape, inputs: StepInputs, logits: Tensor) -> None:
        if shape.draws:
            self._sampled[: shape.num_samples] = self._sampler.draw(
                logits, inputs.noise_keys, inputs.inverse_temperatures, inputs.noise_scales
            )
        else:
            if self._logits is None:
                with torch.inference_mode(False):
                    self._logits = logits.new_zeros(self._buckets.max_decodes, logits.shape[1])
            self._logits[: shape.num_samples].copy_(logits)

    # ---------------------------------------------------------------------------------------------------- graphs

    def _runner_of(self, shape: GraphShape) -> Callable[[], None]:
        if not self._captures or self._binding.has_hooks():  # a hook is the owner's own code, to be called in each step
            return lambda: self._run(shape)
        return self._graph_of(shape).replay

    def _graph_of(self, shape: GraphShape) -> torch.cuda.CUDAGraph:
        if shape not in self._graphs:
            with interrupts_let_through(), DEVICE_LOCK:  # it takes seconds and changes no books
                self._capture(shape)
        self._graphs.move_to_end(shape)
        return self._graphs[shape]

    def _capture(self, shape: GraphShape) -> None:
        if not self._graphs:
            self._addresses = self._binding.weight_addresses()
        while len(self._graphs) >= MAX_GRAPHS:
            torch.cuda.synchronize(self._binding.device)
            self._graphs.popitem(last=False)
            if not self._graphs:
                self._pool = torch.cuda.graph_pool_handle()
        sampled = self._sampled.clone()  # the step to come reads them, and trying this one overwrites them
        self._inputs.zero_()  # a step of padding alone
        current = torch.cuda.current_stream(self._binding.device)
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                self._run(shape)  # compiles, and sets up what cannot be set up within a capture
                torch.cuda.synchronize()
                torch.cuda.empty_cache()  # what this took is for the graphs' own memory now
                free, _ = torch.cuda.mem_get_info()
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    self._run(shape)
                finally:
                    graph.capture_end()
                logger.debug("captured %s: %.1f MiB", shape, (free - torch.cuda.mem_get_info()[0]) / 2**20)
        finally:
            current.wait_stream(self._stream)
            self._sampled.copy_(sampled)
        self._graphs[shape] = graph

    def warm_up(self) -> None:
        """Capture the most common shapes and the largest, so that no request waits for it."""
        for shape in self._buckets.common():
            self._inputs.zero_()  # a step of padding alone
            self._runner_of(shape)()

    def capture_ahead(self) -> bool:
        """Capture one more of the usual shapes; False if none is left."""
        while self._captures and self._usual and len(self._graphs) < MAX_GRAPHS:
            shape = self._usual.popleft()
            if shape not in self._graphs:
                self._graph_of(shape)
                return True
        return False

    def model_changed(self, *, in_place: bool) -> None:
        """Drop the graphs if they no longer compute what the model does: they read weights by address.

        Args:
            in_place: whether nothing but the weights can have changed.
        """
        if self._graphs and not (in_place and self._addresses == self._binding.weight_addresses()):
            self._forget_graphs()

    def _forget_graphs(self) -> None:
        if self._graphs:
            with DEVICE_LOCK:
                torch.cuda.synchronize(self._binding.device)
            self._graphs.clear()
            self._pool = torch.cuda.graph_pool_handle()  # the old one went with its last graph

    def close(self) -> None:
        self._forget_graphs()


def tables_of(inputs: StepInputs, shape: GraphShape) -> StepTables:
    return StepTables(
        inputs.tables, inputs.decode_tables, inputs.decode_blocks, inputs.positions[: shape.num_decodes],
        shape.is_uneven, inputs.tile_tables, inputs.tile_blocks, inputs.tile_is_used, inputs.tile_rows,
        inputs.chunk_rows,
    )  # fmt: skip
