"""Replicas and ranks on 1, 2, 4 and 8 GPUs, a kill of a replica, and replicas by the simulator.

    python bench/machines/scaling.py --sizes 1 2 4 8 --json scaling.json
    python bench/machines/scaling.py --shape tiny --ranks-shapes tiny --requests 4      tries it on a CPU

replicas: tokens per second of N x W1 (256 requests a replica, seeds 0 to N-1) and of plain W1, the first token's p99,
    hit rate on conversations, and the front's share of a core, with N replicas of Qwen3-0.6B's shape.
kill: of one of these replicas, the seconds to the next token of its streams.
ranks: one request, 64 requests and W1 of the 8B and 32B shapes, as in `tensor_parallel.py`.
simulated: throughput of the replicas by the simulator alone, with the costs of `simulator_replicas.py`; needs no GPU.

Each part prints as it goes, and a part that fails does not end the others, but is named at the end. NVLink multicast
stays off.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import replicas as replica_bench  # beside this file, as are the next four
import tensor_parallel
import torch
from random_models import SHAPES, checkpoint
from simulator_replicas import COSTS

from nanovllm import AsyncLLM, RequestOutput, SamplingParams
from nanovllm.core.config import EngineConfig
from nanovllm.core.one_pool import resolve_pool
from nanovllm.observability.percentiles import percentiles
from nanovllm.replicas import opening
from nanovllm.replicas.replica import ReplicaResources
from nanovllm.replicas.routing import POLICIES
from nanovllm.tools.simulate.simulator import simulate
from nanovllm.tools.workloads.workloads import TimedRequest, Workload, w1

IDLE_SECONDS = 4.0  # for captures
PARTS = ("replicas", "kill", "ranks", "simulated")
MIN_GPUS = {"8b": 1, "32b": 2, "0.6b": 1, "tiny": 1}
MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def share_all_cores() -> None:
    """On a CPU: let each replica run on any core, so that more of them than cores can be tried."""
    cores = frozenset(os.sched_getaffinity(0))
    share = ReplicaResources(cores, {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    opening.split_host = lambda config, *, gpus_each=1: [share] * config.data_parallel_size  # type: ignore[assignment]


def requests_of(seeds: range, options: argparse.Namespace) -> list[TimedRequest]:
    """N x W1, or as much of each as --requests says; of the tiny shape a quarter as long, with ids that it has."""
    requests = [request for seed in seeds for request in w1(seed).requests[: options.requests]]
    if options.shape != "tiny":
        return requests
    vocab = SHAPES["tiny"]["vocab_size"]
    return [
        TimedRequest(0.0, [token % vocab for token in request.prompt_token_ids[::4]], request.num_output_tokens // 4)
        for request in requests
    ]


async def ask_all(llm: AsyncLLM, requests: list[TimedRequest], **sampling: Any) -> list[RequestOutput]:
    """The outputs of requests that come all at once."""

    async def ask(request: TimedRequest) -> RequestOutput:
        params = SamplingParams(ignore_eos=True, max_tokens=request.num_output_tokens, **sampling)
        outputs = llm.generate(request.prompt_token_ids, params, output_kind="final")
        return [output async for output in outputs][-1]

    return await asyncio.gather(*map(ask, requests))


async def run_once(llm: AsyncLLM, requests: list[TimedRequest]) -> dict[str, float]:
    await llm.reset_prefix_cache()
    cpu, begin = time.process_time(), time.perf_counter()
    outputs = await ask_all(llm, requests, temperature=0.6)
    seconds = time.perf_counter() - begin
    cpu_share = (time.process_time() - cpu) / seconds
    first = percentiles(output.metrics.ttft for output in outputs if output.metrics.ttft is not None)
    return {
        "tokens/s": sum(request.num_output_tokens for request in requests) / seconds,
        "ttft p99": 0.0 if first is None else first["p99"],
        "CPU share": cpu_share,
    }


async def hit_rate(llm: AsyncLLM, num_conversations: int) -> float:
    """Of conversations of four turns, all at once: a prompt is what was said before, and 60 tokens more."""
    await llm.reset_prefix_cache()
    await asyncio.sleep(0.5)
    before = await llm.stats()
    said = replica_bench.prompts(num_conversations, 77, 400)
    for turn in range(4):
        outputs = await ask_all(llm, [TimedRequest(0.0, prompt, 64) for prompt in said], seed=1)
        more = replica_bench.prompts(num_conversations, 78 + turn, 60)
        said = [
            [*asked, *output.outputs[0].token_ids, *new] for asked, output, new in zip(said, outputs, more, strict=True)
        ]
    await asyncio.sleep(0.5)  # for the last report
    stats = await llm.stats()
    return (stats.prefix_cache_hits - before.prefix_cache_hits) / (
        stats.prefix_cache_queries - before.prefix_cache_queries
    )


async def measure_size(count: int, options: argparse.Namespace) -> dict[str, Any]:
    """Everything about so many replicas, which are opened once."""
    limits = {"max_model_len": 2048, "max_num_seqs": 256}
    begin = time.perf_counter()
    llm = await asyncio.to_thread(replica_bench.open_replicas, options.model, count, limits)
    row: dict[str, Any] = {"replicas": count, "start": time.perf_counter() - begin}
    async with llm:
        for name, seeds in (("N x W1", range(count)), ("W1", range(1))):
            if count == 1 and name == "W1":
                row[name] = row["N x W1"]
                continue
            requests = requests_of(seeds, options)
            if name == "N x W1":
                await run_once(llm, requests)  # the warm-up
                await asyncio.sleep(IDLE_SECONDS if torch.cuda.is_available() else 0.0)
            runs = [await run_once(llm, requests) for _ in range(options.rounds)]
            row[name] = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            print(f"{count} replicas, {name}:", *(f"{run['tokens/s']:.0f}" for run in runs), "tokens/s", flush=True)
        row["hit rate"] = await hit_rate(llm, min(options.requests, 64))
        print(
            f"{count} replicas: first token p99 {row['N x W1']['ttft p99']:.3f} s, the calling process "
            f"{row['N x W1']['CPU share']:.0%} of a core, hit rate {row['hit rate']:.3f}, built in "
            f"{row['start']:.1f} s",
            flush=True,
        )
        if "kill" in options.parts and count > 1:
            row["kill"] = await replica_bench.kill_one(llm, 32 * count)
    return row


def measure_replicas(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for count in options.sizes:
        rows.append(asyncio.run(measure_size(count, options)))
        first, last = (row["N x W1"]["tokens/s"] / row["replicas"] for row in (rows[0], rows[-1]))
        print(f"{count} replicas: {last / first:.3f} of linear", flush=True)
    return rows


def measure_ranks(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for shape in options.ranks_shapes:
        for size in options.sizes:
            if size < MIN_GPUS[shape]:
                continue
            try:
                figures = tensor_parallel.measure_speed(shape, size, options.requests)
            except Exception:  # of another size there may be figures yet
                traceback.print_exc()
                continue
            rows.append({"shape": shape, "ranks": size} | figures)
            first = next(row for row in rows if row["shape"] == shape)
            gains = [first[name] / figures[name] for name in ("ms a token", "64 requests, s")]
            gains.append(figures["W1, tokens/s"] / first["W1, tokens/s"])
            print(f"{shape} on {size}: " + ", ".join(f"{gain:.2f} x" for gain in gains) + f" of {first['ranks']} (one "
                  "request, 64 requests, W1)", flush=True)  # fmt: skip
    return rows


def simulate_replicas(options: argparse.Namespace) -> list[dict[str, Any]]:
    limits = EngineConfig(num_kv_blocks=60_001, max_model_len=2048, max_num_seqs=256).resolve_limits("cuda", 2048)
    config = resolve_pool(limits, 1, 0, max_model_len_is_set=True)
    rows: list[dict[str, Any]] = []
    for count in options.sizes:
        row: dict[str, Any] = {"replicas": count}
        for name, seeds in (("N x W1", range(count)), ("W1", range(1))):
            workload = Workload(name, requests_of(seeds, options))
            route = POLICIES["prefix-aware"]()
            found = simulate(workload, config, COSTS, num_replicas=count, route=route).figures()
            row[name] = {"tokens/s": found["output_tokens_per_second"], "ttft p99": found["ttft"]["p99"]}
        rows.append(row)
        gains = [row[name]["tokens/s"] / rows[0][name]["tokens/s"] for name in ("N x W1", "W1")]
        print(f"{count} replicas, simulated: N x W1 {gains[0]:.2f} x, W1 {gains[1]:.2f} x of {rows[0]['replicas']}")
    return rows


def measure(options: argparse.Namespace) -> list[str]:
    """Run the parts; returns those that failed."""
    os.environ.update({name: value for name, value in MULTICAST.items() if name not in os.environ})
    if not torch.cuda.is_available():
        share_all_cores()
    if {*options.parts} - {"simulated", "ranks"}:
        options.model = str(checkpoint(options.shape))
    runs: dict[str, Callable[[argparse.Namespace], Any]] = {
        "simulated": simulate_replicas, "replicas": measure_replicas, "ranks": measure_ranks,
    }  # fmt: skip
    found: dict[str, Any] = {}
    failed: list[str] = []
    for part in (name for name in runs if name in options.parts):
        begin = time.perf_counter()
        try:
            found[part] = runs[part](options)
        except Exception:  # one part that fails must not lose the others
            traceback.print_exc()
            failed.append(part)
        print(f"{part}: {time.perf_counter() - begin:.0f} s", flush=True)
        if options.json:
            Path(options.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--shape", default="0.6b", choices=tuple(SHAPES), help="of the replicas' model")
    parser.add_argument("--ranks-shapes", nargs="+", default=["8b", "32b"], choices=tuple(SHAPES))
    parser.add_argument("--requests", type=int, default=256, help="of each W1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="write the figures, after each part")
    if failed := measure(parser.parse_args()):
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
