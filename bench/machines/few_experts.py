"""Experts of few rows in one launch, with and without norm and router, and by the products of `expert_rows.py`; a norm
and a product in one launch, and by cuBLAS.

    python bench/machines/few_experts.py

A figure is the time of a layer within a CUDA graph of several, and the share of the memory rate at which it reads the
weights of the experts that were chosen.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gpu_timing import read_rate, replayed_micros  # beside this file
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from nanovllm.kernels.few_experts import FewExperts, Router, Sizes
from nanovllm.kernels.normed_linear import normed_linear
from nanovllm.model.experts import experts_function

NUM_LAYERS = 4
SIZES = Sizes(2048, 768, 128, 8)
EPSILON = 1e-6


def experts() -> Any:
    config = Qwen3MoeConfig(
        hidden_size=SIZES.hidden, moe_intermediate_size=SIZES.inner, num_experts=SIZES.num_experts,
        num_experts_per_tok=SIZES.top_k,
    )  # fmt: skip
    with torch.device("cuda"):
        layer = Qwen3MoeExperts(config).to(torch.bfloat16)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.02)
    return layer.eval()


def normalised(states: Tensor, norm: Tensor) -> Tensor:
    wide = states.float()
    return norm * (wide * (wide.square().mean(-1, keepdim=True) + EPSILON).rsqrt()).bfloat16()


def routed(states: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
    scores, ids = F.linear(states, router).float().softmax(-1).topk(SIZES.top_k)
    return ids, (scores / scores.sum(-1, keepdim=True)).bfloat16().float()


def reference(layer: Any, states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """In float32."""
    output = torch.zeros(len(states), SIZES.hidden, device="cuda")
    for row, (experts_of_row, weights_of_row) in enumerate(zip(ids.tolist(), weights.float(), strict=True)):
        for expert, weight in zip(experts_of_row, weights_of_row, strict=True):
            gate, up = F.linear(states[row].float(), layer.gate_up_proj[expert].float()).chunk(2)
            output[row] += weight * F.linear(F.silu(gate) * up, layer.down_proj[expert].float())
    return output


def products(rate: float, num_outputs: int = 5120) -> None:
    """Of a norm with q, k and v."""
    weights = [torch.randn(num_outputs, SIZES.hidden, device="cuda").bfloat16() * 0.02 for _ in range(8)]
    norm, kernel = (
        torch.randn(SIZES.hidden, device="cuda").bfloat16(),
        normed_linear(num_outputs, SIZES.hidden, torch.device("cuda")),
    )
    floor = 1e6 * weights[0].nbytes / rate
    for num_rows, num_real in ((4, 1), (4, 4), (8, 8)):
        states = torch.randn(num_rows, SIZES.hidden, device="cuda").bfloat16()
        slots = torch.zeros(num_rows, dtype=torch.int64, device="cuda")
        slots[:num_real] = 5
        found = kernel.run(states, norm, EPSILON, weights[0], slots)
        expected = F.linear(normalised(states, norm).float(), weights[0].float())[:num_real]

        def ours(states: Tensor = states, slots: Tensor = slots) -> None:
            for weight in weights:
                kernel.run(states, norm, EPSILON, weight, slots)

        def by_library(states: Tensor = states) -> None:
            for weight in weights:
                F.linear(states, weight)

        took, before = (replayed_micros(run) / len(weights) for run in (ours, by_library))
        print(
            f"norm and product, {num_real} of {num_rows} rows: from float32 {distance(found[:num_real], expected):.1e},"
            f" {took:.1f} us ({floor / took:.2f}); cuBLAS without norm {before:.1f} ({floor / before:.2f})",
            flush=True,
        )


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


@torch.no_grad()
def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rate = read_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, read {rate / 1e12:.2f} TB/s", flush=True)
    torch.manual_seed(0)
    products(rate)
    layers = [experts() for _ in range(NUM_LAYERS)]
    kernel = FewExperts(SIZES, torch.device("cuda"))
    norm = torch.randn(SIZES.hidden, device="cuda").bfloat16()
    routers = [torch.randn(SIZES.num_experts, SIZES.hidden, device="cuda").bfloat16() * 0.02 for _ in layers]
    for num_rows, num_real in ((1, 1), (4, 1), (2, 2), (4, 4), (8, 8)):
        states = torch.randn(num_rows, SIZES.hidden, device="cuda").bfloat16()
        slots = torch.zeros(num_rows, dtype=torch.int64, device="cuda")
        slots[:num_real] = 5
        inputs = normalised(states, norm)
        given = [routed(inputs, router) for router in routers]
        ids, weights = given[0]
        expected = reference(layers[0], inputs[:num_real], ids[:num_real], weights[:num_real])
        choices = [[], [], []]
        for router, own in zip(routers, given, strict=True):
            for of, choice in zip(
                choices,
                (own, Router(router, True, True), Router(router, True, True, norm, EPSILON)),
                strict=True,
            ):
                of.append(choice)

        def run(rows: Tensor, layer: Any, choice: Any, slots: Tensor = slots) -> Tensor:
            return kernel.run(rows, layer.gate_up_proj, layer.down_proj, choice, slots)

        found = [run(rows, layers[0], of[0]) for rows, of in zip((inputs, inputs, states), choices, strict=True)]
        names, real = ("alone", "with router", "with norm"), slice(0, num_real)
        for name, output, before in zip(names, found, (0.0, 0.0, states[real].float()), strict=True):
            print(
                f"{num_real} of {num_rows} rows, {name}: from float32 {distance(output[real] - before, expected):.1e}"
            )
        library = experts_function(layers[0], inputs, ids, weights.bfloat16())[real]
        repeats = sum(not torch.equal(found[2], run(states, layers[0], choices[2][0])) for _ in range(200))
        print(
            f"   library's way {distance(library, expected):.1e}, padding {float(found[0][num_real:].abs().sum())},"
            f" other bits in {repeats} of 200",
            flush=True,
        )
        chosen = sum(len(ids[real].unique()) for ids, _ in given) / len(given)
        floor = 1e6 * chosen * 6 * SIZES.hidden * SIZES.inner / rate

        def figure(run: Any, floor: float = floor) -> str:
            took = replayed_micros(run) / NUM_LAYERS
            return f"{took:.1f} us ({floor / took:.2f})"

        def layers_by(rows: Tensor, of: Any, run: Any = run) -> None:
            for layer, choice in zip(layers, of, strict=True):
                run(rows, layer, choice)

        def by_rows(inputs: Tensor = inputs, given: Any = given, real: slice = real) -> None:
            for layer, (ids, weights) in zip(layers, given, strict=True):
                experts_function(layer, inputs[real], ids[real], weights[real].bfloat16())

        print(f"   floor {floor:.1f} us, expert_rows {figure(by_rows)}", flush=True)
        for name, rows, of in zip(names, (inputs, inputs, states), choices, strict=True):
            print(f"   {name} {figure(partial(layers_by, rows, of))}", flush=True)


if __name__ == "__main__":
    main()
