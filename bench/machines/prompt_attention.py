"""Attention of chunks on a Hopper GPU, TFLOP/s by context and rows of a step: this engine's kernel and PyTorch's own.

python bench/machines/prompt_attention.py
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable

import numpy as np
import torch

from nanovllm.attention.tiles import spans_of
from nanovllm.cache.state_kinds import StateKind
from nanovllm.kernels.prompt_attention import AttentionSizes, PromptAttention, why_not

DEVICE = torch.device("cuda", 0)


class Problem:
    """Chunks of sequences over caches whose blocks lie in random order.

    chunks: (first position, number of rows) of each.
    """

    def __init__(self, sizes: AttentionSizes, chunks: list[tuple[int, int]], seed: int = 0) -> None:
        generator = torch.Generator(DEVICE).manual_seed(seed)
        block = sizes.block_size
        counts = [-(-(start + rows) // block) for start, rows in chunks]
        num_blocks = sum(counts) + 8
        order = (torch.randperm(num_blocks - 1, generator=generator, device=DEVICE) + 1).to(torch.int32)
        self.sizes, self.chunks = sizes, chunks
        self.tables = order[: sum(counts)].contiguous()
        self.starts = [0, *itertools.accumulate(counts)][:-1]
        self.keys, self.values = (
            torch.randn(num_blocks * block, sizes.num_kv_heads, width, generator=generator, device=DEVICE).to(
                sizes.dtype
            )
            for width in sizes.widths
        )
        num_rows = sum(rows for _, rows in chunks)
        heads = num_rows, sizes.num_heads, sizes.head_dim
        self.query = (2 * torch.randn(heads, generator=generator, device=DEVICE)).to(sizes.dtype)
        starts, rows = (np.array(part) for part in zip(*chunks, strict=True))
        spans = np.pad(spans_of(np.cumsum(rows) - rows, starts, starts + rows), ((0, 1), (0, 0)))  # one is unused
        tiles, tables = (torch.tensor(part, dtype=torch.int32, device=DEVICE) for part in (spans[:, 1:], self.starts))
        self.step = tiles.contiguous(), tables[spans[:, 0]], self.tables
        self.scaling = sizes.head_dim**-0.5

    @property
    def flops(self) -> float:
        sight = StateKind(self.sizes.window, self.sizes.chunk)
        pairs = sum(sight.num_pairs(start, rows) for start, rows in self.chunks)
        return 2.0 * pairs * self.sizes.num_heads * sum(self.sizes.widths)


def seconds(call: Callable[[], None], *, calls: int = 10, repeats: int = 7) -> float:
    """Median of GPU seconds a call, of several in a row, so that the host launches ahead."""
    call()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(2_000_000)  # a millisecond, in which the first calls are launched
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / calls / 1e3)
    return statistics.median(times)


FORMS = {
    "16/8 of 128": AttentionSizes(16, 8, 128, 64, torch.bfloat16),
    "32/8 of 128": AttentionSizes(32, 8, 128, 64, torch.bfloat16),
    "9/3 of 64": AttentionSizes(9, 3, 64, 64, torch.bfloat16),
    "16/8 of 256": AttentionSizes(16, 8, 256, 64, torch.bfloat16),
    "16/8 of 128, soft-cap 50": AttentionSizes(16, 8, 128, 64, torch.bfloat16, None, 50.0),
    "16/8 of 256, soft-cap 50": AttentionSizes(16, 8, 256, 64, torch.bfloat16, None, 50.0),
    "40/8 of 128, chunks of 8,192": AttentionSizes(40, 8, 128, 64, torch.bfloat16, chunk=8192),
    "16/16 of 192, values of 128": AttentionSizes(16, 16, 192, 64, torch.bfloat16, value_dim=128),
}
STEPS = (
    [(0, 8192)], [(57344, 8192)], [(114688, 8192)], [(0, 2048)] * 4, [(0, 1024)] * 8, [(0, 512)] * 16, [(0, 256)] * 32,
    [(0, 1024)], [(8192, 512)], [(8192, 1152)], [(32768, 128)],
)  # fmt: skip


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(f"{torch.cuda.get_device_name()}\n{'heads':>30} {'step':>22} {'own':>8} {'torch':>8}  TFLOP/s")
    for form, sizes in FORMS.items():
        if reason := why_not(sizes, DEVICE):
            sys.exit(reason)
        kernel = PromptAttention(sizes, DEVICE)
        for chunks in STEPS:
            problem = Problem(sizes, chunks)
            output = problem.query.new_empty(*problem.query.shape[:2], sizes.widths[1])

            def own(kernel=kernel, problem=problem, output=output) -> None:
                kernel.attend(problem.query, problem.keys, problem.values, problem.step, problem.scaling, output)

            figures = [problem.flops / seconds(own) / 1e12]
            if chunks[0][0] == 0 and sizes[5:] == (None, None, None, None):  # what PyTorch has for contiguous tensors
                figures.append(problem.flops / seconds(library_call(sizes, chunks)) / 1e12)
            print(f"{form:>30} {chunks[0]!s:>16} x {len(chunks):<3} ", *(f"{f:8.0f}" for f in figures), flush=True)


def library_call(sizes: AttentionSizes, chunks: list[tuple[int, int]]) -> Callable[[], None]:
    """Attention of as many whole prompts by cuDNN or FlashAttention-2, whichever PyTorch prefers."""
    shape = chunks[0][1], sizes.head_dim
    q, k, v = (
        torch.randn(len(chunks), heads, *shape, dtype=sizes.dtype, device=DEVICE)
        for heads in (sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads)
    )
    backends = [torch.nn.attention.SDPBackend.CUDNN_ATTENTION, torch.nn.attention.SDPBackend.FLASH_ATTENTION]

    def call() -> None:
        with torch.nn.attention.sdpa_kernel(backends):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return call


if __name__ == "__main__":
    main()
