"""Times the decode kernel beside FlexAttention: `MEASURED` of `kernels/paged_decode.py` was read off here.

    python bench/machines/paged_decode.py 4x384 64x640 256x100-1500 64x640+8200 --variants --cuts

Each case is count x context, the context fixed or drawn from a range, and longer contexts behind `+`. Times are a
layer's, of a replayed CUDA graph over several layers' caches, so that none of it is in the GPU's cache; heads of 128
by default, bfloat16, blocks of 64.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from nanovllm.attention.flex_decodes import FlexDecodes
from nanovllm.attention.flex_gpu_options import Gpu, KernelOptions
from nanovllm.kernels.paged_decode import MEASURED, DecodeSizes, PagedDecode

BLOCK_SIZE, CACHE_BYTES = 64, 160e6  # what all layers read together, at least: more than the GPU's cache holds
CUDA = torch.device("cuda")


def contexts_of(case: str) -> list[int]:
    """The longest first, as in an engine's step."""
    draw, contexts = random.Random(1), []
    for part in case.split("+"):
        count, _, span = part.rpartition("x")
        low, _, high = span.partition("-")
        contexts += [draw.randint(int(low), int(high or low)) for _ in range(int(count or 1))]
    return sorted(contexts, reverse=True)


class Case:
    def __init__(self, contexts: list[int], heads: tuple[int, int, int], rows: int) -> None:
        num_heads, num_kv_heads, head_dim = heads
        token_bytes = 2 * num_kv_heads * head_dim * 2
        self.num_bytes = sum(contexts) * token_bytes
        num_layers = int(min(96, max(8, -(-CACHE_BYTES // self.num_bytes))))
        counts = [-(-context // BLOCK_SIZE) for context in contexts]
        num_blocks, padding = sum(counts) + 1, max(0, rows - len(contexts))
        tables = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(0)).int() + 1
        starts = [sum(counts[:number]) for number in range(len(counts))]
        self.step = [
            tables.to(CUDA),
            *(torch.tensor([*part, *[0] * padding], dtype=torch.int32).to(CUDA) for part in (starts, counts)),
            torch.tensor([*(context - 1 for context in contexts), *[0] * padding]).to(CUDA),
        ]
        self.caches = torch.empty(
            num_layers, 2, num_blocks * BLOCK_SIZE, num_kv_heads, head_dim, dtype=torch.bfloat16, device=CUDA
        ).normal_()
        self.query = torch.randn(len(contexts) + padding, num_heads, head_dim, dtype=torch.bfloat16, device=CUDA)
        self.contexts, self.heads = contexts, (num_kv_heads, num_heads // num_kv_heads, head_dim * 2)
        self.options = KernelOptions(Gpu.from_device(CUDA), *self.heads, BLOCK_SIZE)

    def micros(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> float:
        """Of a layer, the median of some replays."""

        def run() -> None:
            for keys, values in self.caches:
                attend(self.query, keys, values)

        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(stream):
            run()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            run()
            graph.capture_end()
            times = []
            for _ in range(12):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end))
        return 1e3 * sorted(times[2:])[5] / len(self.caches)

    def flex(self) -> float:
        rows = len(self.query)
        flex = FlexDecodes(self.options, max_decodes=rows, max_blocks=-(-max(self.contexts) // BLOCK_SIZE), device=CUDA)
        flex.fill(*self.step)
        return self.micros(lambda query, keys, values: flex.attend(query, keys, values, query.shape[2] ** -0.5))

    def kernel(self, sizes: DecodeSizes) -> float:
        kernel = PagedDecode(
            self.heads, BLOCK_SIZE, gpu=self.options.gpu, max_decodes=len(self.query), device=CUDA, sizes=sizes
        )
        kernel.fill(*self.step)
        return self.micros(lambda query, keys, values: kernel.attend(query, keys, values, query.shape[2] ** -0.5))


def variants() -> Iterator[DecodeSizes]:
    for tile, num_stages, num_warps in ((32, 4, 2), (64, 3, 4), (64, 2, 4), (32, 4, 4), (32, 3, 2)):
        yield MEASURED._replace(tile=tile, num_stages=num_stages, num_warps=num_warps)


def cuts(sizes: DecodeSizes) -> Iterator[DecodeSizes]:
    for least, most in itertools.combinations_with_replacement((1, 2, 3, 4, 6), 2):
        yield sizes._replace(least_programs=least, most_programs=most)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", metavar="COUNTxCONTEXT")
    parser.add_argument("--heads", type=int, nargs=3, default=[16, 8, 128], help="query heads, KV heads, head size")
    parser.add_argument("--rows", type=int, default=0, help="decodes of the step with padding")
    parser.add_argument("--variants", action="store_true", help="tiles, stages and warps")
    parser.add_argument("--cuts", action="store_true", help="programs of a multiprocessor")
    parser.add_argument("--no-flex", action="store_true")
    arguments = parser.parse_args()
    for name in arguments.cases:
        case = Case(contexts_of(name), tuple(arguments.heads), arguments.rows)

        def show(label: str, micros: Any, case: Case = case, name: str = name) -> None:
            rate = case.num_bytes / micros / 1e6
            print(f"{name:>16} {label:74} {micros:8.1f} us {rate:6.2f} TB/s", flush=True)

        if not arguments.no_flex:
            show("flex", case.flex())
        for variant in variants() if arguments.variants else (MEASURED,):
            found = sorted((case.kernel(sizes), sizes) for sizes in (cuts(variant) if arguments.cuts else (variant,)))
            for micros, sizes in found[:3]:
                show(" ".join(f"{key} {size}" for key, size in sizes._asdict().items()), micros)


if __name__ == "__main__":
    main()
