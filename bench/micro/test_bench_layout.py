"""What the host pays before attention: `pytest bench/micro/test_bench_layout.py`. Times are reported, never asserted.

The layout of a step's rows, and on top of it FlexAttention's block mask, which is the block tables turned into indices.
extra_info holds microseconds per row.
"""

from __future__ import annotations

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from nanovllm.attention.flex_cpu import FlexAttention
from nanovllm.cache.kinds import LayerTraits
from nanovllm.core.batch import ScheduledSequence
from nanovllm.core.batch_layout import build_layout
from nanovllm.core.sampling_params import SamplingParams
from nanovllm.core.sequence import NewRequest, Sequence

BLOCK_SIZE = 64
NUM_BLOCKS = 8192
STEPS = {  # (requests, tokens before the step, tokens in the step)
    "64 decodes at 1,000": [(64, 1000, 1)],
    "256 decodes at 1,000": [(256, 1000, 1)],
    "a chunk of 8,192": [(1, 0, 8192)],
    "63 decodes at 1,000 and a chunk of 960 behind 4,096": [(63, 1000, 1), (1, 4096, 960)],
}


def entries_of(step: str) -> list[ScheduledSequence]:
    entries: list[ScheduledSequence] = []
    next_block = 1
    for count, start, num_new_tokens in STEPS[step]:
        for _ in range(count):
            tokens = list(range(start + num_new_tokens))
            sequence = Sequence(
                NewRequest(str(len(entries)), tokens, SamplingParams()),
                arrival=len(entries),
                max_model_len=len(tokens) + 1,
            )
            num_pages = -(-len(tokens) // BLOCK_SIZE)
            table = list(range(next_block, next_block + num_pages))
            next_block += num_pages
            entries.append(ScheduledSequence(sequence, start, num_new_tokens, 1, table, start))
    assert next_block <= NUM_BLOCKS
    return entries


@pytest.mark.parametrize("step", STEPS)
def test_layout(benchmark: BenchmarkFixture, step: str) -> None:
    entries = entries_of(step)
    layout = benchmark(build_layout, entries, BLOCK_SIZE)
    benchmark.extra_info["us per row"] = round(benchmark.stats.stats.median * 1e6 / layout.num_tokens, 3)


@pytest.mark.parametrize("step", STEPS)
def test_block_mask(benchmark: BenchmarkFixture, step: str) -> None:
    layout = build_layout(entries_of(step), BLOCK_SIZE)
    form = FlexAttention(
        num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, kinds=[LayerTraits(4, 2, 64, 64)], max_num_seqs=256,
        max_num_batched_tokens=8192, device=torch.device("cpu"),
    )  # fmt: skip
    benchmark(form.plan, layout)
    benchmark.extra_info["us per row"] = round(benchmark.stats.stats.median * 1e6 / layout.num_tokens, 3)
