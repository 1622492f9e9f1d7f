"""Runs a scheduled batch through the model: input build, one forward pass, sampling. All the torch is below here.

Invariant: a step's K and V go only to the slots of its own rows (its padding's to the null block), and no cache slot
that is read ever holds NaN from another request (blocks are cleared when they are begun, where a form reads more than a
sequence's own slots).
"""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import psutil
import torch
from torch import Tensor

from nanovllm.attention.backends import AttentionChoice
from nanovllm.batch import ScheduledBatch, ScheduledSequence
from nanovllm.batch_layout import build_layout
from nanovllm.config import EngineConfig
from nanovllm.errors import DeviceError
from nanovllm.execution.cuda_graphs import DEVICE_LOCK, GraphExecutor, workspace_bytes
from nanovllm.execution.direct import DirectExecutor
from nanovllm.execution.memory import AttendsInOneLayer, NoAttention
from nanovllm.kernels.cpp import has_matrix_tiles
from nanovllm.model.binding import ModelBinding
from nanovllm.sampling.logprobs import PromptRows, StepReport
from nanovllm.sampling.sampler import Sampler
from nanovllm.sampling_params import SamplingParams
from nanovllm.sequence import NewRequest, Sequence

logger = logging.getLogger("nanovllm")

_DEVICE_ERROR = re.compile(r"CUDA error|Triton Error \[CUDA\]|cuBLAS error|CUBLAS_STATUS", re.IGNORECASE)

# On a CPU the cache competes with everything else in memory, so by default it takes at most half of what is
# available, and no more than this: enough for 64 requests of 2,800 tokens with the default model.
MAX_DEFAULT_CPU_CACHE_BYTES = 4 * 2**30
# Kept free on a GPU beyond the measured peak, for allocator fragmentation and kernels' own workspaces.
GPU_RESERVE_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """A launched step's sampled tokens, on their way to the host, and what else it tells."""

    token_ids: Tensor  # [num_samples] int64, on the host
    report: StepReport
    arrival: torch.cuda.Event | None  # None if they are there

    @classmethod
    def of(cls, token_ids: Tensor, report: StepReport) -> PendingTokens:
        """token_ids [num_samples] int64, which may be overwritten once a next step is launched."""
        report = report.to_host()
        if token_ids.device.type == "cpu":
            return cls(token_ids, report, None)
        host = torch.empty(token_ids.shape, dtype=token_ids.dtype, device="cpu", pin_memory=True)
        host.copy_(token_ids, non_blocking=True)
        arrival = torch.cuda.Event()
        arrival.record(torch.cuda.current_stream(token_ids.device))
        return cls(host, report, arrival)

    def result(self) -> list[int]:
        """Wait for the step and return its tokens in the order of `ScheduledBatch.sampling`; then `report` is there."""
        with _device_errors():
            if self.arrival is not None:
                self.arrival.synchronize()
            return self.token_ids.tolist()


class ModelRunner:
    """Owns the KV caches and the attention form of one engine.

    Args:
        binding: the hooked model.
        config: with its limits resolved (`EngineConfig.resolve_limits`); the pool's size is decided here.
        max_model_len_is_set: whether the user chose max_model_len (if not, it yields to the pool).
    """

    def __init__(self, binding: ModelBinding, config: EngineConfig, *, max_model_len_is_set: bool) -> None:
        self.binding = binding
        self.device = binding.device
        self.config = config
        self._choice = choice = AttentionChoice.of(binding, config)
        captures = choice.captures(config, self.device)
        self.config = config = replace(config, cuda_graphs=captures, attention_backend=choice.backend)
        self.sampler = Sampler(compiles=choice.uses_graphs)
        self._structure = binding.structure() if binding.is_live else 0
        self._last_stream: torch.cuda.Stream | None = None
        self._in_flight: dict[Sequence, int] = {}  # what the last step launched samples, each with its place
        self._executor: DirectExecutor | GraphExecutor
        if choice.uses_graphs and not binding.is_live:
            binding.merge_linears()
        block_bytes = binding.caches.num_bytes(config.block_size)
        longest = config.max_model_len
        self.config = config = config.resolve_pool(
            block_bytes, self._memory_for_cache(), max_model_len_is_set=max_model_len_is_set
        )
        if config.max_model_len < longest:
            logger.warning(
                "max_model_len is %d instead of the model's %d: that is what the KV cache holds",
                config.max_model_len, longest,
            )  # fmt: skip
        binding.caches.allocate(config.num_kv_blocks * config.block_size)
        self._executor = self._make_executor()
        if choice.compiles and choice.kernels is None:
            logger.warning("compiling the layers for attention_backend=%r: some seconds", choice.backend)
            binding.compile_layers()
            self.warm_up()
        elif self.device.type == "cpu" and not binding.is_live:
            self._pack_weights()
        logger.info(
            "KV cache: %d blocks = %d tokens, %.2f GiB; at most %d requests of max_model_len (%d tokens)",
            config.num_kv_blocks, (config.num_kv_blocks - 1) * config.block_size,
            config.num_kv_blocks * block_bytes / 2**30,
            (config.num_kv_blocks - 1) // -(-config.max_model_len // config.block_size), config.max_model_len,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------------ construction

    def _make_executor(self) -> DirectExecutor | GraphExecutor:
        if self._choice.uses_graphs:
            return GraphExecutor(self.binding, self.config, self.sampler)
        form = self._choice.form(self.binding, self.config)
        return DirectExecutor(self.binding, form, self.config.block_size, self.sampler)

    def _pack_weights(self) -> None:
        """A CPU's way, in place of compiled layers: faster, and ready at once."""
        kernels = self._choice.kernels
        if kernels is not None and has_matrix_tiles(kernels.dtype):
            kernels = None

        def run_batches() -> None:
            """At both ends of the positions, since a layer may compute something else far from the beginning."""
            longest = self.config.max_model_len
            num_tokens = max(1, min(8, longest - 1))
            for start in {0, max(0, longest - 1 - num_tokens)}:
                self.execute(ScheduledBatch(0, (self._dummy_entry(start, num_tokens),))).result()

        self.binding.pack_weights(kernels, self.config.max_num_batched_tokens, run_batches)

    def _memory_for_cache(self) -> int:
        """Bytes that the cache may take by default."""
        config = self.config
        if self.device.type == "cpu":
            return min(MAX_DEFAULT_CPU_CACHE_BYTES, psutil.virtual_memory().available // 2)
        if config.num_kv_blocks is not None or config.kv_cache_memory_bytes is not None:
            return 0  # the user decides
        gc.collect()  # an engine before this one, if it stood in a cycle
        with DEVICE_LOCK:
            peak = self._measure_peak()
        free, total = torch.cuda.mem_get_info(self.device)  # what other processes hold counts as used
        num_bytes = int(config.gpu_memory_utilization * total) - (total - free) - peak - GPU_RESERVE_BYTES
        # Compiled code is made for the caches' size, and found again by the next process if that has the same.
        num_blocks = max(0, num_bytes) // self.binding.caches.num_bytes(config.block_size)
        return self.binding.caches.num_bytes(config.block_size) * (num_blocks - num_blocks % max(1, num_blocks >> 5))

    def _measure_peak(self) -> int:
        """Bytes that a worst-case step takes beyond the weights; run uncompiled, since the pool has no size yet."""
        config, block_size = self.config, self.config.block_size
        # One chunk of all the budget at the end of the longest sequence, behind another where there is room, so that it
        # takes a mask; and as many decodes as there may be, which gather less than it, however long they are. Every
        # page is the same one: only sizes matter here.
        chunk = config.max_num_batched_tokens - config.max_num_seqs + 1
        chunk = min(chunk, max(1, config.max_model_len - 2))
        start = config.max_model_len - 1 - chunk
        entries = [self._dummy_entry(0, 1)] * (config.max_num_seqs - 1)
        entries.append(self._dummy_entry(start, chunk))
        self.binding.caches.allocate(2 * block_size)
        form = NoAttention()
        if not self._choice.uses_graphs:  # what one layer's attention takes is free again for the next one's
            form = AttendsInOneLayer(self._choice.form(self.binding, config, uncompiled=True))
        self._executor = DirectExecutor(self.binding, form, block_size, self.sampler)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self.execute(ScheduledBatch(0, tuple(entries))).result()
        peak = torch.cuda.max_memory_allocated(self.device) - before
        self.binding.release_caches()
        self._in_flight = {}
        torch.cuda.empty_cache()
        return peak + (workspace_bytes(self.binding, config) if self._choice.uses_graphs else 0)

    def warm_up(self) -> None:
        """Compile what steps need, in a step with a chunk and one of decodes, so that no request waits for it."""
        if isinstance(self._executor, GraphExecutor):
            return self._executor.warm_up()
        config = self.config
        longest = min(config.max_model_len - 1, config.max_num_batched_tokens - config.max_num_seqs)
        num_tokens = min(config.block_size + 5, longest)
        if num_tokens < 2:
            return
        decodes = tuple(self._dummy_entry(num_tokens - 1, 1) for _ in range(min(2, config.max_num_seqs)))
        self.execute(ScheduledBatch(0, (self._dummy_entry(0, num_tokens),))).result()
        self.execute(ScheduledBatch(0, decodes)).result()

    def capture_ahead(self) -> bool:
        """Capture one of the steps that usually come, so that no request waits for it; False if none is left.

        A live module is its owner's while no request runs, so nothing is done with one.
        """
        if self.binding.is_live or not isinstance(self._executor, GraphExecutor):
            return False
        with _device_errors():
            self._keep_order()
            return self._executor.capture_ahead()

    def _dummy_entry(self, start: int, num_tokens: int) -> ScheduledSequence:
        """A share of a step that writes to block 1 over and over."""
        end = start + num_tokens
        vocab_size = self.binding.model.get_input_embeddings().num_embeddings
        tokens = [position % vocab_size for position in range(end)]
        sequence = Sequence(NewRequest("dummy", tokens, SamplingParams(top_p=0.9)), arrival=0, max_model_len=end + 1)
        table = [1] * -(-end // self.config.block_size)
        return ScheduledSequence(sequence, start, num_tokens, True, table, 0)

    # ------------------------------------------------------------------------------------------------------- steps

    def execute(self, batch: ScheduledBatch) -> PendingTokens:
        """One forward pass for decodes and chunks alike; launches it and returns a handle to its tokens.

        A sequence's newest token may still be in flight if the step launched before this one samples it. Raises
        DeviceError if the device failed, and whatever else the model raises.
        """
        layout = build_layout(
            batch.entries, self.config.block_size, self._in_flight, longest_first=self._choice.uses_graphs
        )
        with _device_errors():
            self._keep_order()
            report = StepReport(PromptRows.of(layout))
            pending = PendingTokens.of(self._executor.launch(batch, layout, report), report)
        self._in_flight = {sequence: place for place, sequence in enumerate(batch.sampling)}
        return pending

    def _keep_order(self) -> None:
        """Steps come one after the other on the device too, whatever streams their callers have set."""
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            if self._last_stream is not None and stream != self._last_stream:
                stream.wait_stream(self._last_stream)
            self._last_stream = stream

    def model_changed(self, *, was_idle: bool) -> bool:
        """Whether a live module was touched since the last call.

        Args:
            was_idle: nothing ran meanwhile, so its owner may have done anything to it; else only weights are looked at.
        """
        if not self.binding.is_live:
            return False
        weights_changed = self.binding.weights.have_changed()
        structure = self.binding.structure() if was_idle else self._structure
        structure_changed = structure != self._structure
        self._structure = structure
        if weights_changed or structure_changed:
            self._executor.model_changed(in_place=not structure_changed)
        return weights_changed or structure_changed

    def forget_model(self) -> None:
        """The model was changed in a way that nothing tells."""
        self._executor.model_changed(in_place=False)

    def close(self) -> None:
        try:
            self._executor.close()
        finally:
            self.binding.close()
        if self.device.type == "cuda":  # the memory is for whoever wants it next, in whatever process
            with DEVICE_LOCK:
                gc.collect()  # compiling leaves cycles behind that hold what the compiled code was first called with
                torch.cuda.empty_cache()


@contextmanager
def _device_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        # Triton raises plain errors; a failed allocation is no failure of the device.
        is_of_device = isinstance(error, torch.AcceleratorError) or _DEVICE_ERROR.search(str(error))
        if not is_of_device or isinstance(error, torch.OutOfMemoryError):
            raise
        raise DeviceError(str(error)) from error
