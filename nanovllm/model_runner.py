"""Runs a scheduled batch through the model: input build, one forward pass, sampling. All the torch is below here.

Invariant: a step's K and V go only to the slots of its own rows, and no cache slot that is read ever holds NaN from
another request (blocks are cleared when they are begun).
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import psutil
import torch
from torch import Tensor

from nanovllm.attention.flex import FlexAttention
from nanovllm.attention.layout import BatchLayout, build_layout
from nanovllm.attention.operator import AttentionPlan, AttentionStep, enter_step, leave_step
from nanovllm.attention.sdpa import SdpaAttention
from nanovllm.batch import ScheduledBatch, ScheduledSequence
from nanovllm.config import EngineConfig
from nanovllm.errors import DeviceError
from nanovllm.model_binding import ModelBinding
from nanovllm.sampler import Sampler
from nanovllm.sampling_params import SamplingParams
from nanovllm.sequence import Sequence

logger = logging.getLogger("nanovllm")

# On a CPU the cache competes with everything else in memory, so by default it takes at most half of what is
# available, and no more than this: enough for 64 requests of 2,800 tokens with the default model.
MAX_DEFAULT_CPU_CACHE_BYTES = 4 * 2**30
# Kept free on a GPU beyond the measured peak, for allocator fragmentation and kernels' own workspaces.
GPU_RESERVE_BYTES = 512 * 2**20


@dataclass(slots=True)
class PendingTokens:
    """A launched step's sampled tokens, still on the device."""

    token_ids: Tensor  # [num_samples] int64

    def result(self) -> list[int]:
        """Wait for the step and return its tokens in the order of `ScheduledBatch.sampling`."""
        with _device_errors():
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
        self.sampler = Sampler()
        self.config = config
        self.compiles = self._may_compile()
        self.attention_backend = self._choose_backend()
        block_size, block_bytes = config.block_size, binding.cache_bytes(config.block_size)
        page_bytes = block_bytes // len(binding.layers)
        self._form: AttentionForm = SdpaAttention(block_size, page_bytes, binding.dtype, self.device)
        memory = self._measure_gpu_memory() if self.device.type == "cuda" else _cpu_memory()
        self.config = config = config.resolve_pool(block_bytes, memory, max_model_len_is_set=max_model_len_is_set)
        if self.attention_backend == "flex":
            self._form = FlexAttention(
                num_blocks=config.num_kv_blocks,
                block_size=block_size,
                num_groups=binding.layers[0].num_heads // binding.layers[0].num_kv_heads,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=config.max_model_len,
                device=self.device,
            )
        binding.allocate_caches(config.num_kv_blocks * block_size)
        if self.compiles:
            binding.compile_layers()
            self.warm_up()
        logger.info(
            "KV cache: %d blocks = %d tokens, %.2f GiB; at most %d requests of max_model_len (%d tokens)",
            config.num_kv_blocks, (config.num_kv_blocks - 1) * block_size, config.num_kv_blocks * block_bytes / 2**30,
            (config.num_kv_blocks - 1) // -(-config.max_model_len // block_size), config.max_model_len,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------------ construction

    def _may_compile(self) -> bool:
        if self.config.enforce_eager:
            logger.warning("enforce_eager: nothing is compiled; layers run eagerly, attention is 'sdpa'")
            return False
        if self.device.type == "cpu" and not _has_cpp_compiler():
            if self.config.attention_backend == "flex":
                raise ValueError(
                    "attention_backend='flex' needs a C++ compiler, and none was found. Install g++ or clang++ (or "
                    "name one in the environment variable CXX), or use attention_backend='sdpa'."
                )
            logger.warning("no C++ compiler was found: nothing is compiled; layers run eagerly, attention is 'sdpa'")
            return False
        return True

    def _choose_backend(self) -> str:
        """On a CPU gathering pages for PyTorch's own attention is measured faster; docs/tuning.md has the figures."""
        if self.config.attention_backend != "auto":
            return self.config.attention_backend
        return "flex" if self.device.type == "cuda" and self.compiles else "sdpa"

    def _measure_gpu_memory(self) -> int:
        """Bytes left for the cache after the peak of a worst-case step, within gpu_memory_utilization.

        What other processes hold counts as used.
        """
        config, block_size = self.config, self.config.block_size
        count = min(config.max_num_batched_tokens // config.max_num_seqs, config.max_model_len)
        table = list(range(1, -(-count // block_size) + 1))  # shared by all: only sizes matter here
        self.binding.allocate_caches((len(table) + 1) * block_size)
        entries = [self._dummy_entry(0, count, table) for _ in range(config.max_num_seqs)]
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self.execute(ScheduledBatch(0, tuple(entries))).result()
        peak = torch.cuda.max_memory_allocated(self.device) - before
        self.binding.release_caches()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return int(config.gpu_memory_utilization * total) - (total - free) - peak - GPU_RESERVE_BYTES

    def warm_up(self) -> None:
        """Compile what steps need, in one step of decodes and a chunk, so that no request waits for it."""
        block_size = self.config.block_size
        longest = min(self.config.max_model_len - 1, self.config.max_num_batched_tokens - self.config.max_num_seqs)
        num_tokens = min(block_size + 5, longest)
        if num_tokens < 2:
            return
        table = list(range(1, num_tokens // block_size + 2))
        num_decodes = min(2, self.config.max_num_seqs - 1)
        entries = [self._dummy_entry(num_tokens - 1, 1, table) for _ in range(num_decodes)]
        entries.append(self._dummy_entry(0, num_tokens, table))
        self.execute(ScheduledBatch(0, tuple(entries))).result()

    def _dummy_entry(self, start: int, num_tokens: int, table: list[int]) -> ScheduledSequence:
        params = SamplingParams(top_p=0.9)
        end = start + num_tokens
        sequence = Sequence("dummy", [0] * end, params, arrival=0, max_model_len=end + 1)
        return ScheduledSequence(sequence, start, num_tokens, True, table, 0)

    # ------------------------------------------------------------------------------------------------------- steps

    def execute(self, batch: ScheduledBatch) -> PendingTokens:
        """One forward pass for decodes and chunks alike; launches it and returns a handle to its tokens.

        Raises DeviceError if the device failed, and whatever else the model raises.
        """
        layout = build_layout(batch.entries, self.config.block_size)
        positions = [entry.start + entry.num_new_tokens for entry in batch.entries if entry.samples]
        with _device_errors():
            logits = self._forward(layout)
            with torch.no_grad():
                return PendingTokens(self.sampler.sample(logits, batch.sampling, positions))

    def _forward(self, layout: BatchLayout) -> Tensor:
        """Logits [num_samples, vocab_size] of a laid-out step."""
        # One row would be compiled as a special case, so there are always two; the padding writes nothing.
        num_rows = max(2, layout.num_tokens)
        inputs = np.zeros((2, num_rows), np.int64)
        inputs[0, : layout.num_tokens] = layout.token_ids
        inputs[1, : layout.num_tokens] = layout.positions
        token_ids, positions = torch.from_numpy(inputs).to(self.device)
        handle = self.binding.handle
        step = AttentionStep(
            plan=self._form.plan(layout),
            num_tokens=layout.num_tokens,
            block_size=self.config.block_size,
            slots=torch.from_numpy(layout.slots).to(self.device),
            blocks_to_clear=torch.from_numpy(layout.blocks_to_clear).to(self.device),
        )
        enter_step(handle, step)
        try:
            with self.binding.installed():
                sample_rows = torch.from_numpy(layout.sample_rows).to(self.device)
                return self.binding.forward_step(token_ids[None], positions[None], sample_rows)
        finally:
            leave_step(handle)

    def weights_changed(self) -> bool:
        """Whether a live module's weights were touched since the last call."""
        return self.binding.is_live and self.binding.weights_changed()

    def close(self) -> None:
        self.binding.close()


class AttentionForm(Protocol):
    def plan(self, layout: BatchLayout) -> AttentionPlan: ...


@contextmanager
def _device_errors() -> Iterator[None]:
    try:
        yield
    except torch.AcceleratorError as error:
        raise DeviceError(str(error)) from error


def _has_cpp_compiler() -> bool:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return shutil.which(get_cpp_compiler()) is not None
    except (InvalidCxxCompiler, RuntimeError, OSError):
        return False


def _cpu_memory() -> int:
    return min(MAX_DEFAULT_CPU_CACHE_BYTES, psutil.virtual_memory().available // 2)
