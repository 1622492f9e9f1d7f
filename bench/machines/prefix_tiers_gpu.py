"""Prefixes from pinned host memory on one GPU: first token over recomputing, and a replay of conversations.

    python bench/machines/prefix_tiers_gpu.py host      # a prefix of 8,192 tokens, evicted before each request
    python bench/machines/prefix_tiers_gpu.py replay    # look-alike of a 1/32 sample of Mooncake's conversation trace
    python bench/machines/prefix_tiers_gpu.py w1        # 64 long decodes of the 0.6B shape, with and without tiers
    python bench/machines/prefix_tiers_gpu.py vllm      # `host` by vLLM with its CPU offload; in its environment

Without names the first two run, in about four minutes. Random weights in the shape of Qwen3-8B, bfloat16; each result
is a line of JSON, and a table comes last. The replay has all lengths at a quarter; the pool holds little more than the
longest prompt, and host memory eight times that. Its rate is a share (`--load`) of what the pool alone finishes when
all requests wait.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from random_models import NoText, device, random_model, token_bytes  # beside this file

from nanovllm import LLM, SamplingParams
from nanovllm.model import loader
from nanovllm.tools.bench.engines import NanoVLLM
from nanovllm.tools.bench.replay import replay
from nanovllm.tools.workloads.real_traffic import draw_traffic
from nanovllm.tools.workloads.trace_statistics import TRACES
from nanovllm.tools.workloads.workloads import TimedRequest, Workload

BLOCK_SIZE = 64
SAMPLE = 32  # one of so many conversations
ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
TABLE: list[tuple[str, float, str]] = []


@contextmanager
def open_llm(shape: str, pool_tokens: int, **options: Any) -> Iterator[LLM]:
    """An engine's own model, as one from a file, with a pool of so many tokens."""
    gc.collect()
    if device() == "cuda":
        torch.cuda.empty_cache()
    begin, load = time.perf_counter(), loader.load
    own = mock.patch.object(loader, "load", lambda *arguments: dataclasses.replace(load(*arguments), is_live=False))
    with own, LLM(
        random_model(shape), tokenizer=NoText(), block_size=BLOCK_SIZE, num_kv_blocks=1 + pool_tokens // BLOCK_SIZE,
        record_itl=True, **options
    ) as llm:  # fmt: skip
        print_line(opened_in=time.perf_counter() - begin, options={name: str(value) for name, value in options.items()})
        yield llm


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(20, 500, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def print_line(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def first_token(llm: LLM, prompt: list[int]) -> tuple[float, int, int]:
    """Seconds to the first token, cached tokens, the token."""
    begin = time.perf_counter()
    (output,) = llm.generate([prompt], ONE, use_tqdm=False)
    return time.perf_counter() - begin, output.num_cached_tokens, output.outputs[0].token_ids[0]


def host(args: argparse.Namespace) -> None:
    """First token behind a prefix that lies in host memory, and behind one that nobody has computed."""
    length, question = args.prefix, 48
    room = length + 4 * BLOCK_SIZE
    with open_llm(
        args.shape,
        room + 2 * BLOCK_SIZE,
        max_model_len=room,
        prefix_cache_host_bytes=8 * room * token_bytes(args.shape),
    ) as llm:
        shared = [tokens(length, seed) for seed in (1, 2)]
        for seed in range(3):  # compiles, captures, fits costs
            first_token(llm, tokens(length + question, 100 + seed))
        for prefix in shared:
            first_token(llm, prefix + tokens(question, 10))
        cold, warm, again = [], [], []
        for number in range(args.repeats):
            seconds, cached, _ = first_token(llm, tokens(length + question, 200 + number))
            assert cached == 0, cached
            cold.append(seconds)
            for prefix in shared:  # each evicts the other
                seconds, cached, token = first_token(llm, prefix + tokens(question, 10))
                if cached >= length - BLOCK_SIZE:
                    warm.append(seconds)
                again.append((prefix is shared[0], token))
            print_line(stage="host", cold=cold[-1], warm=warm[-1:], tiers=dataclasses.asdict(llm.stats().tiers))
        is_same = len(set(again)) == 2
        rate = llm._engine.tiers.costs.rates.get("host")
    if not warm:
        print_line(stage="host", error="no prefix was loaded")
        return
    ratio = statistics.median(warm) / statistics.median(cold)
    TABLE.append((f"first token behind {length} tokens, computed, s", statistics.median(cold), ""))
    TABLE.append((f"first token behind {length} tokens, from host memory, s", statistics.median(warm), ""))
    TABLE.append(("ratio", ratio, "<= 0.2"))
    TABLE.append(("loads, GB/s", (rate or 0.0) / 1e9, ""))
    TABLE.append(("the same token each time", float(is_same), "1"))


def conversations(args: argparse.Namespace, count: int, seconds: float) -> Workload:
    """A sample of whole conversations, with lengths scaled; those that the model is too short for are left out."""
    trace = TRACES["mooncake"]
    sampled = dataclasses.replace(trace, rate=trace.rate / SAMPLE)
    drawn = draw_traffic(sampled, count, rate=count / seconds, scale=args.scale, seed=2)
    requests = [
        TimedRequest(each.arrival, each.prompt_token_ids, each.num_output_tokens)
        for each in drawn
        if len(each.prompt_token_ids) + each.num_output_tokens <= args.max_model_len
    ]
    return Workload(f"mooncake/{SAMPLE}", requests)


@contextmanager
def open_warm(args: argparse.Namespace, **options: Any) -> Iterator[LLM]:
    """An engine that has compiled, captured and fitted its costs."""
    with open_llm(args.shape, args.pool_tokens, max_model_len=args.max_model_len, max_num_seqs=32, **options) as llm:
        engine = llm._open_engine()
        for seed in range(4):  # compiles, captures, fits costs
            llm.generate(
                [tokens(args.max_model_len // 2, 1000 + 4 * seed + n) for n in range(2)],
                SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True), use_tqdm=False,
            )  # fmt: skip
        end = time.monotonic() + args.capture_seconds
        while time.monotonic() < end and engine.model_runner.capture_ahead():
            pass
        yield llm


def played(llm: LLM, workload: Workload) -> dict[str, Any]:
    adapter = NanoVLLM.__new__(NanoVLLM)
    engine = llm._open_engine()
    adapter._engine, adapter._sampling = engine, {"temperature": 0.0}
    engine.reset_prefix_cache()
    before = llm.stats()

    def idle(seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and engine.tiers is not None and engine.tiers.save_idle():
            pass
        time.sleep(max(0.0, until - time.monotonic()))

    result = replay(adapter, workload, sleep=idle)
    stats = llm.stats()
    if stats.tiers is not None:
        engine.tiers.books.check()
    waits = [done.token_times[0] - arrival for arrival, done in zip(result.arrivals, result.finished, strict=True)]
    cached = sum(done.num_cached_tokens for done in result.finished)
    return {
        "seconds": result.seconds, "ttft_mean": statistics.mean(waits), "ttft_p50": statistics.median(waits),
        "hit_rate": cached / workload.num_prompt_tokens, "steps": stats.num_steps - before.num_steps,
        "computed": stats.num_scheduled_tokens - before.num_scheduled_tokens,
        "preemptions": stats.num_preemptions - before.num_preemptions,
        "tiers": None if stats.tiers is None else dataclasses.asdict(stats.tiers),
    }  # fmt: skip


def conversations_replay(args: argparse.Namespace) -> None:
    """The same requests with the pool alone, and with eight times as much in host memory."""
    with open_warm(args) as llm:
        at_once = conversations(args, args.capacity_requests, 1.0)
        capacity = len(at_once.requests) / played(llm, at_once)["seconds"]
        count = max(8, int(args.load * capacity * args.seconds))
        workload = conversations(args, count, args.seconds)
        print_line(
            stage="replay", capacity=capacity, rate=count / args.seconds, requests=len(workload.requests),
            prompt_tokens=workload.num_prompt_tokens, output_tokens=workload.num_output_tokens,
            pool_tokens=args.pool_tokens,
        )  # fmt: skip
        plain = played(llm, workload)
    print_line(stage="replay", tiers=False, **{key: value for key, value in plain.items() if key != "tiers"})
    host_bytes = 8 * args.pool_tokens * token_bytes(args.shape)
    with open_warm(args, prefix_cache_host_bytes=host_bytes) as llm:
        tiered = played(llm, workload)
    print_line(stage="replay", host_bytes=host_bytes, **tiered)
    TABLE.append(("conversations: requests/s, of the pool alone with all waiting", capacity, ""))
    TABLE.append(("conversations: requests/s, replayed", count / args.seconds, ""))
    TABLE.append(("conversations: hit rate, pool alone", plain["hit_rate"], ""))
    TABLE.append(("conversations: hit rate, with host memory", tiered["hit_rate"], ""))
    TABLE.append(("hit rate over hit rate", tiered["hit_rate"] / max(plain["hit_rate"], 1e-9), ">= 2"))
    TABLE.append(("mean TTFT, pool alone, s", plain["ttft_mean"], ""))
    TABLE.append(("mean TTFT, with host memory, s", tiered["ttft_mean"], ""))
    TABLE.append(("mean TTFT over mean TTFT", tiered["ttft_mean"] / plain["ttft_mean"], "<= 0.6"))


def long_decodes(args: argparse.Namespace) -> None:
    """Seconds of W1 by two engines in turn, other prompts in each round: blocks are evicted, and nothing is found."""
    from gpu import engine, params_of, seconds_of  # beside this file

    from nanovllm.tools.workloads.workloads import w1

    options: dict[str, Any] = {"max_model_len": 4096, "kv_cache_memory_bytes": 26 << 30}  # one W1 has 33e9 bytes
    with engine(**options) as plain, engine(**options, prefix_cache_host_bytes=2**33) as tiered:
        llms, ratios = {"plain": plain, "tiers": tiered}, []
        for number in range(1 + args.repeats):
            workload, seconds = w1(1 + number), {}
            for name in [*llms][:: 1 - 2 * (number % 2)]:
                seconds[name] = seconds_of(llms[name], workload, params_of(workload))
            print_line(stage="w1", **seconds)
            if number:  # the first captures
                ratios.append(seconds["tiers"] / seconds["plain"])
        stored = tiered.stats().tiers
    TABLE.append(("W1: seconds with tiers over seconds without", statistics.median(ratios), "<= 1.01"))
    TABLE.append(("W1: blocks stored", 0.0 if stored is None else float(stored.num_stored_blocks), ""))


def vllm_host(args: argparse.Namespace) -> None:
    """`host` by vLLM: a pool of one prompt, prefixes offloaded to the CPU's memory by its own connector."""
    import os
    import tempfile

    from random_models import SHAPES
    from transformers import Qwen3Config

    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    from vllm import LLM as VLLM
    from vllm import SamplingParams as VParams

    length, question = args.prefix, 48
    room = length + 4 * BLOCK_SIZE
    with tempfile.TemporaryDirectory() as folder:
        Qwen3Config(**SHAPES[args.shape], dtype="bfloat16", architectures=["Qwen3ForCausalLM"]).save_pretrained(folder)
        llm = VLLM(
            folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=room, max_num_seqs=4,
            enable_prefix_caching=True, num_gpu_blocks_override=1 + (room + 2 * BLOCK_SIZE) // 16,
            max_num_batched_tokens=16_384, kv_offloading_size=8 * room * token_bytes(args.shape) / 2**30,
        )  # fmt: skip

    def ask(prompt: list[int], max_tokens: int = 1) -> tuple[float, int]:
        begin = time.perf_counter()
        params = VParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return time.perf_counter() - begin, output.num_cached_tokens or 0

    shared = [tokens(length, seed) for seed in (1, 2)]
    for seed in range(3):
        ask(tokens(length + question, 100 + seed))
    for prefix in shared:
        ask(prefix + tokens(question, 10), 16)  # its stores end in later steps
    cold, warm = [], []
    for number in range(args.repeats):
        cold.append(ask(tokens(length + question, 200 + number))[0])
        for prefix in shared:
            ask(tokens(64, 300 + number), 16)  # stores end in its steps
            seconds, cached = ask(prefix + tokens(question, 10))
            print_line(stage="vllm", cold=cold[-1], warm=seconds, cached=cached)
            if cached >= length - BLOCK_SIZE:
                warm.append(seconds)
    TABLE.append((f"vLLM: first token behind {length} tokens, computed, s", statistics.median(cold), ""))
    if warm:
        TABLE.append((f"vLLM: first token behind {length} tokens, offloaded, s", statistics.median(warm), ""))
        TABLE.append(("vLLM: ratio", statistics.median(warm) / statistics.median(cold), ""))


STAGES = {"host": host, "replay": conversations_replay, "w1": long_decodes, "vllm": vllm_host}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", default=["host", "replay"], help=", ".join(STAGES))
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--prefix", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--load", type=float, default=0.65)
    parser.add_argument("--capacity-requests", type=int, default=120)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--scale", type=float, default=0.25)
    parser.add_argument("--max-model-len", type=int, default=12_288)
    parser.add_argument("--pool-tokens", type=int, default=13_312)  # 2 GB
    parser.add_argument("--capture-seconds", type=float, default=10.0)
    args = parser.parse_args()
    begin = time.perf_counter()
    print_line(device=torch.cuda.get_device_name() if device() == "cuda" else "cpu", shape=args.shape)
    for stage in args.stages:
        STAGES[stage](args)
        print_line(stage=stage, ended_after=time.perf_counter() - begin)
    for what, figure, target in TABLE:
        print(f"{what:60} {figure:10.4g}  {target}", flush=True)


if __name__ == "__main__":
    main()
