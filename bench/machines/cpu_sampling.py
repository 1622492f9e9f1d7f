"""What sampling costs on a CPU, microseconds of processor time a row, of this checkout and of another one in turn.

    python bench/machines/cpu_sampling.py --before ../an_earlier_checkout

Rows have 49,152 logits in float32, as the C++ kernels give them, as steep as a language model's or nearly flat, and
200 output tokens for penalties.
Processor time, of one thread, is what a busy machine changes least; medians of the alternating processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NUM_ROWS, VOCAB_SIZE, NUM_OUTPUT_TOKENS = 32, 49_152, 200
SCALES = {"steep": 5.0, "flat": 1.0}  # deviations of normally distributed logits
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.8": {"temperature": 0.8},
    "top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "top_k 50, top_p 0.95": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "min_p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "greedy, repetition penalty": {"temperature": 0.0, "repetition_penalty": 1.1},
    "greedy, 5 log-probabilities": {"temperature": 0.0, "logprobs": 5},
}


def processor_times(rounds: int) -> dict[str, float]:
    import torch

    from nanovllm import SamplingParams
    from nanovllm.core.sequence import NewRequest, Sequence
    from nanovllm.process.device import find_kernel
    from nanovllm.sampling.logprobs import StepLogprobs
    from nanovllm.sampling.sampler import Sampler

    torch.set_num_threads(1)
    load = find_kernel("cpp_sampling", "load_row_kernels")
    own = {} if load is None else {"row_kernels": load()}
    sampler, times = Sampler(**own), {}
    generator = torch.Generator().manual_seed(0)
    history = torch.randint(VOCAB_SIZE, (NUM_ROWS, NUM_OUTPUT_TOKENS), generator=generator).tolist()
    for steepness, scale in SCALES.items():
        logits = scale * torch.randn(NUM_ROWS, VOCAB_SIZE, generator=generator)
        for kind, options in KINDS.items():
            sequences = []
            for row in range(NUM_ROWS):
                new = NewRequest(str(row), [1], SamplingParams(**options))
                sequences.append(Sequence(new, arrival=row, max_model_len=1000, seed=row))
                sequences[-1].token_ids.extend(history[row])
            positions = [1 + NUM_OUTPUT_TOKENS] * NUM_ROWS
            samples = []
            for _ in range(rounds + 1):
                rows = logits.clone()  # since sampling overwrites them
                start = time.process_time()
                sampler.sample(rows, sequences, positions, None, StepLogprobs(**own))
                samples.append(time.process_time() - start)
            times[f"{kind}, {steepness}"] = statistics.median(samples[1:]) / NUM_ROWS * 1e6
    return times


def in_process(tree: Path, rounds: int) -> dict[str, float]:
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", "--rounds", str(rounds)]
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--processes", type=int, default=3, help="of each checkout")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(processor_times(args.rounds)))
        return
    trees = {"now": Path(__file__).resolve().parents[2]} | ({"before": args.before.resolve()} if args.before else {})
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for _ in range(args.processes):
        for name, tree in trees.items():
            runs[name].append(in_process(tree, args.rounds))
    print("| microseconds a row |", *(f"{name} |" for name in trees))
    print("|---|" + "---|" * len(trees))
    for kind in runs["now"][0]:
        medians = (statistics.median(run[kind] for run in runs[name]) for name in trees)
        print(f"| {kind} |", *(f"{median:,.0f} |" for median in medians))


if __name__ == "__main__":
    main()
