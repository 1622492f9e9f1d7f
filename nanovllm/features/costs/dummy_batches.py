"""Batches without requests, for measurements, warm-up and numerical checks at start-up."""

from __future__ import annotations

from collections.abc import Iterable

from nanovllm.batch import ScheduledBatch, ScheduledSequence
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.sampling_params import SamplingParams
from nanovllm.model import ModelBinding
from nanovllm.sequence import NewRequest, Sequence

Spans = Iterable[tuple[int, int]]  # (start, number of new tokens) of each sequence of a batch
COMPARED_ROWS = 8  # rows at each end of the positions


def dummy_batch(binding: ModelBinding, config: EngineConfig, spans: Spans, *, apart: bool = False) -> ScheduledBatch:
    """One sequence for each span, all of them in block 1.

    Args:
        apart: give each sequence its own last block, so that none reads another's writes.
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
        entries.append(ScheduledSequence(sequence, start, num_tokens, 1, blocks, 0))
    return ScheduledBatch(0, tuple(entries))


def warm_up_spans(config: EngineConfig) -> list[Spans]:
    """A batch of a chunk and one of decodes, for which layers compile; none where a chunk does not fit."""
    longest = min(config.max_model_len - 1, config.max_num_batched_tokens - config.max_num_seqs)
    num_tokens = min(config.block_size + 5, longest)
    if num_tokens < 2:
        return []
    return [[(0, num_tokens)], [(num_tokens - 1, 1)] * min(2, config.max_num_seqs)]


def comparison_spans(config: EngineConfig) -> tuple[list[Spans], list[Spans]]:
    """Batches with rows at both ends of the positions, since layers may differ only far from the beginning.

    One batch has both ends if their slots in block 1 differ: a model's rows do not depend on each other.

    Returns batches for comparisons by distance, with several rows at each end for a median, and batches for comparisons
    to the bit, with one far row, since attention over long contexts is slow.
    """
    num_tokens = max(1, min(COMPARED_ROWS, config.max_model_len - 1))
    near = (0, num_tokens)
    return _at_both_ends(config, near, num_tokens), _at_both_ends(config, near, 1)


def _at_both_ends(config: EngineConfig, near: tuple[int, int], num_far: int) -> list[Spans]:
    start = config.max_model_len - 1 - num_far
    spans = [near, (start, num_far)] if start > 0 else [near]
    slots = [(first + row) % config.block_size for first, count in spans for row in range(count)]
    is_one = len(spans) <= config.max_num_seqs and len(slots) <= config.max_num_batched_tokens
    return [spans] if is_one and len(set(slots)) == len(slots) else [[span] for span in spans]
