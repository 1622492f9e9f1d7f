"""What the host pays before attention: `pytest bench/micro/test_bench_layout.py`. Times are reported, never asserted.

The layout of a step's rows, and on top of it FlexAttention's block mask, which is the block tables turned into indices,
or the plan of the C++ kernels, whose block tables stay from step to step. extra_info holds microseconds per row.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from nanovllm.attention.cpp import CppAttention
from nanovllm.attention.flex_cpu import FlexAttention
from nanovllm.cache.kinds import LayerTraits
from nanovllm.core.batch import ScheduledSequence
from nanovllm.core.batch_layout import BatchLayout, build_layout
from nanovllm.core.sampling_params import SamplingParams
from nanovllm.core.sequence import NewRequest, Sequence
from nanovllm.kernels.cpp import load_kernels

BLOCK_SIZE = 64
NUM_BLOCKS = 40_000
STEPS = {  # (requests, tokens before the step, tokens in the step)
    "64 decodes at 1,000": [(64, 1000, 1)],
    "256 decodes at 1,000": [(256, 1000, 1)],
    "64 decodes at 32,000": [(64, 32_000, 1)],
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


@pytest.mark.parametrize("num_shared", [0, 31_000], ids=["all apart", "31,000 in common"])
def test_plan_of_64_decodes_at_32k(benchmark: BenchmarkFixture, num_shared: int) -> None:
    """Steps that follow one another; a sixty-fourth of them begin new blocks."""
    entries, steps = entries_of("64 decodes at 32,000"), itertools.count()
    for entry in entries:
        entry.block_table[: num_shared // BLOCK_SIZE] = entries[0].block_table[: num_shared // BLOCK_SIZE]
    backend = CppAttention(
        [LayerTraits(9, 3, 64, 64)], [load_kernels(torch.bfloat16, 64, 3)], num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE
    )

    def next_layout() -> tuple[tuple[BatchLayout], dict[str, object]]:
        start = 31_300 + next(steps)
        placed = [entry._replace(start=start, num_computed_before=start) for entry in entries]
        return (build_layout(placed, BLOCK_SIZE),), {}

    benchmark.pedantic(backend.plan, setup=next_layout, rounds=640, warmup_rounds=1)
    benchmark.extra_info["us per row"] = round(benchmark.stats.stats.median * 1e6 / len(entries), 3)
