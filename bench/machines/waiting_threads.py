"""How OpenMP's threads wait: tokens/s for each GOMP_SPINCOUNT, alone and beside one busy process.

    python bench/machines/waiting_threads.py                  # random weights in SmolLM2's shape, two cores
    python bench/machines/waiting_threads.py --threads 4 --counts default 1000

One process a setting, in turn, on as many cores as threads; OpenMP reads the variable once. The machine must be idle
otherwise. W is 32 requests, and one is a single stream; medians of all rounds, and shares of the first setting alone.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time

VARIABLE = "GOMP_SPINCOUNT"
CONDITIONS = ("alone", "beside a busy process")


def measure(shape: str, num_threads: int, is_alone: bool) -> None:
    """Prints tokens/s of each workload, in each condition."""
    import torch
    from random_models import NoText, checkpoint  # beside this file

    from nanovllm import LLM, SamplingParams

    torch.set_num_threads(num_threads)
    rng = random.Random(1)
    works = {"W": [(rng.randrange(32, 64), rng.randrange(16, 64)) for _ in range(32)], "one": [(8, 48)]}
    llm = LLM(str(checkpoint(shape)), tokenizer=NoText(), device="cpu", kv_cache_memory_bytes=1 << 28)

    def rate(work: list[tuple[int, int]]) -> float:
        prompts = [[rng.randrange(10, 500) for _ in range(length)] for length, _ in work]
        params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for _, count in work]
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return sum(count for _, count in work) / (time.perf_counter() - start)

    rate([(8, 4)] * 4)
    print(*(statistics.median(rate(work) for _ in range(3)) for work in works.values()))
    if is_alone:
        return
    with subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) as busy:
        try:
            print(*map(rate, works.values()))
        finally:
            busy.kill()


def run(count: str, args: argparse.Namespace) -> list[float]:
    """[W alone, one alone, W beside, one beside] of a new process."""
    environment = {name: value for name, value in os.environ.items() if name not in (VARIABLE, "OMP_WAIT_POLICY")}
    environment |= {"OMP_NUM_THREADS": str(args.threads), "CUDA_VISIBLE_DEVICES": ""}
    if count != "default":
        environment[VARIABLE] = count
    command = [sys.executable, __file__, "--measure", "--shape", args.shape, "--threads", str(args.threads)]
    command += ["--alone"] * args.alone
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    return [float(number) for number in done.stdout.split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="135m", help="of random_models.py")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--counts", nargs="+", default=["default", "0", "1000", "5000"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--alone", action="store_true", help="without the busy process")
    parser.add_argument("--measure", action="store_true", help="this process, with its own environment")
    args = parser.parse_args()
    if args.measure:
        return measure(args.shape, args.threads, args.alone)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    rates: dict[str, list[list[float]]] = {count: [] for count in args.counts}
    for _ in range(args.rounds):
        for count in args.counts:
            rates[count].append(run(count, args))
            print("#", count, *(f"{rate:.0f}" for rate in rates[count][-1]), flush=True)
    first = [statistics.median(column) for column in zip(*rates[args.counts[0]], strict=True)][:2]
    conditions = CONDITIONS[: 2 - args.alone]
    print(
        f"| {VARIABLE} |", " | ".join(f"{name} {condition}" for condition in conditions for name in ("W", "one")), "|"
    )
    print("|---" * (1 + 2 * len(conditions)) + "|")
    for count, rows in rates.items():
        medians = [statistics.median(column) for column in zip(*rows, strict=True)]
        cells = [
            f"{rate:.0f} ({rate / alone:.2f})" for rate, alone in zip(medians, first * len(conditions), strict=True)
        ]
        print("|", " | ".join([count, *cells]), "|")
    return None


if __name__ == "__main__":
    main()
