"""Attention of chunks on a Hopper GPU: this engine's kernel against PyTorch's own, and float32.

python bench/machines/prompt_attention.py --check        compares with a dense float32 reference
python bench/machines/prompt_attention.py                TFLOP/s, in turn, by context and rows of a step
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from nanovllm.kernels.prompt_attention import TILE_ROWS, AttentionSizes, PromptAttention, why_not

DEVICE = torch.device("cuda", 0)


class Problem:
    """Chunks of sequences over caches whose blocks lie in random order, with other blocks of NaN.

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
        shape = num_blocks * block, sizes.num_kv_heads, sizes.head_dim
        caches = torch.full((2, *shape), float("nan"), dtype=sizes.dtype, device=DEVICE)
        for table in self.tables.tolist():
            part = caches[:, table * block : (table + 1) * block]
            part.copy_(torch.randn(part.shape, generator=generator, device=DEVICE))
        self.keys, self.values = caches
        num_rows = sum(rows for _, rows in chunks)
        heads = num_rows, sizes.num_heads, sizes.head_dim
        self.query = (2 * torch.randn(heads, generator=generator, device=DEVICE)).to(sizes.dtype)
        tiles, row = [], 0
        for (start, rows), table in zip(chunks, self.starts, strict=True):
            tiles += [(row + at, start + at, min(TILE_ROWS, rows - at), table) for at in range(0, rows, TILE_ROWS)]
            row += rows
        tiles.sort(key=lambda tile: -tile[1])
        spans = torch.tensor([*tiles, (0, 0, 0, 0)], dtype=torch.int32, device=DEVICE)
        self.step = spans[:, :3].contiguous(), spans[:, 3].contiguous(), self.tables
        self.scaling = sizes.head_dim**-0.5

    @property
    def flops(self) -> float:
        pairs = sum(rows * start + rows * (rows + 1) / 2 for start, rows in self.chunks)
        return 4.0 * pairs * self.sizes.num_heads * self.sizes.head_dim

    def slots(self, chunk: int) -> Tensor:
        (start, rows), table, block = self.chunks[chunk], self.starts[chunk], self.sizes.block_size
        positions = torch.arange(start + rows, device=DEVICE)
        return self.tables[table + positions // block].long() * block + positions % block

    def reference(self, sinks: Tensor | None) -> Tensor:
        """Dense, in float32."""
        sizes, parts, row = self.sizes, [], 0
        for index, (start, rows) in enumerate(self.chunks):
            slots = self.slots(index)
            keys, values = (
                part[slots].float().repeat_interleave(sizes.num_heads // sizes.num_kv_heads, 1)
                for part in (self.keys, self.values)
            )
            scores = torch.einsum("qhd,khd->hqk", self.query[row : row + rows].float(), keys) * self.scaling
            own = torch.arange(start, start + rows, device=DEVICE)[:, None]
            key = torch.arange(start + rows, device=DEVICE)[None]
            is_seen = key <= own
            if sizes.window is not None:
                is_seen &= key > own - sizes.window
            scores = scores.masked_fill(~is_seen, -torch.inf)
            if sinks is not None:
                scores = torch.cat([scores, sinks[:, None, None].expand(-1, rows, 1)], 2)
            weights = scores.softmax(2)[:, :, : start + rows]
            parts.append(torch.einsum("hqk,khd->qhd", weights, values))
            row += rows
        return torch.cat(parts)


def check() -> int:
    """Compare with float32; returns the number of failures."""
    failures = 0
    shapes = [(16, 8, 128), (9, 3, 64), (8, 1, 128), (32, 8, 64), (8, 4, 256), (4, 4, 80)]
    chunk_lists = [
        [(0, 1)], [(0, 7)], [(0, 128)], [(0, 129)], [(0, 1000)], [(64, 64)], [(1024, 300)], [(77, 300)],
        [(0, 300), (640, 200), (5, 3), (4096, 128)], [(3000, 1)],
    ]  # fmt: skip
    for shape, block, dtype in itertools.product(shapes, (16, 64, 128), (torch.bfloat16, torch.float16)):
        for window, has_sinks in ((None, False), (100, False), (1024, True), (None, True)):
            sizes = AttentionSizes(*shape, block, dtype, window)
            if reason := why_not(sizes, DEVICE):
                sys.exit(reason)
            kernel = PromptAttention(sizes, DEVICE)
            for number, chunks in enumerate(chunk_lists):
                problem = Problem(sizes, chunks, seed=number)
                sinks = torch.randn(sizes.num_heads, device=DEVICE) if has_sinks else None
                output = torch.full_like(problem.query, float("nan"))
                kernel.attend(
                    problem.query, problem.keys, problem.values, problem.step, problem.scaling, output, sinks
                )  # fmt: skip
                torch.cuda.synchronize()
                reference = problem.reference(sinks)
                error = float((output.float() - reference).abs().max() / reference.abs().max())
                if not error < (1e-2 if dtype == torch.bfloat16 else 2e-3):
                    failures += 1
                    print(f"{shape} block {block} {dtype} window {window} sinks {has_sinks} {chunks}: {error:.4f}")
                    if failures > 20:
                        return failures
        print(f"{shape}, block {block}, {dtype}: checked", flush=True)
    return failures


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


def measure() -> None:
    print(f"{'heads':>12} {'step':>24} {'own':>8} {'torch':>8}  TFLOP/s")
    for shape in ((16, 8, 128), (32, 8, 128), (9, 3, 64), (16, 8, 256)):
        for chunks in (
            [(0, 8192)], [(57344, 8192)], [(114688, 8192)], [(0, 1024)] * 8, [(8192, 512)], [(0, 2048)] * 4,
        ):  # fmt: skip
            sizes = AttentionSizes(*shape, 64, torch.bfloat16)
            problem, kernel = Problem(sizes, chunks), PromptAttention(sizes, DEVICE)
            output = torch.empty_like(problem.query)

            def own(kernel=kernel, problem=problem, output=output) -> None:
                kernel.attend(problem.query, problem.keys, problem.values, problem.step, problem.scaling, output)

            figures = [problem.flops / seconds(own) / 1e12]
            if chunks[0][0] == 0:  # a whole prompt: what PyTorch has for contiguous tensors
                rows = chunks[0][1]
                q, k, v = (
                    torch.randn(len(chunks), heads, rows, shape[2], dtype=torch.bfloat16, device=DEVICE)
                    for heads in (shape[0], shape[1], shape[1])
                )

                def library(q=q, k=k, v=v) -> None:
                    torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

                with torch.nn.attention.sdpa_kernel(
                    [torch.nn.attention.SDPBackend.CUDNN_ATTENTION, torch.nn.attention.SDPBackend.FLASH_ATTENTION]
                ):
                    figures.append(problem.flops / seconds(library) / 1e12)
            print(f"{shape!s:>12} {chunks[0]!s:>18} x {len(chunks):<3} ", *(f"{f:8.0f}" for f in figures), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with float32")
    sys.exit(check() if parser.parse_args().check else measure())
