"""Batches of no request, for measuring, warm-up and numerical checks at start-up."""

from __future__ import annotations

from collections.abc import Iterable

from nanovllm.batch import ScheduledBatch, ScheduledSequence
from nanovllm.config import EngineConfig
from nanovllm.model.binding import ModelBinding
from nanovllm.sampling_params import SamplingParams
from nanovllm.sequence import NewRequest, Sequence


def dummy_batch(binding: ModelBinding, config: EngineConfig, spans: Iterable[tuple[int, int]]) -> ScheduledBatch:
    """One sequence for each (start, number of new tokens), all of them in block 1."""
    vocab_size = binding.model.get_input_embeddings().num_embeddings
    return ScheduledBatch(0, tuple(_entry(start, count, vocab_size, config.block_size) for start, count in spans))


def _entry(start: int, num_tokens: int, vocab_size: int, block_size: int) -> ScheduledSequence:
    end = start + num_tokens
    tokens = [position % vocab_size for position in range(end)]
    sequence = Sequence(NewRequest("dummy", tokens, SamplingParams(top_p=0.9)), arrival=0, max_model_len=end + 1)
    return ScheduledSequence(sequence, start, num_tokens, True, [1] * -(-end // block_size), 0)
