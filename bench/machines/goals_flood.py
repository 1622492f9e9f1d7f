"""One client floods the engine, another asks steadily: its first tokens and gaps with shares, strict priority, neither.

    python bench/machines/goals_flood.py --cores 6                 the three side by side, on two cores each
    python bench/machines/goals_flood.py --how shares --seconds 20

The flood is 5,000 requests at once (`--flood requests`), most of which still wait when the measurement ends, one
request of 128 samples (`samples`), 16 prompts of 6,000 tokens again and again (`prompts`), or in the same way 100
requests with every sampling option (`options`). Each way opens an engine of its own, of random weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

WAYS = ("shares", "priority", "none")  # how the flood is held back
LIMIT = 1.2  # of TTFT p99 with shares over strict priority
SETTLE = 5.0  # seconds of the flood alone
PATIENCE = 20.0  # seconds for the last answers


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(17, 400) for _ in range(count)]


async def measured(options: argparse.Namespace) -> dict[str, Any]:
    """TTFT of the steady client's requests, seconds; one without a token counts as the time that it waited."""
    from bench.machines.random_models import NoText, checkpoint
    from nanovllm import AsyncLLM, SamplingParams

    rng = random.Random(1)
    llm = AsyncLLM(str(checkpoint(options.shape)), tokenizer=NoText(), dtype="bfloat16", itl_goal=options.itl_goal,
                   max_queue=None)  # fmt: skip

    async def drain(prompt: list[int], params: SamplingParams) -> None:
        level = {"priority": 1} if options.how == "priority" else {}
        async for _ in llm.generate(prompt, params, output_kind="final", client="flood", **level):
            pass

    def params(count: int, n: int = 1) -> SamplingParams:
        return SamplingParams(n=n, max_tokens=count, ignore_eos=True, temperature=0.6)

    async def again(*request: Any) -> None:
        while True:
            await drain(*request)

    waits: list[float] = []
    gaps: list[float] = []

    async def ask(client: str) -> None:
        begin = last = time.monotonic()
        first = None
        try:
            async for _ in llm.generate(
                tokens(rng, rng.randint(32, 256)), params(32), client=client, output_kind="delta"
            ):
                now = time.monotonic()
                if first is None:
                    first = now - begin
                else:
                    gaps.append(now - last)
                last = now
        finally:
            waits.append(first or time.monotonic() - begin)

    if options.flood == "samples":
        flood = [asyncio.ensure_future(drain(tokens(rng, 80), params(options.longest, n=128)))]
    elif options.flood == "prompts":
        flood = [asyncio.ensure_future(again(tokens(rng, 6000), params(1))) for _ in range(16)]
    elif options.flood == "options":
        every = SamplingParams(max_tokens=64, ignore_eos=True, temperature=1.2, top_p=0.9, top_k=50, min_p=0.01,
                               frequency_penalty=0.5, repetition_penalty=1.1, logprobs=5,
                               logit_bias=dict.fromkeys(range(300), 1.0))  # fmt: skip
        flood = [asyncio.ensure_future(again(tokens(rng, 8), every)) for _ in range(100)]
    else:
        sizes = [(rng.randint(32, 256), rng.randint(32, 128)) for _ in range(5000)]
        flood = [asyncio.ensure_future(drain(tokens(rng, prompt), params(output))) for prompt, output in sizes]
    await asyncio.sleep(SETTLE)
    client = "flood" if options.how == "none" else "steady"
    asked: list[asyncio.Future[None]] = []
    begin = time.monotonic()
    while time.monotonic() - begin < options.seconds:
        asked.append(asyncio.ensure_future(ask(client)))
        await asyncio.sleep(options.every)
    _, unanswered = await asyncio.wait(asked, timeout=PATIENCE)
    stats = await llm.stats()
    for task in [*flood, *unanswered]:
        task.cancel()
    await asyncio.gather(*flood, *asked, return_exceptions=True)
    await llm.close()
    waits.sort()
    return {"flood": options.flood, "how": options.how, "asked": len(asked), "answered": len(asked) - len(unanswered),
            "p50": waits[len(waits) // 2], "p99": waits[int(0.99 * len(waits))], "worst": waits[-1],
            "worst gap": max(gaps, default=0.0),
            "waiting": stats.num_waiting, "preemptions": stats.num_preemptions}  # fmt: skip


def goal(text: str) -> float | str:
    return text if text == "auto" else float(text)


def side_by_side(options: argparse.Namespace, arguments: list[str]) -> None:
    """Every way in a process of its own on two cores of its own; prints each as it ends, and the ratio."""
    cores = sorted(os.sched_getaffinity(0))[: options.cores]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    runs = {}
    for number, how in enumerate(WAYS):
        own = cores[2 * number % len(cores) :][:2]
        command = [sys.executable, __file__, *arguments, "--how", how, "--pin", *map(str, own)]
        runs[how] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    found = {}
    for how, run in runs.items():
        text, _ = run.communicate()
        print(text, end="", flush=True)
        if run.returncode:
            raise RuntimeError(f"{how}: exit status {run.returncode}")
        found[how] = json.loads(text.splitlines()[-1])
    ratio = found["shares"]["p99"] / found["priority"]["p99"]
    print(
        f"TTFT p99 with shares over strict priority: {ratio:.2f}: {'met' if ratio <= LIMIT else 'MISSED'}", flush=True
    )


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flood", choices=["requests", "samples", "prompts", "options"], default="requests")
    parser.add_argument("--how", choices=WAYS, help="this way alone, in this process")
    parser.add_argument("--pin", nargs="+", type=int, help="cores of this process (default: all)")
    parser.add_argument("--cores", type=int, default=6, help="cores for all ways together")
    parser.add_argument("--shape", default="135m", help="of the model with random weights")
    parser.add_argument("--seconds", type=float, default=60.0, help="in which the steady client asks")
    parser.add_argument("--every", type=float, default=0.7, help="seconds between its requests")
    parser.add_argument("--longest", type=int, default=1900, help="tokens of each of the 128 samples")
    parser.add_argument("--itl-goal", type=goal, default="auto", help="of the engine: seconds, or auto")
    options = parser.parse_args(arguments)
    if options.how is None:
        side_by_side(options, arguments)
        return
    if options.pin:
        os.sched_setaffinity(0, options.pin)
    print(json.dumps(asyncio.run(measured(options))), flush=True)


if __name__ == "__main__":
    main()
