"""Times norms of q and k, rotary embedding and KV write as one Triton kernel, by itself: nothing uses it yet.

    python bench/machines/rotary_store.py 1 4 64 256 8192

Each argument is a number of rows; 16 query and 8 KV heads of 128, bfloat16. First the kernel is compared with the plain
formula in float32. Times are of a replayed CUDA graph over several layers' caches and products.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS, KV_HEADS, HEAD_DIM, EPSILON, LAYERS = 16, 8, 128, 1e-6, 12


@triton.jit
def _rotated(states, weight, at, other_at, cos, sin, epsilon, is_there, dims, HEAD_DIM: tl.constexpr):
    """Normalised and rotated heads, [heads, dims]; `other_at` is where each element's partner of the pair lies."""
    own = tl.load(states + at, mask=is_there, other=0.0).to(tl.float32)
    other = tl.load(states + other_at, mask=is_there, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(own * own, 1) / HEAD_DIM + epsilon)[:, None]
    partner = (dims + HEAD_DIM // 2) % HEAD_DIM
    own_weight = tl.load(weight + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
    other_weight = tl.load(weight + partner, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
    sign = tl.where(dims < HEAD_DIM // 2, -1.0, 1.0)[None, :]
    return own * factor * own_weight * cos + sign * other * factor * other_weight * sin


@triton.jit
def rotate_and_store(
    products, query_weight, key_weight, cosines, sines, slot_mapping, query, key_cache, value_cache, stride, epsilon,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """A program takes AT_ONCE heads of one row: of the queries, or of keys and values."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims, heads = tl.arange(0, DIMS), part * AT_ONCE + tl.arange(0, AT_ONCE)
    is_dim = dims < HEAD_DIM
    cos = tl.load(cosines + row * HEAD_DIM + dims, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sines + row * HEAD_DIM + dims, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    partner = (dims + HEAD_DIM // 2) % HEAD_DIM
    states = products + row * stride
    if part < tl.cdiv(HEADS, AT_ONCE):
        is_there = (heads < HEADS)[:, None] & is_dim[None, :]
        at = heads[:, None] * HEAD_DIM
        rotated = _rotated(
            states, query_weight, at + dims[None, :], at + partner[None, :], cos, sin, epsilon, is_there, dims, HEAD_DIM
        )
        to = query + row * (HEADS * HEAD_DIM) + at + dims[None, :]
        tl.store(to, rotated.to(query.dtype.element_ty), mask=is_there)
    else:
        heads -= tl.cdiv(HEADS, AT_ONCE) * AT_ONCE
        is_there = (heads < KV_HEADS)[:, None] & is_dim[None, :]
        at = heads[:, None] * HEAD_DIM
        slot = tl.load(slot_mapping + row) * (KV_HEADS * HEAD_DIM)
        keys = states + HEADS * HEAD_DIM
        values = tl.load(keys + KV_HEADS * HEAD_DIM + at + dims[None, :], mask=is_there, other=0.0)
        rotated = _rotated(
            keys, key_weight, at + dims[None, :], at + partner[None, :], cos, sin, epsilon, is_there, dims, HEAD_DIM
        )
        tl.store(key_cache + slot + at + dims[None, :], rotated.to(key_cache.dtype.element_ty), mask=is_there)
        tl.store(value_cache + slot + at + dims[None, :], values, mask=is_there)


def run(inputs: dict[str, Tensor], products: Tensor, cache: Tensor, at_once: int, num_warps: int) -> Tensor:
    """products [num_rows, (HEADS + 2 KV_HEADS) * HEAD_DIM]; returns the queries [num_rows, HEADS, HEAD_DIM]."""
    query = products.new_empty(len(products), HEADS, HEAD_DIM)
    grid: Any = (len(products), -(-HEADS // at_once) - (-KV_HEADS // at_once))
    rotate_and_store[grid](
        products, inputs["query_weight"], inputs["key_weight"], inputs["cosines"], inputs["sines"], inputs["slots"],
        query, cache[0], cache[1], products.stride(0), EPSILON, HEADS, KV_HEADS, HEAD_DIM,
        1 << (HEAD_DIM - 1).bit_length(), at_once, num_warps=num_warps,
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
