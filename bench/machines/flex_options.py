"""Sweeps the options of FlexAttention's decode kernel: what `attention/flex_gpu_options.py` holds was read off here.

    python bench/machines/flex_options.py 4:384 64:640 256:100-1500

Each argument is batch:context, the context fixed or drawn from a range. Times are a layer's, of a replayed CUDA graph
over several layers' caches, so that none of it is in the GPU's cache; 16 query and 8 KV heads of 128, bfloat16.
"""

from __future__ import annotations

import argparse
import itertools
import random

import torch
from gpu_timing import replayed_micros  # beside this file

from nanovllm.attention import flex_decodes
from nanovllm.attention.flex_gpu_options import DecodeOptions

HEADS, KV_HEADS, HEAD_DIM, PAGE, LAYERS = 16, 8, 128, 64, 12


def time_of(batch: int, contexts: list[int], piece: int, options: dict[str, int]) -> float:
    """Microseconds a layer."""
    pages = [-(-context // PAGE) for context in contexts]
    num_pages = sum(pages) + 1
    order = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(0), dtype=torch.int32).cuda() + 1
    counts = torch.tensor(pages, dtype=torch.int32).cuda()
    last = torch.tensor([context - 1 for context in contexts]).cuda()
    tables = flex_decodes.DecodeTables(
        *(torch.zeros(shape, dtype=torch.int32, device="cuda") for shape in
          ((batch, 1, 1), (batch, 1, 1, max(pages) * PAGE // piece + 1), (batch,), (batch,)))
    )  # fmt: skip
    starts = (counts.cumsum(0) - counts).int()
    flex_decodes.fill_decodes(tables.parts(), order, starts, counts, last, PAGE, piece)
    caches = torch.randn(LAYERS, 2, num_pages * PAGE, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    query = torch.randn(batch, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    call = flex_decodes.DecodeCall(KV_HEADS, DecodeOptions(piece, {"IS_DIVISIBLE": True, **options}))

    def run() -> None:
        for keys, values in caches:
            call(query, keys.transpose(0, 1)[None], values.transpose(0, 1)[None], tables, HEAD_DIM**-0.5)

    return replayed_micros(run) / LAYERS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", metavar="BATCH:CONTEXT")
    parser.add_argument("--splits", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--stages", nargs="+", type=int, default=[3])
    parser.add_argument("--warps", nargs="+", type=int, default=[4])
    parser.add_argument("--piece", nargs="+", type=int, default=[64])
    arguments = parser.parse_args()
    for case in arguments.cases:
        batch, _, context = case.partition(":")
        low, _, high = context.partition("-")
        draw = random.Random(1)
        contexts = [draw.randint(int(low), int(high or low)) for _ in range(int(batch))]
        num_bytes = sum(contexts) * 2 * KV_HEADS * HEAD_DIM * 2
        for piece, stages, warps, splits in itertools.product(
            arguments.piece, arguments.stages, arguments.warps, arguments.splits
        ):
            options = {"BLOCK_N": piece, "num_stages": stages, "num_warps": warps, "SPLIT_KV": splits}
            try:
                micros = time_of(int(batch), contexts, piece, options)
            except Exception as error:
                print(f"{case:>14} {options}: {type(error).__name__}", flush=True)
                continue
            print(f"{case:>14} piece {piece} stages {stages} warps {warps} splits {splits:2}: {micros:8.1f} us "
                  f"{num_bytes / micros / 1e6:6.2f} TB/s", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
