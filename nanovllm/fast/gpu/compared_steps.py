"""Steps without requests, by which a GPU's engine compares kernels of layers with the modules at start-up."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from nanovllm.attention import write_states
from nanovllm.features.costs.dummy_batches import dummy_batch, warm_up_spans
from nanovllm.features.engine_config import EngineConfig
from nanovllm.layout import BatchLayout, build_layout
from nanovllm.model import ModelBinding


def run_some_rows(binding: ModelBinding, config: EngineConfig, run_layers: Callable[[BatchLayout], object]) -> None:
    """A step of a chunk and one of decodes, without graphs, for a numerical check of layers."""
    batches = [[*spans] for spans in warm_up_spans(config)[:1]]
    batches += [[(start, 1) for start in starts] for starts in few_decodes(config)[-1:]]
    with values_in_block_one(binding, config.block_size):
        for spans in batches:
            batch = dummy_batch(binding, config, spans, apart=True)
            run_layers(build_layout(batch.entries, config.block_size, {}, longest_first=True))


def run_few_decodes(binding: ModelBinding, config: EngineConfig, run_layers: Callable[[BatchLayout], object]) -> None:
    """Some steps of few decodes without graphs, for a numerical check: each place and each number of decodes once."""
    batches = few_decodes(config)
    with values_in_block_one(binding, config.block_size):
        for starts in (*batches[: -1 : len(batches) // 4 + 1], *batches[-1:]):
            batch = dummy_batch(binding, config, [(start, 1) for start in starts], apart=True)
            run_layers(build_layout(batch.entries, config.block_size, {}, longest_first=True))


def run_many_decodes(binding: ModelBinding, config: EngineConfig, run_layers: Callable[[BatchLayout], object]) -> None:
    """Steps of up to 128 decodes without graphs, for a numerical check: one for each size of a kernel for that many."""
    last = config.max_model_len - 2
    with values_in_block_one(binding, config.block_size):
        for fewer, most in itertools.pairwise((0, 16, 32, 64, 128)):
            count = min(most - 3, config.max_num_seqs)
            if fewer < count and count + 2 < config.num_kv_blocks:
                spans = [(min(last, 3 * number), 1) for number in range(count)]
                batch = dummy_batch(binding, config, spans, apart=True)
                run_layers(build_layout(batch.entries, config.block_size, {}, longest_first=True))


def few_decodes(config: EngineConfig) -> list[list[int]]:
    """Start positions for steps of up to six decodes: early, in a second block and at the end."""
    last = config.max_model_len - 2
    block_size = config.block_size
    places = [(0, 1), (3, 1), (block_size + 2, 7), (last, -1)]  # the first one's position, the next one's distance
    return [
        [min(last, max(0, first + step * number)) for number in range(count)]
        for first, step in places
        for count in sorted({1, 3, min(6, config.max_num_seqs)})
        if count <= config.max_num_seqs and count + 2 < config.num_kv_blocks
    ]


@contextmanager
def values_in_block_one(binding: ModelBinding, block_size: int) -> Iterator[None]:
    """Non-zero K and V in block 1 for a while: zeros would hide errors of attention."""
    slots = torch.arange(block_size, 2 * block_size, device=binding.device)
    for layer, cache in zip(binding.layers, binding.caches.of_layers, strict=True):
        sizes = block_size * layer.traits.num_kv_heads * np.array((layer.traits.head_dim, layer.traits.value_dim))
        key, value = (
            torch.linspace(0.0, size * 0.7, size, dtype=torch.float32, device=binding.device).sin_().to(layer.dtype)
            for size in sizes.tolist()
        )
        shape = 1, block_size, layer.traits.num_kv_heads, -1
        write_states(key.view(shape).transpose(1, 2), value.view(shape).transpose(1, 2), cache, slots)
    try:
        yield
    finally:
        for part in [part for cache in binding.caches.of_layers for part in cache]:
            part[block_size : 2 * block_size].zero_()
