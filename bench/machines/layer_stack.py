"""All layers in one launch on a GPU: errors against float32 arithmetic, and µs of the launch by variant.

export PYTHONPATH=.
python bench/machines/layer_stack.py --check
python bench/machines/layer_stack.py --shape 0.6b                                     by rows and context
python bench/machines/layer_stack.py --shape 0.6b --tokens                            steps from tokens to tokens
python bench/machines/layer_stack.py --shape 0.6b --vary FLIGHT=4 FLIGHT=4,SPLIT=64  each beside the defaults

A variant sets constants of `layer_stack.TUNING`, or SLOT_BYTES, the limit of shared memory for weights.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from typing import Any

import torch
from gpu_timing import captured, milliseconds, read_rate  # beside this file
from random_models import SHAPES

from nanovllm.kernels import layer_stack
from nanovllm.kernels.layer_stack import LayerStack, LayerWeights, StackSizes
from nanovllm.kernels.token_steps import StepWeights
from tests.support.llama_layers import angles, random_layers, random_rows, run_layers

DEVICE = torch.device("cuda", 0)
STEPS = {
    "1 x 128": [128], "1 x 384": [384], "1 x 2048": [2048], "1 x 32768": [32768],
    "4 x 384": [384] * 4, "8 x 384": [384] * 8, "8 x 2048": [2048] * 8,
}  # fmt: skip
CHECKED = [
    StackSizes(1024, 3072, 16, 8, 128, 64), StackSizes(512, 1280, 8, 2, 64, 16), StackSizes(2560, 4096, 8, 8, 256, 32),
    StackSizes(256, 512, 4, 1, 64, 16), StackSizes(2048, 8192, 32, 8, 64, 64), StackSizes(4096, 12288, 32, 8, 128, 64),
]  # fmt: skip
CHECKED_STEPS = [[1], [700], [64, 65], [3, 500, 17], [900, 1, 63, 128], [5] * 8, [300, 700, 1, 2, 600, 40, 257, 129]]
REPLAYS = 4  # in a row


def sizes_of(shape: str) -> StackSizes:
    fields = SHAPES[shape]
    names = "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"
    return StackSizes(*(fields[name] for name in names), 64)


def copied(layers: list[LayerWeights]) -> list[LayerWeights]:
    return [layer._replace(keys=layer.keys.clone(), values=layer.values.clone()) for layer in layers]


def check() -> int:
    """Compare with float32; returns the number of failures."""
    failures = 0
    for number, sizes in enumerate(CHECKED):
        torch.manual_seed(0)
        options = {"has_norms": number != 1, "has_biases": number == 1}
        layers = random_layers(3, sizes, 200 * sizes.block_size, device=DEVICE, **options)
        copies, stack = copied(layers), LayerStack(layers, sizes, 0.1, DEVICE)
        worst: dict[str, float] = {}
        for contexts in CHECKED_STEPS:
            count, num_rows = len(contexts), 4 if len(contexts) <= 4 else 8
            rows = random_rows(contexts, num_rows, sizes, 200, DEVICE)
            hidden = torch.randn(num_rows, sizes.hidden, device=DEVICE).bfloat16()
            given = (hidden, *angles(rows, sizes.head_dim), rows)
            for index in range(3):
                own = stack.run(*given, first=index, count=1)[:count].float()
                right = run_layers(copies[index : index + 1], sizes, 0.1, *given)[:count].float()
                change = right - hidden[:count].float()
                worst["layer"] = max(worst.get("layer", 0), float((own - right).norm() / change.norm()))
                for name in ("keys", "values"):  # block 0 takes what padding writes
                    written, wanted = (getattr(of[index], name)[sizes.block_size :].float() for of in (layers, copies))
                    error = float((written - wanted).norm() / wanted.norm())
                    worst[name] = max(worst.get(name, 0), error)
            own = stack.run(*given)[:count]
            right = run_layers(copies, sizes, 0.1, *given)[:count]
            worst["all"] = max(worst.get("all", 0), float((own.float() - right.float()).norm() / right.float().norm()))
            moved = sum(not torch.equal(stack.run(*given)[:count], own) for _ in range(20))
            worst["moved"] = worst.get("moved", 0) + moved
        limits = {"layer": 0.01, "keys": 1e-3, "values": 1e-3, "all": 0.03, "moved": 0.5}
        failed = [name for name, limit in limits.items() if not worst[name] < limit]
        failures += len(failed)
        print(tuple(sizes), {name: f"{error:.2g}" for name, error in worst.items()}, *failed, flush=True)
    return failures


def settings(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in (pair.split("=") for pair in text.split(",") if pair)}


def variants(texts: list[str]) -> Iterator[str]:
    """Set the constants of each variant in turn."""
    defaults, slot_bytes = dict(layer_stack.TUNING), layer_stack._MAX_SLOT_BYTES
    for text in texts:
        chosen = settings(text)
        layer_stack._MAX_SLOT_BYTES = chosen.pop("SLOT_BYTES", slot_bytes)
        layer_stack.TUNING.update(defaults | chosen)
        layer_stack.machine_code.cache_clear()
        yield text or "defaults"


def micros(stack: Any, sizes: StackSizes, contexts: list[int], num_blocks: int) -> float:
    num_rows = 4 if len(contexts) <= 4 else 8
    rows = random_rows(contexts, num_rows, sizes, num_blocks, DEVICE)
    hidden = torch.randn(num_rows, sizes.hidden, device=DEVICE).bfloat16()
    cosines, sines = angles(rows, sizes.head_dim)
    replay = captured(lambda: stack.run(hidden, cosines, sines, rows))

    def several() -> None:
        for _ in range(REPLAYS):
            replay()

    return 1e3 * statistics.median(milliseconds(several, rounds=7)) / REPLAYS


def token_micros(stack: Any, shape: str, contexts: list[int], num_blocks: int) -> float:
    """Of a step with its embedding, head and draw."""
    sizes, fields = sizes_of(shape), SHAPES[shape]
    num_rows = 4 if len(contexts) <= 4 else 8
    rows = random_rows(contexts, num_rows, sizes, num_blocks, DEVICE)
    head = torch.empty(fields["vocab_size"], sizes.hidden, dtype=torch.bfloat16, device=DEVICE).normal_()
    norm, turns = head[0].clone(), head[: 2**16].reshape(-1, sizes.head_dim)[: 2**16]
    weights = StepWeights(head, norm, head, turns, turns, 1e-6, len(head))
    ones, numbers = torch.ones(8, device=DEVICE), torch.arange(8, device=DEVICE)
    names = "positions", "slot_mapping", "tables", "decode_tables", "decode_blocks"
    inputs = dict(zip(names, rows, strict=True)) | {
        "token_ids": numbers, "sample_rows": numbers, "noise_keys": numbers, "inverse_temperatures": ones,
        "noise_scales": ones,
    }  # fmt: skip
    step = stack.token_step(weights, inputs, num_rows, numbers.clone(), non_finite=-1, gamma=1)

    def several() -> None:
        for _ in range(REPLAYS):
            step.launch()

    return 1e3 * statistics.median(milliseconds(several, rounds=7)) / REPLAYS


def measure(shape: str, vary: list[str], steps: list[str], *, tokens: bool) -> None:
    sizes, num_layers = sizes_of(shape), SHAPES[shape]["num_hidden_layers"]
    num_blocks = 560  # of 64 tokens
    print(
        torch.cuda.get_device_name(),
        f"{read_rate() / 1e12:.2f} TB/s, weights of a layer {sizes.num_bytes / 1e6:.1f} MB",
    )
    torch.manual_seed(0)
    layers = random_layers(num_layers, sizes, num_blocks * sizes.block_size, device=DEVICE)
    print(f"{'µs':>40}", *(f"{step:>9}" for step in steps), flush=True)
    for name in variants(["", *vary]):
        try:
            stack = LayerStack(layers, sizes, sizes.head_dim**-0.5, DEVICE)
            times = [
                token_micros(stack, shape, STEPS[step], num_blocks) if tokens else
                micros(stack, sizes, STEPS[step], num_blocks) for step in steps
            ]  # fmt: skip
        except layer_stack.nvrtc.CudaError as error:
            print(f"{name:>40} {str(error)[:1000]}", flush=True)
            continue
        print(f"{name:>40}", *(f"{time:9.0f}" for time in times), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with float32")
    parser.add_argument("--shape", default="0.6b", choices=list(SHAPES))
    parser.add_argument("--vary", nargs="*", default=[], help="such as FLIGHT=4,SPLIT=64")
    parser.add_argument("--steps", nargs="*", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--tokens", action="store_true", help="steps from tokens to tokens")
    options = parser.parse_args()
    layer_stack.TUNING["PATIENCE"] = 10**6  # a trap instead of a GPU that hangs
    sys.exit(check() if options.check else measure(options.shape, options.vary, options.steps, tokens=options.tokens))
