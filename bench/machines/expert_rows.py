"""Products of routed experts for few rows on a GPU, beside the library's way by PyTorch's `grouped_mm`.

    python bench/machines/expert_rows.py            the shapes of Qwen3-30B-A3B and gpt-oss 20B, 1 to 128 rows
    python bench/machines/expert_rows.py --sweep    other tiles too, fastest last

A figure is the time of all experts of one layer within a CUDA graph, over several layers so that no weight stays in the
cache, and the share of the memory's rate at which it reads the weights of the experts that were chosen.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any
from unittest import mock

import torch
from gpu_timing import read_rate, replayed_micros  # beside this file
from torch import Tensor
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.integrations.moe import grouped_mm_experts_forward
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from nanovllm.model.experts import experts_function

NUM_LAYERS = 4
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
SHAPES: dict[str, tuple[Any, Any]] = {
    "Qwen3-30B-A3B": (
        Qwen3MoeExperts,
        Qwen3MoeConfig(hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8),
    ),
    "gpt-oss 20B": (
        GptOssExperts,
        GptOssConfig(hidden_size=2880, intermediate_size=2880, num_local_experts=32, num_experts_per_tok=4),
    ),
}


def experts(shape: str) -> list[Any]:
    """Layers with random weights."""
    kind, config = SHAPES[shape]
    layers = []
    for _ in range(NUM_LAYERS):
        with torch.device("cuda"):
            layer = kind(config).to(torch.bfloat16)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, 0.0, 0.02)
        layers.append(layer.eval())
    return layers


def routes(layer: Any, num_rows: int, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    scores = torch.rand(num_rows, layer.num_experts, device="cuda")
    weights, indices = scores.softmax(dim=-1).topk(top_k)
    hidden = layer.down_proj.shape[2 if layer.is_transposed else 1]
    return torch.randn(num_rows, hidden, device="cuda", dtype=torch.bfloat16), indices, weights.bfloat16()


def distances(shape: str, layer: Any) -> tuple[float, float]:
    """From float32 results, relative to their norm: of the kernels, and of the library in bfloat16."""
    kind, config = SHAPES[shape]
    states, indices, weights = inputs = routes(layer, 48, config.num_experts_per_tok)
    wide = kind(config).to("cuda", torch.float32)
    wide.load_state_dict({name: value.float() for name, value in layer.state_dict().items()})
    reference = wide(states.float(), indices, weights.float())  # one expert after another
    found = [compute(layer, *inputs).float() for compute in (experts_function, grouped_mm_experts_forward)]
    ours, library = (float((some - reference).norm() / reference.norm()) for some in found)
    return ours, library


def micros(layers: list[Any], inputs: tuple[Tensor, Tensor, Tensor], compute: Any) -> float:
    def run() -> None:
        for layer in layers:
            compute(layer, *inputs)

    return replayed_micros(run) / len(layers)


def chosen_bytes(layer: Any, indices: Tensor) -> int:
    return sum(p.nbytes for p in layer.parameters()) * len(indices.unique()) // layer.num_experts


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    rate = read_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, read {rate / 1e12:.2f} TB/s", flush=True)
    for shape, (_, config) in SHAPES.items():
        layers = experts(shape)
        ours, library = distances(shape, layers[0])
        print(f"{shape}: distance from float32 {ours:.1e}, of the library {library:.1e}", flush=True)
        for num_rows in ROWS:
            inputs = routes(layers[0], num_rows, config.num_experts_per_tok)
            floor = 1e6 * chosen_bytes(layers[0], inputs[1]) / rate
            took = micros(layers, inputs, experts_function)
            before = micros(layers, inputs, grouped_mm_experts_forward)
            print(
                f"{shape}, {num_rows} rows: {took:.1f} us ({floor / took:.2f} of the rate), grouped_mm {before:.1f}"
                f" ({floor / before:.2f})",
                flush=True,
            )
            if arguments.sweep and num_rows in (1, 64):
                sweep(layers, inputs, floor)


def sweep(layers: list[Any], inputs: tuple[Tensor, Tensor, Tensor], floor: float) -> None:
    from nanovllm.kernels import expert_rows  # with Triton

    found = []
    sizes = itertools.product((16, 32, 64, 128), (64, 128, 256), (3, 5), (2, 4, 8))
    for tiles in itertools.starmap(expert_rows.Tiles, sizes):
        num_bytes = 2 * tiles.depth * (tiles.outputs + 16) * tiles.num_stages
        if not 24_000 <= num_bytes <= 100_000 or tiles.outputs * tiles.depth < 4096:
            continue
        with mock.patch.object(expert_rows, "TILES", tiles):
            try:
                found.append((micros(layers, inputs, experts_function), tiles))
            except Exception as problem:  # more shared memory than there is
                print(tiles, type(problem).__name__)
    for took, tiles in sorted(found, reverse=True)[-6:]:
        print(f"    {took:.1f} us ({floor / took:.2f}): {tuple(tiles)}", flush=True)


if __name__ == "__main__":
    main()
