"""Times routed experts on a CPU: the library's ways and our packed products, in turn, milliseconds a layer.

python bench/micro/experts.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import OlmoeConfig
from transformers.integrations.moe import batched_mm_experts_forward, grouped_mm_experts_forward
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

from nanovllm.kernels.cpp import load_kernels
from nanovllm.model.experts import PackedExperts

HIDDEN_SIZE, INTERMEDIATE_SIZE, NUM_EXPERTS, TOP_K = 1024, 512, 32, 4
ROWS = (1, 2, 8, 32, 128, 512)
MOST_BATCHED_ROWS = 8  # it gathers a copy of the weights for each row
ROUNDS = 7


def measure(dtype: torch.dtype, num_rows: int) -> dict[str, float]:
    """The least of several rounds of each way, in milliseconds."""
    module: Any = OlmoeExperts(
        OlmoeConfig(
            hidden_size=HIDDEN_SIZE,
            intermediate_size=INTERMEDIATE_SIZE,
            num_experts=NUM_EXPERTS,
            num_experts_per_tok=TOP_K,
            experts_implementation="eager",
        )
    ).to(dtype)
    for parameter in module.parameters():
        parameter.normal_(0.0, 0.02)
    packed = PackedExperts(module, load_kernels(dtype, 64, 3))
    weights, indices = torch.rand(num_rows, NUM_EXPERTS).softmax(dim=-1).topk(TOP_K)
    inputs = torch.randn(num_rows, HIDDEN_SIZE, dtype=dtype), indices, weights.to(dtype)
    ways: dict[str, Callable[[], Any]] = {
        "eager": lambda: module(*inputs),
        "grouped_mm": lambda: grouped_mm_experts_forward(module, *inputs),
        "packed": lambda: packed(*inputs),
    }
    if num_rows <= MOST_BATCHED_ROWS:
        ways["batched_mm"] = lambda: batched_mm_experts_forward(module, *inputs)
    least = dict.fromkeys(ways, float("inf"))
    for _ in range(ROUNDS):
        for name, compute in ways.items():
            start = time.perf_counter()
            compute()
            least[name] = min(least[name], 1e3 * (time.perf_counter() - start))
    return least


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    rows = parser.parse_args().rows
    print(torch.get_num_threads(), "threads")
    print("| dtype | rows | eager | grouped_mm | batched_mm | packed | packed / grouped_mm |")
    print("|---|---|---|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        for num_rows in rows:
            least = measure(dtype, num_rows)
            cells = [f"{least[name]:.2f}" if name in least else "" for name in ("eager", "grouped_mm", "batched_mm")]
            ratio = least["packed"] / least["grouped_mm"]
            print(f"| {str(dtype)[6:]} | {num_rows} | {' | '.join(cells)} | {least['packed']:.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
