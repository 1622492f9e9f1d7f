"""Batches of no request, for measuring, warm-up and numerical checks at start-up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from nanovllm.batch import ScheduledBatch, ScheduledSequence
from nanovllm.config import EngineConfig
from nanovllm.model.binding import ModelBinding
from nanovllm.sampling_params import SamplingParams
from nanovllm.sequence import NewRequest, Sequence

Spans = Iterable[tuple[int, int]]  # (start, number of new tokens) of each sequence of a batch


def dummy_batch(binding: ModelBinding, config: EngineConfig, spans: Spans, *, apart: bool = False) -> ScheduledBatch:
    """One sequence for each span, all of them in block 1.

    Args:
        apart: the last block of each is its own, so that none reads what another one writes.
    """
    vocab_size = binding.model.get_input_embeddings().num_embeddings
    entries = []
    for number, (start, num_tokens) in enumerate(spans):
        end = start + num_tokens
        tokens = [position % vocab_size for position in range(end)]
        sequence = Sequence(NewRequest("dummy", tokens, SamplingParams(top_p=0.9)), arrival=0, max_model_len=end + 1)
        blocks = [1] * -(-end // config.block_size)
        if apart:
            blocks[-1] += 1 + number
        entries.append(ScheduledSequence(sequence, start, num_tokens, True, blocks, 0))
    return ScheduledBatch(0, tuple(entries))


def warm_up_spans(config: EngineConfig) -> list[Spans]:
    """A batch of a chunk and one of decodes, for which layers compile; none where a chunk does not fit."""
    longest = min(config.max_model_len - 1, config.max_num_batched_tokens - config.max_num_seqs)
    num_tokens = min(config.block_size + 5, longest)
    if num_tokens < 2:
        return []
    return [[(0, num_tokens)], [(num_tokens - 1, 1)] * min(2, config.max_num_seqs)]


def comparison_spans(config: EngineConfig) -> list[Spans]:
    """A batch at each end of the positions, since a layer may compute something else far from the beginning."""
    num_tokens = max(1, min(8, config.max_model_len - 1))
    return [[(start, num_tokens)] for start in {0, max(0, config.max_model_len - 1 - num_tokens)}]


def few_decodes(config: EngineConfig) -> list[list[int]]:
    """Start positions of steps of up to three decodes: early, in a second block and at the end."""
    last, block_size = config.max_model_len - 2, config.block_size
    places = [(0, 1), (3, 1), (block_size + 2, 7), (last, -1)]  # the first one's position, the next one's distance
    return [
        [min(last, max(0, first + step * number)) for number in range(count)]
        for first, step in places
        for count in (1, 2, 3)
        if count <= config.max_num_seqs and count + 2 < config.num_kv_blocks
    ]


@contextmanager
def values_in_block_one(binding: ModelBinding, block_size: int) -> Iterator[None]:
    """Some K and V in block 1 for a while, where zeros would hide what attention computes."""
    blocks = [part[block_size : 2 * block_size] for cache in binding.caches.of_layers for part in cache]
    for block in blocks:
        size = block.numel()
        block.copy_(torch.linspace(0.0, size * 0.7, size, device=block.device).sin_().view(block.shape))
    try:
        yield
    finally:
        for block in blocks:
            block.zero_()
