"""The dense half of a decode step, on a Hopper GPU: one kernel against compiled layers with cuBLAS.

PYTHONPATH=bench/machines python bench/dense_layer/measure.py --check     errors of both against float32, by rows
PYTHONPATH=bench/machines python bench/dense_layer/measure.py             microseconds a layer, of replayed CUDA graphs
PYTHONPATH=bench/machines python bench/dense_layer/measure.py --phases    cycles of the kernel's phases

docs/results/gpu_notes.md has the figures, and why it is not bound to the engine.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from gpu_timing import replayed_micros  # bench/machines
from kernel import NUM_ROWS, DenseLayers, DenseSizes, DenseWeights, why_not  # beside this file
from torch import Tensor

from nanovllm.kernels.rotary import rotate_and_store
from nanovllm.kernels.skinny_linear import linear, linear_and_add, suits

CUDA, BF16 = torch.device("cuda"), torch.bfloat16
ROWS = 8, 16, 32, 64, 128, 256
EPSILON = 1e-6


class Shape(NamedTuple):
    sizes: DenseSizes
    num_layers: int
    has_norms: bool


SHAPES = {
    "0.6B": Shape(DenseSizes(1024, 3072, 16, 8, 128), 28, True),
    "1B": Shape(DenseSizes(2048, 8192, 32, 8, 64), 16, False),
}
MARKS = (
    "output: products", "exchange", "completed", "gate: products", "factors", "stored", "down: products", "exchange",
    "completed", "next: products", "exchange", "completed",
)  # fmt: skip


class Step(NamedTuple):
    """Inputs of a layer's dense half, and where the next layer's K and V go."""

    attended: Tensor
    residual: Tensor
    turns: tuple[Tensor, Tensor]
    slots: Tensor


def random_weights(shape: Shape, num_slots: int, generator: torch.Generator) -> DenseWeights:
    sizes = shape.sizes

    def draw(*sides: int) -> Tensor:
        return (torch.randn(sides, generator=generator, device=CUDA) * sides[-1] ** -0.5).to(BF16)

    def norm(size: int) -> Tensor:
        return (1 + 0.2 * torch.randn(size, generator=generator, device=CUDA)).to(BF16)

    caches = torch.zeros(2, num_slots, sizes.num_kv_heads, sizes.head_dim, dtype=BF16, device=CUDA)
    heads = [norm(sizes.head_dim) if shape.has_norms else None for _ in range(2)]
    bias = None if shape.has_norms else draw(sizes.qkv)
    return DenseWeights(
        draw(sizes.hidden, sizes.query), draw(2 * sizes.inner, sizes.hidden), draw(sizes.hidden, sizes.inner),
        norm(sizes.hidden), draw(sizes.qkv, sizes.hidden), norm(sizes.hidden), *heads, bias, *caches, (EPSILON,) * 4,
    )  # fmt: skip


def random_step(sizes: DenseSizes, num_rows: int, generator: torch.Generator) -> Step:
    angles = torch.rand(num_rows, sizes.head_dim // 2, generator=generator, device=CUDA).mul(6).repeat(1, 2)
    attended, residual = (
        torch.randn(num_rows, size, generator=generator, device=CUDA).to(BF16) for size in (sizes.query, sizes.hidden)
    )
    slots = torch.randperm(2 * num_rows, generator=generator, device=CUDA)[:num_rows]
    return Step(attended, residual, (angles.cos().to(BF16), angles.sin().to(BF16)), slots)


def rms_norm(rows: Tensor, weight: Tensor) -> Tensor:
    """As `transformers` computes it."""
    wide = rows.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)
    return weight * normed.to(rows.dtype)


def exact_layer(weights: DenseWeights, step: Step, sizes: DenseSizes) -> list[Tensor]:
    """Hidden states, queries, keys and values [num_rows, ...] in float32."""
    own = DenseWeights(*(part.float() if isinstance(part, Tensor) else part for part in weights))
    hidden = step.residual.float() + F.linear(step.attended.float(), own.output)
    gate, up = F.linear(rms_norm(hidden, own.post_norm), own.gate_up).chunk(2, -1)
    hidden = hidden + F.linear(F.silu(gate) * up, own.down)
    assert own.qkv is not None and own.next_norm is not None
    products = F.linear(rms_norm(hidden, own.next_norm), own.qkv, own.bias).unflatten(-1, (-1, sizes.head_dim))
    query, key, value = products.split((sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads), 1)
    if own.q_norm is not None and own.k_norm is not None:
        query, key = rms_norm(query, own.q_norm), rms_norm(key, own.k_norm)
    cos, sin = (part.float()[:, None] for part in step.turns)

    def turned(heads: Tensor) -> Tensor:
        first, second = heads.chunk(2, -1)
        return heads * cos + torch.cat([-second, first], -1) * sin

    return [hidden, *(part.flatten(1) for part in (turned(query), turned(key), value))]


def present_layer(weights: DenseWeights, step: Step) -> tuple[Tensor, Tensor]:
    """What the compiled layers of an engine launch; hidden states and queries."""
    # These operators choose a kernel for up to 16 rows, and cuBLAS for more.
    product, wide, narrow = (
        linear if suits(weight) else F.linear for weight in (weights.output, weights.gate_up, weights.down)
    )
    hidden = step.residual + product(step.attended, weights.output)
    gate, up = wide(rms_norm(hidden, weights.post_norm), weights.gate_up).chunk(2, -1)
    inner = F.silu(gate) * up
    hidden = linear_and_add(inner, weights.down, hidden) if narrow is linear else hidden + narrow(inner, weights.down)
    assert weights.qkv is not None and weights.next_norm is not None
    normed = rms_norm(hidden, weights.next_norm)
    products = product(normed, weights.qkv) if weights.bias is None else F.linear(normed, weights.qkv, weights.bias)
    norms = [] if weights.q_norm is None or weights.k_norm is None else [weights.q_norm, weights.k_norm]
    cosines, sines = step.turns
    cache: Any = weights.keys
    query = rotate_and_store(products[None], cosines[None], sines[None], norms, EPSILON, cache, step.slots)
    return hidden, query.flatten(1)


def own_layers(shape: Shape, num_rows: int, layers: list[DenseWeights], times: Tensor | None = None) -> DenseLayers:
    return DenseLayers(layers, shape.sizes, CUDA, next(size for size in NUM_ROWS if size >= num_rows), times=times)


def compile_ahead(shape: Shape, rows: Sequence[int], times: Tensor | None) -> None:
    """Compiles in threads; machine code is kept."""
    layers = [random_weights(shape, 1, torch.Generator(CUDA))]
    with ThreadPoolExecutor() as pool:
        for num_rows in rows:
            pool.submit(own_layers, shape, num_rows, layers, times)


def with_caches(weights: DenseWeights) -> DenseWeights:
    """Keys replaced by both caches in one tensor, as `rotate_and_store` takes them."""
    return weights._replace(keys=torch.stack([weights.keys, weights.values]))  # type: ignore[list-item]


def errors(results: list[Tensor], exact: list[Tensor]) -> str:
    """Largest error of a row, by norm, of hidden states, queries, keys, values."""
    distances = [
        float(((own.float() - right).norm(dim=1) / right.norm(dim=1)).max())
        for own, right in zip(results, exact, strict=True)
    ]
    return " ".join(f"{distance:.1e}" for distance in distances)


def check(shape: Shape, num_rows: int) -> None:
    generator = torch.Generator(CUDA).manual_seed(num_rows)
    sizes, weights = shape.sizes, random_weights(shape, 2 * num_rows, generator)

    def run(step: Step) -> list[Tensor]:
        states = kernel.run(0, *step)
        return [part.clone() for part in (*states, *stored((weights.keys, weights.values), step))]

    def stored(caches: Any, step: Step) -> list[Tensor]:
        return [cache[step.slots].flatten(1) for cache in caches]

    kernel = own_layers(shape, num_rows, [weights])
    for number in range(20):  # what one launch leaves must not help the next
        step, other = (random_step(sizes, num_rows, generator) for _ in range(2))
        first = run(step)
        if number == 0:
            exact = exact_layer(weights, step, sizes)
            print(f"{num_rows:4} rows, kernel:  {errors(first, exact)}", flush=True)
            paired = with_caches(weights)
            present = [*present_layer(paired, step), *stored(paired.keys, step)]
            print(f"{num_rows:4} rows, present: {errors(present, exact)}", flush=True)
        for mine, theirs in zip((step[0], step[1], *step.turns), (other[0], other[1], *other.turns), strict=True):
            theirs[0] = mine[0]
        assert all(torch.equal(a[0], b[0]) for a, b in zip(first, run(other), strict=True)), "other rows matter"
        assert all(map(torch.equal, first, run(step))), "another run gives other bits"


def micros(shape: Shape, num_rows: int, layers: list[DenseWeights], present: Callable[..., Any]) -> None:
    step = random_step(shape.sizes, num_rows, torch.Generator(CUDA).manual_seed(0))

    def per_layer(run: Callable[[int], Any]) -> float:
        return replayed_micros(lambda: [run(index) for index in range(len(layers))]) / len(layers)

    for tensor in (step.attended, step.residual, *step.turns, step.slots):
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    paired, kernel = [with_caches(weights) for weights in layers], own_layers(shape, num_rows, layers)
    own = per_layer(lambda index: kernel.run(index, *step))
    print(f"{num_rows:4} rows, us a layer: kernel {own:.1f}", end="", flush=True)
    print(f", present {per_layer(lambda index: present(paired[index], step)):.1f}", flush=True)


def phases(shape: Shape, num_rows: int, layers: list[DenseWeights], times: Tensor) -> None:
    step = random_step(shape.sizes, num_rows, torch.Generator(CUDA).manual_seed(0))
    num_blocks = torch.cuda.get_device_properties(CUDA).multi_processor_count
    kernel, spans = own_layers(shape, num_rows, layers, times), []
    for index in [*range(len(layers))] * 4:
        for before in range(3):
            kernel.run(before, *step)
        kernel.run(index, *step)
        clocks = times[:num_blocks].double()
        clocks = clocks[clocks[:, 1 : len(MARKS) + 1].min(1).values > clocks[:, 0]]  # with an item of each product
        spans.append((clocks[:, 1 : len(MARKS) + 1] - clocks[:, :1]).mean(0).tolist())
    middle = [statistics.median(each) for each in zip(*spans, strict=True)]
    print(f"{num_rows:4} rows, cycles since the start:", ", ".join(
        f"{name} {value:.0f}" for name, value in zip(MARKS, middle, strict=True)
    ), flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="errors against float32")
    parser.add_argument("--phases", action="store_true", help="cycles of the kernel's phases")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    options = parser.parse_args()
    for name in options.shapes:
        shape = SHAPES[name]
        if reason := why_not(shape.sizes, BF16, CUDA):
            parser.error(reason)
        print(f"{name}: {shape.sizes}", flush=True)
        generator = torch.Generator(CUDA).manual_seed(1)
        count = 0 if options.check else 4 if options.phases else shape.num_layers
        layers = [random_weights(shape, 2 * max(options.rows), generator) for _ in range(count)]
        times = torch.zeros(256, 16, dtype=torch.int64, device=CUDA) if options.phases else None
        compile_ahead(shape, options.rows, times)
        present = torch.compile(present_layer, options={"combo_kernels": True})
        for num_rows in options.rows:
            with torch.inference_mode():
                if options.check:
                    check(shape, num_rows)
                elif times is not None:
                    phases(shape, num_rows, layers, times)
                else:
                    micros(shape, num_rows, layers, present)


if __name__ == "__main__":
    main()
