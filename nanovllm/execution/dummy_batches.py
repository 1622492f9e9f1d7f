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
    entries = []
    for start, num_tokens in spans:
        end = start + num_tokens
        tokens = [position % vocab_size for position in range(end)]
        sequence = Sequence(NewRequest("dummy", tokens, SamplingParams(top_p=0.9)), arrival=0, max_model_len=end + 1)
        blocks = [1] * -(-end // config.block_size)
        entries.append(ScheduledSequence(sequence, start, num_tokens, True, blocks, 0))
    return ScheduledBatch(0, tuple(entries))
