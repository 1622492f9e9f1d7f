"""All between two layers' attention on a Hopper GPU in one launch: errors against float32, and µs by rows.

export PYTHONPATH=.
python bench/machines/dense_layer.py --check
python bench/machines/dense_layer.py --shapes 0.6b 1b --rows 16 64

The last column is of the same layers by kernels of their own and the library's products, in the same run.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from gpu_timing import replayed_micros  # beside this file
from random_models import SHAPES
from torch import Tensor

from nanovllm.kernels.dense_layer import NUM_ROWS, DenseLayers, DenseSizes, DenseWeights, machine_code, why_not
from tests.support.reference_dense import DenseStep, dense_layer, random_step, random_weights

CUDA = torch.device("cuda")
ROWS = 1, 4, 9, 16, 24, 32, 48, 64, 96, 128
MAX_BYTES = 4 * 2**30  # of the weights that a timing goes through: far more than the L2 cache


class Case(NamedTuple):
    sizes: DenseSizes
    has_norms: bool

    @property
    def options(self) -> dict[str, bool]:
        return {"has_norms": self.has_norms, "has_bias": not self.has_norms}


def case_of(shape: str) -> Case:
    fields = SHAPES[shape]
    names = "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"
    return Case(DenseSizes(*(fields[name] for name in names)), shape != "1b")


def kernel_of(case: Case, num_rows: int) -> DenseLayers:
    return DenseLayers(case.sizes, CUDA, next(size for size in NUM_ROWS if size >= num_rows), **case.options)


def error_of(own: Tensor, exact: Tensor) -> float:
    """Largest error of a row, by norm."""
    own, exact = own.float().flatten(1), exact.flatten(1)
    return float(((own - exact).norm(dim=1) / exact.norm(dim=1)).max())


def check(case: Case, num_rows: int) -> None:
    layer, step = (
        random_weights(case.sizes, 2 * num_rows, CUDA, **case.options),
        random_step(case.sizes, num_rows, CUDA),
    )
    assert layer.keys is not None and layer.values is not None
    states = kernel_of(case, num_rows).run(0, layer, *step)
    own = [*states, layer.keys[step.slots], layer.values[step.slots]]
    exact = dense_layer(case.sizes, layer, *step[:3])
    print(f"{num_rows:4} rows:", *(f"{error_of(*pair):.1e}" for pair in zip(own, exact, strict=True)), flush=True)


def by_kernels(layer: DenseWeights, cache: Tensor, step: DenseStep) -> Tensor:
    """The launches of `KernelLayer`."""
    from nanovllm.kernels.layer_parts import add_and_norm, gated, norm  # with Triton, as the next two
    from nanovllm.kernels.rotary import rotate_and_store
    from nanovllm.kernels.skinny_linear import linear, linear_and_add, suits

    product, wide, narrow = (linear if suits(each) else F.linear for each in (layer.output, layer.gate_up, layer.down))
    residual, normed = add_and_norm(
        product(step.attended, layer.output)[None], step.residual[None], layer.post_norm, layer.epsilons[0]
    )
    inner = gated(wide(normed, layer.gate_up))
    assert layer.qkv is not None and layer.next_norm is not None
    hidden = (linear_and_add if narrow is linear else lambda a, b, c: c.add_(F.linear(a, b)))(
        inner, layer.down, residual
    )
    normed = norm(hidden, layer.next_norm, layer.epsilons[1])
    products = F.linear(normed, layer.qkv, layer.bias) if layer.bias is not None else product(normed, layer.qkv)
    norms = [] if layer.q_norm is None or layer.k_norm is None else [layer.q_norm, layer.k_norm]
    turns = (part[None] for part in step.turns)
    query: Tensor = rotate_and_store(products, *turns, norms, layer.epsilons[2], cache, step.slots)
    return query


def time_rows(case: Case, layers: list[DenseWeights], num_rows: int) -> None:
    step, kernel = random_step(case.sizes, num_rows, CUDA), kernel_of(case, num_rows)
    caches = [torch.stack([layer.keys, layer.values]) for layer in layers if layer.keys is not None]  # type: ignore

    def run(each: Any) -> float:
        return replayed_micros(lambda: [each(index, layer) for index, layer in enumerate(layers)]) / len(layers)

    own = run(lambda index, layer: kernel.run(index, layer, *step))
    apart = run(lambda index, layer: by_kernels(layer, caches[index], step))
    print(f"{num_rows:4} rows: {own:6.1f} us a layer, in launches of their own {apart:6.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="errors against float32: states, queries, K, V")
    parser.add_argument("--shapes", nargs="+", default=["0.6b", "1b"], choices=SHAPES)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    options = parser.parse_args()
    for shape in options.shapes:
        case = case_of(shape)
        if reason := why_not(case.sizes, torch.bfloat16, CUDA):
            parser.error(reason)
        print(shape, case.sizes, flush=True)
        with ThreadPoolExecutor() as pool:
            for size in NUM_ROWS:
                pool.submit(machine_code, case.sizes, CUDA, size, **case.options)
        with torch.inference_mode():
            first = random_weights(case.sizes, 1, CUDA, **case.options)
            num_bytes = sum(part.nbytes for part in first if isinstance(part, Tensor))
            count = 0 if options.check else min(SHAPES[shape]["num_hidden_layers"], MAX_BYTES // num_bytes)
            layers = [random_weights(case.sizes, 2 * max(options.rows), CUDA, **case.options) for _ in range(count)]
            for num_rows in options.rows:
                check(case, num_rows) if options.check else time_rows(case, layers, num_rows)


if __name__ == "__main__":
    main()
