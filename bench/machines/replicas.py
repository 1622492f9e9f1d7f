"""Replicas: what a front costs, starts and kills, and 1, 2, 4 and 8 of them, measured and simulated.

    python bench/machines/replicas.py                                          the default model
    python bench/machines/replicas.py offline --model tiny                     messages are most of a step
    python bench/machines/replicas.py offline served --model 0.6b --requests 256 --tokens 256      on GPUs
    python bench/machines/replicas.py start kill --model 0.6b --share-gpu      two replicas on one GPU
    python bench/machines/replicas.py sizes simulated --model 0.6b --sizes 1 2 4 8 --requests 256

offline, served: tokens per second of the same requests, by one engine in this process and by one behind the front, in
    turn. CPU seconds are of this process, the front's alone in the second case. Of several GPUs the one behind the
    front has the last, so that both are there at once.
start: seconds until `LLM(...)` returns, each in a new process: one engine, and two replicas at once.
kill: kill -9 of one of the replicas while all requests stream; seconds from then to the next token of each stream that
    moves, with what they recompute.
sizes: N x W1 (--requests a replica, seeds 0 to N-1) and plain W1: tokens per second, the first token's p99, the front's
    share of a core, and the hit rate of conversations.
simulated: throughput of the same by the simulator, with the costs of `simulator.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from harness import Figures, Option, Part, folder_of, in_a_new_process, in_turn, ratios, run_parts, spread
from random_models import SHAPES, NoText, checkpoint  # beside this file, as are the former and the next
from simulator import COSTS
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from nanovllm import LLM, AsyncLLM, RequestOutput, SamplingParams
from nanovllm.features.engine_config import EngineConfig
from nanovllm.models.default_model import DEFAULT_MODEL, ensure_default_model
from nanovllm.observability.percentiles import percentiles
from nanovllm.one_pool import resolve_pool
from nanovllm.serving.llm import open_engine
from nanovllm.serving.replicas import opening
from nanovllm.serving.replicas.replica import ReplicaResources
from nanovllm.serving.replicas.routing import POLICIES
from nanovllm.serving.streaming.engines import EngineInterface
from nanovllm.tools.simulate.simulator import simulate
from nanovllm.tools.workloads.workloads import TimedRequest, Workload, w1

PROMPT_TOKENS = 100
GPU_CACHE_BYTES = 16 * 2**30  # of each engine: two may be on one GPU
IDLE_SECONDS = 4.0  # for captures
TINY_IDS = 512  # below the vocabulary of the tiny model


def model_folder(name: str) -> str:
    """The default model, a folder, random weights of a real one's shape, or two small random layers."""
    if name != "tiny":
        return str(checkpoint(name)) if name in SHAPES else folder_of(name)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    folder = tempfile.mkdtemp(prefix="nanovllm-replicas-")
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ensure_default_model()).save_pretrained(folder)
    return folder


def open_behind(*arguments: Any, **options: Any) -> EngineInterface:
    """`open_engine` of a process, whatever the front door asks for."""
    return open_engine(*arguments, **options | {"engine_process": True})


@contextmanager
def one_behind_a_front() -> Iterator[None]:
    """`LLM` and `AsyncLLM` put even a single engine into a process of its own."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if (num_gpus := torch.cuda.device_count()) > 1:  # which it has counted for good: the engine here uses the first
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[-1] if visible else str(num_gpus - 1)
    try:
        with (
            mock.patch("nanovllm.serving.llm.open_engine", open_behind),
            mock.patch.object(AsyncLLM, "_open", staticmethod(open_behind)),
        ):
            yield
    finally:
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
        else:
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)


def share_devices(options: argparse.Namespace) -> None:
    """Put every replica on the first GPU, or on all cores of a CPU: starts and pauses count, rates do not."""
    cores = frozenset(os.sched_getaffinity(0))
    environment = {} if torch.cuda.is_available() else {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    share = ReplicaResources(cores, environment)
    if options.share_gpu or not torch.cuda.is_available():
        opening.split_host = lambda config, **_: [share] * config.data_parallel_size  # type: ignore[assignment]


def open_door(door: Any, options: argparse.Namespace, **more: Any) -> Any:
    """Open `LLM` or `AsyncLLM`: a GPU takes the checkpoint's dtype, a CPU computes in float32."""
    is_gpu = torch.cuda.is_available()
    own: dict[str, Any] = {"dtype": "auto" if is_gpu else "float32", "max_model_len": 4096 if is_gpu else 1024}
    if is_gpu:
        own["kv_cache_memory_bytes"] = GPU_CACHE_BYTES
    if options.model in SHAPES and options.model != "tiny":
        own["tokenizer"] = NoText()
    return door(model_folder(options.model), **own | more)


def prompts(count: int, seed: int, length: int = PROMPT_TOKENS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 512, (count, length), generator=generator).tolist()


def params(options: argparse.Namespace) -> SamplingParams:
    return SamplingParams(seed=1, max_tokens=options.tokens, ignore_eos=True)


def offline(llm: LLM, options: argparse.Namespace, seed: int) -> int:
    outputs = llm.generate(prompts(options.requests, seed), params(options), use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def served(llm: AsyncLLM, options: argparse.Namespace, seed: int) -> int:
    async def read(prompt: list[int]) -> int:
        outputs = llm.generate(prompt, params(options), output_kind="delta")
        return sum([len(output.outputs[0].token_ids) async for output in outputs])

    async def read_all() -> int:
        return sum(await asyncio.gather(*map(read, prompts(options.requests, seed))))

    return asyncio.run(read_all())


def timed(
    llm: Any, run: Callable[[Any, argparse.Namespace, int], int], options: argparse.Namespace, turn: int
) -> tuple[float, float]:
    """Tokens per second, and this process's CPU seconds a token."""
    begin = time.perf_counter()
    cpu = time.process_time()
    num_tokens = run(llm, options, turn)
    return num_tokens / (time.perf_counter() - begin), (time.process_time() - cpu) / num_tokens


def compare(door: Any, run: Callable[[Any, argparse.Namespace, int], int], options: argparse.Namespace) -> Figures:
    """One engine here and one behind a front, in turn."""
    llms = {"here": open_door(door, options)}
    with one_behind_a_front():
        llms["behind"] = open_door(door, options)
    runs = in_turn({place: partial(timed, llm, run, options) for place, llm in llms.items()}, options.rounds)
    for llm in llms.values():
        asyncio.run(llm.close()) if isinstance(llm, AsyncLLM) else llm.close()
    rates = {place: [rate for rate, _ in each] for place, each in runs.items()}
    return {
        "tokens/s": {place: statistics.median(each) for place, each in rates.items()},
        "ratio": spread(ratios(rates, "behind", "here")),
        "CPU us a token of the front": 1e6 * statistics.median(seconds for _, seconds in runs["behind"]),
    }


def measure_offline(options: argparse.Namespace) -> Figures:
    return compare(LLM, offline, options)


def measure_served(options: argparse.Namespace) -> Figures:
    return compare(AsyncLLM, served, options)


def measure_opening(options: argparse.Namespace) -> Figures:
    """Seconds until so many replicas are up, imports apart; `start` runs it in processes of its own."""
    begin = time.perf_counter()
    with open_door(LLM, options, data_parallel_size=options.replicas):
        return {"seconds": time.perf_counter() - begin}


def measure_start(options: argparse.Namespace) -> Figures:
    if options.model in SHAPES and options.model != "tiny":  # any tokenizer: it is loaded, and not asked
        from tests.support.tiny_models import tiny_tokenizer

        tiny_tokenizer().save_pretrained(model_folder(options.model))
    more = ["--share-gpu"] if options.share_gpu else []

    def seconds(count: int, _: int) -> float:
        arguments = ["opening", "--model", options.model, "--replicas", str(count), *more]
        return in_a_new_process(__file__, *arguments)["result"]["seconds"]

    found = in_turn({"one engine": partial(seconds, 1), "two replicas": partial(seconds, 2)}, options.rounds)
    medians = {name: statistics.median(each) for name, each in found.items()}
    return medians | {"ratio": spread(ratios(found, "two replicas", "one engine"))}


async def kill_one(llm: AsyncLLM, num_requests: int, *, victim: int = 0, seed: int = 5) -> Figures:
    """Seconds from a kill -9 of a replica to the next token of each stream that moves; readers keep up."""
    shown: Counter[str] = Counter()
    gaps: dict[str, float] = {}
    killed_at = 0.0

    async def read(request_id: str, prompt: list[int]) -> None:
        long = SamplingParams(seed=1, max_tokens=1024 - 200, ignore_eos=True)
        async for output in llm.generate(prompt, long, request_id=request_id, output_kind="delta"):
            shown[request_id] += 1
            if killed_at and output.metrics.num_preemptions:  # its first token in the other replica
                gaps.setdefault(request_id, time.monotonic() - killed_at)

    names = {f"kill-{seed}-{number}": each for number, each in enumerate(prompts(num_requests, seed, 200))}
    tasks = [asyncio.create_task(read(*each)) for each in names.items()]
    while len(shown) < num_requests or min(shown.values()) < 8:
        await asyncio.sleep(0.005)
    moved = await llm.inspect(
        lambda pool: {
            request.new.request_id: len(request.new.prompt_token_ids) + len(request.samples[0].token_ids)
            for request in pool.replicas[victim].requests.values()
        }
    )
    killed_at = time.monotonic()
    os.kill(llm.replicas()[victim].process_id or 0, signal.SIGKILL)
    while not gaps.keys() >= moved.keys() and time.monotonic() < killed_at + 30.0:
        await asyncio.sleep(0.005)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    found = sorted(gaps.values())
    return {
        "moved streams": len(moved), "that went on": len(found), "median, s": statistics.median(found),
        "p99, s": found[int(0.99 * (len(found) - 1))], "tokens to recompute": sum(moved.values()),
    }  # fmt: skip


async def kill_each_in_turn(options: argparse.Namespace) -> Figures:
    found: Figures = {}
    async with open_door(AsyncLLM, options, data_parallel_size=options.replicas) as llm:
        for turn in range(options.rounds):
            while any(replica.state != "up" for replica in llm.replicas()):
                await asyncio.sleep(0.1)
            found[str(turn)] = await kill_one(llm, options.requests, victim=turn % options.replicas, seed=turn)
    return found


def measure_kill(options: argparse.Namespace) -> Figures:
    return asyncio.run(kill_each_in_turn(options))


# --------------------------------------------------------------------------------------------------------------- sizes


def requests_of(seeds: range, options: argparse.Namespace) -> list[TimedRequest]:
    """N x W1, or as much of each as --requests says; of the tiny model a quarter as long, with ids that it has."""
    requests = [request for seed in seeds for request in w1(seed).requests[: options.requests]]
    if options.model != "tiny":
        return requests
    return [
        TimedRequest(0.0, [token % TINY_IDS for token in each.prompt_token_ids[::4]], each.num_output_tokens // 4)
        for each in requests
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
    said = prompts(num_conversations, 77, 400)
    for turn in range(4):
        outputs = await ask_all(llm, [TimedRequest(0.0, prompt, 64) for prompt in said], seed=1)
        more = prompts(num_conversations, 78 + turn, 60)
        said = [
            [*asked, *output.outputs[0].token_ids, *new] for asked, output, new in zip(said, outputs, more, strict=True)
        ]
    await asyncio.sleep(0.5)  # for the last report
    stats = await llm.stats()
    return (stats.prefix_cache_hits - before.prefix_cache_hits) / (
        stats.prefix_cache_queries - before.prefix_cache_queries
    )


async def measure_size(count: int, options: argparse.Namespace) -> Figures:
    """Everything about so many replicas, which are opened once, as a server opens them: they capture while idle."""
    begin = time.perf_counter()
    with one_behind_a_front():
        limits = {"max_model_len": 2048, "max_num_seqs": 256, "prepares_when_idle": True, "record_itl": True}
        llm = await asyncio.to_thread(open_door, AsyncLLM, options, data_parallel_size=count, **limits)
    row: Figures = {"start, s": time.perf_counter() - begin}
    async with llm:
        await run_once(llm, requests_of(range(count), options))  # the warm-up
        await asyncio.sleep(IDLE_SECONDS if torch.cuda.is_available() else 0.0)
        for name, seeds in (("N x W1", range(count)), ("W1", range(1))):
            runs = [await run_once(llm, requests_of(seeds, options)) for _ in range(options.rounds)]
            row[name] = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        row["hit rate"] = await hit_rate(llm, min(options.requests, 64))
    print(f"  {count} replicas: {row}", flush=True)
    return row


def measure_sizes(options: argparse.Namespace) -> Figures:
    rows = {count: asyncio.run(measure_size(count, options)) for count in options.sizes}
    each = {count: row["N x W1"]["tokens/s"] / count for count, row in rows.items()}
    first = each[options.sizes[0]]
    return {str(count): row | {"of linear": each[count] / first} for count, row in rows.items()}


def measure_simulated(options: argparse.Namespace) -> Figures:
    limits = EngineConfig(num_kv_blocks=60_001, max_model_len=2048, max_num_seqs=256).resolve_limits("cuda", 2048)
    config = resolve_pool(limits, 1, 0, max_model_len_is_set=True)
    rows: Figures = {}
    for count in options.sizes:
        for name, seeds in (("N x W1", range(count)), ("W1", range(1))):
            workload = Workload(name, requests_of(seeds, options))
            route = POLICIES["prefix-aware"]()
            found = simulate(workload, config, COSTS, num_replicas=count, route=route).figures()
            row = {"tokens/s": found["output_tokens_per_second"], "ttft p99": found["ttft"]["p99"]}
            rows[f"{count} replicas, {name}"] = row
    return rows


PARTS = {
    "offline": Part(measure_offline),
    "served": Part(measure_served),
    "start": Part(measure_start),
    "kill": Part(measure_kill),
    "sizes": Part(measure_sizes, is_default=False),
    "simulated": Part(measure_simulated, is_default=False),
    "opening": Part(measure_opening, is_default=False),
}
OPTIONS = {
    "model": Option(DEFAULT_MODEL, "a folder, a shape of random_models.py, or tiny"),
    "requests": Option(16, "at once; of sizes and simulated those of each W1, 256 for its figures"),
    "tokens": Option(64, "of each answer of offline and served"),
    "rounds": Option(5, "measured runs"),
    "replicas": Option(2, "of kill and opening"),
    "sizes": Option([1, 2, 4, 8], "numbers of replicas of sizes and simulated"),
    "share_gpu": Option(False, "all replicas on the first GPU"),
}

if __name__ == "__main__":
    run_parts(__doc__, PARTS, OPTIONS, begin=share_devices)
