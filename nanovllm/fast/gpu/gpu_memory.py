"""GPU memory of steps beyond the weights: measured in a worst-case step, estimated for captured ones."""

from __future__ import annotations

import gc
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.attention import AttentionBackend
from nanovllm.fast.attention.backends import AttentionChoice
from nanovllm.fast.attention.flex_chunks import most_listed
from nanovllm.fast.attention.flex_decodes import most_kv_tiles
from nanovllm.fast.attention.flex_gpu import layers_by_kind
from nanovllm.fast.attention.flex_gpu_options import KernelOptions
from nanovllm.fast.attention.no_attention import NoAttention
from nanovllm.fast.fast_draws import fast_sampler
from nanovllm.fast.gpu.forward_graphs import MAX_GRAPHS
from nanovllm.features.costs.buckets import Buckets
from nanovllm.features.costs.dummy_batches import dummy_batch
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.groups.group_layouts import with_groups
from nanovllm.features.live_modules.module_watch import tensors_of
from nanovllm.layout import BatchLayout, build_layout
from nanovllm.model import ModelBinding, modules_of
from nanovllm.model_runner import DirectExecutor
from nanovllm.sampler import FILTERED_AT_ONCE, Sampler

_OTHER_BYTES = 256 * 2**20  # memory besides a model's weights: workspaces of libraries, inputs of kernels
GRAPH_BYTES_PER_LAYER = 64 * 2**10  # device memory of a captured forward pass


class StepPeaks(NamedTuple):
    """Peak bytes of a step beyond the weights: up to its logits, and with the host's sampler."""

    forward: int
    whole: int


def free_earlier_engines(binding: ModelBinding) -> None:
    """Free engines that reference cycles hold, where the device holds more than this model.

    A collection takes 0.3 s after the imports of a start.
    """
    storages = {part.untyped_storage().data_ptr(): part.nbytes for part in tensors_of(modules_of(binding.model))}
    if torch.cuda.memory_allocated(binding.device) > sum(storages.values()) + _OTHER_BYTES:
        gc.collect()


def measure_peaks(binding: ModelBinding, config: EngineConfig, choice: AttentionChoice) -> StepPeaks:
    """Run a worst-case step, uncompiled, since the cache has no size yet."""
    # One chunk of the whole budget at the end of the longest sequence, so that it takes a mask where there is room for
    # an earlier chunk, and the maximum number of decodes, which gather less. All share one block: only sizes matter.
    chunk = config.max_num_batched_tokens - config.max_num_seqs + 1
    chunk = min(chunk, max(1, config.max_model_len - 2))
    spans = [(0, 1)] * (config.max_num_seqs - 1) + [(config.max_model_len - 1 - chunk, chunk)]
    batch = dummy_batch(binding, config, spans)
    backend: AttentionBackend = NoAttention()
    if not choice.uses_graphs:
        backend = _AttentionOncePerKind(choice.build(binding.layers, binding.device, config, uncompiled=True))
    sampler = _MeasuredSampler(fast_sampler(compiles=choice.uses_graphs), binding.device)
    binding.caches.allocate(2 * config.block_size)
    executor = DirectExecutor(binding, backend, config.block_size, sampler)  # type: ignore[arg-type]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(binding.device)
    before = torch.cuda.memory_allocated(binding.device)
    layout = build_layout(batch.entries, config.block_size, longest_first=choice.uses_graphs)
    if binding.mixers:
        layout = with_groups(layout, [False, True], config.block_size)
    executor.launch(batch, layout, backend.plan(layout), None)()
    torch.cuda.synchronize(binding.device)
    peaks = StepPeaks(sampler.peak_before - before, torch.cuda.max_memory_allocated(binding.device) - before)
    del executor
    binding.release_caches()
    torch.cuda.empty_cache()
    return peaks


def workspace_bytes(binding: ModelBinding, config: EngineConfig, peaks: StepPeaks) -> int:
    """Bytes of an executor with graphs beyond the measured peaks.

    The graphs' pool keeps the memory of a forward pass, so a step without a graph (a shape that none holds, prompt
    logits, hooks) allocates a second one.
    """
    firsts = layers_by_kind(binding.layers)
    of_kinds = [KernelOptions.for_layer(layer, binding.device, config.block_size) for layer in firsts]
    buckets = Buckets(config)
    # Elements of queries and outputs per row.
    head_values = [layer.traits.num_heads * (layer.traits.head_dim + layer.traits.value_dim) for layer in firsts]
    tile_bytes = config.block_size * max(head_values, default=0) * binding.dtype.itemsize
    # Logits twice, in float32 where they are changed, and counts of tokens; without kernels, a sort of some rows.
    sampling = buckets.max_decodes * (2 * binding.dtype.itemsize + 10) + 40 * FILTERED_AT_ONCE
    sampling *= binding.vocab_size
    max_blocks = -(-config.max_model_len // config.block_size)
    tables = 0
    for options in of_kinds:
        kv_tiles = most_kv_tiles(options.sight, config.block_size, max_blocks)
        width = most_listed(options.sight, config.block_size, max_blocks) + 1
        tables += 4 * (buckets.max_decodes * (kv_tiles + 4) + buckets.max_tiles * 2 * (width + 1))
    graphs = 0
    if config.cuda_graphs:
        graphs = peaks.forward + buckets.max_captured_tiles * tile_bytes
        # Float32 tensors in the graphs' pool: logits after penalties, and masked logits for filters.
        graphs += 8 * buckets.max_decodes * binding.vocab_size
        num_layers = len(binding.layers) + len(binding.mixers.shapes)
        graphs += MAX_GRAPHS * GRAPH_BYTES_PER_LAYER * num_layers
    tiles = buckets.max_tiles * tile_bytes
    splits = sum(split_bytes(options, buckets.max_decodes) for options in of_kinds)
    return tiles + sampling + splits + tables + graphs


def split_bytes(options: KernelOptions, max_decodes: int) -> int:
    """Bytes of the outputs of split decodes in float32, each with a log-sum-exp and an arrival counter.

    An output has head_bytes / element_bytes values; for float32 heads this overestimates.
    """
    heads = options.num_kv_heads * options.padded_groups
    return options.most_splits(max_decodes) * heads * 4 * (options.head_bytes // options.element_bytes + 2)


class _MeasuredSampler:
    """A sampler that records the peak memory before its call."""

    def __init__(self, sampler: Sampler, device: torch.device) -> None:
        self._sampler = sampler
        self._device = device
        self.peak_before = 0

    def sample(self, *arguments: Any) -> Tensor:
        self.peak_before = torch.cuda.max_memory_allocated(self._device)
        return self._sampler.sample(*arguments)


class _AttentionOncePerKind(NoAttention):
    """Attends only in the first layer of each kind: further layers reuse the same memory."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend

    def plan(self, layout: BatchLayout) -> NoAttention:
        self._plan = self._backend.plan(layout)
        self._done: set[int] = set()
        return self

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, *others: Any) -> Tensor:
        kind = others[1] if len(others) > 1 else 0
        if kind in self._done:
            return super().attend(query, key_cache, value_cache)
        self._done.add(kind)
        return self._plan.attend(query, key_cache, value_cache, *others)
