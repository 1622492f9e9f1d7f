"""Times the kernel of norms of q and k, rotary embedding and KV write, by itself and in several shapes.

    python bench/machines/rotary_store.py 1 4 64 256 8192

Each argument is a number of rows; 16 query and 8 KV heads of 128, bfloat16. First the kernel is compared with the plain
formula in float32. Times are of a replayed CUDA graph over several layers' caches and products.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

from nanovllm.kernels.rotary import rotate_and_store_heads

HEADS, KV_HEADS, HEAD_DIM, EPSILON, LAYERS = 16, 8, 128, 1e-6, 12


def run(inputs: dict[str, Tensor], products: Tensor, cache: Tensor, at_once: int, num_warps: int) -> Tensor:
    """products [num_rows, (HEADS + 2 KV_HEADS) * HEAD_DIM]; returns the queries [num_rows, HEADS, HEAD_DIM]."""
    query = products.new_empty(len(products), HEADS, HEAD_DIM)
    grid: Any = (len(products), -(-HEADS // at_once) - (-KV_HEADS // at_once))
    rotate_and_store_heads[grid](
        products, inputs["query_weight"], inputs["key_weight"], inputs["cosines"], inputs["sines"], inputs["slots"],
        query, cache[0], cache[1], EPSILON, HEADS, KV_HEADS, HEAD_DIM, 1 << (HEAD_DIM - 1).bit_length(), at_once, True,
        num_warps=num_warps,
    )  # fmt: skip
    return query


def expected(inputs: dict[str, Tensor], products: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value in float32."""
    states = products.float().view(len(products), -1, HEAD_DIM)
    query, key, value = states.split((HEADS, KV_HEADS, KV_HEADS), dim=1)

    def rotated(heads: Tensor, weight: Tensor) -> Tensor:
        heads = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + EPSILON) * weight.float()
        first, second = heads.chunk(2, dim=-1)
        cos, sin = (inputs[name].float()[:, None] for name in ("cosines", "sines"))
        return heads * cos + torch.cat((-second, first), dim=-1) * sin

    return rotated(query, inputs["query_weight"]), rotated(key, inputs["key_weight"]), value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", type=int)
    for num_rows in parser.parse_args().rows:

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, device="cuda").to(torch.bfloat16)

        slots = torch.randperm(2 * num_rows, device="cuda")[:num_rows]
        weights = {"query_weight": randn(HEAD_DIM), "key_weight": randn(HEAD_DIM)}
        inputs = {**weights, "cosines": randn(num_rows, HEAD_DIM), "sines": randn(num_rows, HEAD_DIM), "slots": slots}
        products = randn(LAYERS, num_rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        caches = torch.zeros(LAYERS, 2, 2 * num_rows, KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        for at_once, num_warps in ((8, 4), (8, 2), (4, 2), (4, 1), (2, 1), (8, 1)):
            query = run(inputs, products[0], caches[0], at_once, num_warps)
            for found, right in zip((query, *caches[0][:, slots]), expected(inputs, products[0]), strict=True):
                torch.testing.assert_close(found.float(), right, atol=3e-2, rtol=2e-2)
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                graph.capture_begin()
                for layer in range(LAYERS):
                    run(inputs, products[layer], caches[layer], at_once, num_warps)
                graph.capture_end()
            times = []
            for _ in range(20):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end))
            micros = 1e3 * sorted(times)[10] / LAYERS
            print(f"{num_rows:6} rows, {at_once} heads at once, {num_warps} warps: {micros:6.2f} us", flush=True)


if __name__ == "__main__":
    main()
