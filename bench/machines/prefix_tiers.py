"""What tiers of the prefix cache and beam search bring: on this machine's CPU, on one GPU, and with vLLM's offload.

    python bench/machines/prefix_tiers.py start       first token of a new process, with and without a directory
    python bench/machines/prefix_tiers.py overhead    W and P with and without tiers: engines that step in turn
    python bench/machines/prefix_tiers.py beams       beams of 4 over 16 prompts, against transformers
    python bench/machines/prefix_tiers.py host        a prefix that is evicted to host memory before each request
    python bench/machines/prefix_tiers.py replay      look-alike of a 1/32 sample of Mooncake's conversation trace
    $VLLM_PYTHON bench/machines/prefix_tiers.py vllm  `host` by vLLM with its CPU offload, in its environment

The last three take random weights of --shape in bfloat16. The replay has all lengths at a quarter; the pool holds
little more than the longest prompt, and host memory eight times that. Its rate is a share (--load) of what the pool
alone finishes when all requests wait.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from harness import Figures, Option, Part, engine_of, in_a_new_process, note, run_parts, spread
from random_models import SHAPES, device, random_model, token_bytes  # beside this file, as is the former

from nanovllm import LLM, BeamSearchParams, SamplingParams
from nanovllm.tools.bench.engines import NanoVLLM
from nanovllm.tools.bench.replay import replay
from nanovllm.tools.workloads.real_traffic import draw_traffic
from nanovllm.tools.workloads.trace_statistics import TRACES
from nanovllm.tools.workloads.workloads import WORKLOADS, TimedRequest, Workload

SYSTEM = [100 + 7919 * number % 40_000 for number in range(2000)]
QUESTION = [5, 6, 7, 8, 9] * 4
QUESTION_TOKENS = 48  # of host and vllm
STORE_STEPS = 16  # in which stores end
STEPS_IN_TURN = 4
MAX_OUTPUT = 128
BLOCK_SIZE = 64
SAMPLE = 32  # one of so many conversations
MAX_MODEL_LEN = 12_288  # of the replay
POOL_TOKENS = 13_312  # 2 GB of Qwen3-8B's shape


# ---------------------------------------------------------------------------------------------------------------- CPU


def measure_first(options: argparse.Namespace) -> Figures:
    """TTFT from the call of `generate`, with the model loaded; `start` runs it in processes of its own."""
    tier = {"prefix_cache_dir": options.folder} if options.folder else {}
    with LLM(max_model_len=4096, **tier) as llm:
        llm.generate([[9, 8, 7]], SamplingParams(temperature=0.0, max_tokens=2), use_tqdm=False)
        seconds, cached = answer_seconds(llm, SYSTEM + QUESTION)
    return {"seconds": seconds, "cached": cached}


def measure_start(options: argparse.Namespace) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        warm = ["--folder", folder]
        in_a_new_process(__file__, "first", *warm)
        found = [
            [in_a_new_process(__file__, "first", *each)["result"] for each in ([], warm)]
            for _ in range(options.repeats)
        ]
    cold_s, warm_s = (statistics.median(pair[number]["seconds"] for pair in found) for number in (0, 1))
    return {"cold": cold_s, "warm": warm_s, "ratio": warm_s / cold_s, "cached": found[-1][1]["cached"]}


def step_in_turn(llms: dict[str, LLM], workload: str, repeat: int, requests: int) -> dict[str, float]:
    """Return the processor seconds of each engine's thread: a busy machine slows both alike."""
    for llm in llms.values():
        engine = llm._open_engine()
        for number, request in enumerate(WORKLOADS[workload]().requests[:requests]):
            prompt = [1 + repeat, *request.prompt_token_ids[1:]]  # others in each run, so that no cache has them
            params = SamplingParams(
                temperature=0.0, max_tokens=min(request.num_output_tokens, MAX_OUTPUT), ignore_eos=True
            )
            engine.add(engine.input_processor.process_one(f"{repeat}-{number}", prompt, params))
    seconds = dict.fromkeys(llms, 0.0)
    order = list(llms)[:: 1 - 2 * (repeat % 2)]
    while any(llm._open_engine().has_unfinished for llm in llms.values()):
        for name in order:
            engine = llms[name]._open_engine()
            begin = time.thread_time()
            for _ in range(STEPS_IN_TURN):
                engine.step()
            seconds[name] += time.thread_time() - begin
            engine.outputs.clear()
    return seconds


def measure_overhead(options: argparse.Namespace) -> Figures:
    torch.set_num_threads(1)
    found: Figures = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        settings: dict[str, dict[str, Any]] = {"without": {}}
        settings["tiers"] = {"prefix_cache_host_bytes": 2**30, "prefix_cache_dir": folder}
        llms = {name: stack.enter_context(LLM(max_model_len=1024, **each)) for name, each in settings.items()}
        for workload in ("W", "P"):
            runs = [step_in_turn(llms, workload, number, options.requests) for number in range(options.repeats + 1)][1:]
            found[workload] = spread([run["tiers"] / run["without"] for run in runs])
    return found


def measure_beams(options: argparse.Namespace) -> Figures:
    from transformers import AutoModelForCausalLM

    from nanovllm.models.default_model import default_folder

    width, length = 4, 32
    prompts = [request.prompt_token_ids[:96] for request in WORKLOADS["W"]().requests[: options.requests]]
    reference = AutoModelForCausalLM.from_pretrained(default_folder())
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    ours = []
    theirs = []
    with LLM(max_model_len=1024) as llm:
        params = BeamSearchParams(beam_width=width, max_tokens=length, ignore_eos=True)
        for _ in range(options.repeats):
            begin = time.perf_counter()
            llm.beam_search(prompts, params)
            ours.append(time.perf_counter() - begin)
            llm.reset_prefix_cache()
            begin = time.perf_counter()
            with torch.inference_mode():
                reference.generate(
                    padded, attention_mask=mask, num_beams=width, do_sample=False, max_new_tokens=length,
                    min_new_tokens=length, pad_token_id=0,
                )  # fmt: skip
            theirs.append(time.perf_counter() - begin)
    ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
    return {"ours, s": statistics.median(ours), "transformers, s": statistics.median(theirs), "ratio": ratio}


# ---------------------------------------------------------------------------------------------------------- host memory


@contextmanager
def open_llm(shape: str, pool_tokens: int, **options: Any) -> Iterator[LLM]:
    """An engine of random weights, with a pool of so many tokens."""
    gc.collect()
    if device() == "cuda":
        torch.cuda.empty_cache()
    blocks = 1 + pool_tokens // BLOCK_SIZE
    with engine_of(random_model(shape), block_size=BLOCK_SIZE, num_kv_blocks=blocks, record_itl=True, **options) as llm:
        yield llm


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(20, 500, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def answer_seconds(llm: LLM, prompt: list[int], max_tokens: int = 1) -> tuple[float, int]:
    """Seconds of an answer, and its prompt's cached tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    begin = time.perf_counter()
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return time.perf_counter() - begin, output.num_cached_tokens


def room_of(length: int) -> int:
    return length + 4 * BLOCK_SIZE


def measure_host(options: argparse.Namespace) -> Figures:
    """First token behind a prefix that lies in host memory, and behind one that nobody has computed."""
    length = options.prefix
    room = room_of(length)
    host_bytes = 8 * room * token_bytes(options.shape)
    with open_llm(options.shape, room + 2 * BLOCK_SIZE, max_model_len=room, prefix_cache_host_bytes=host_bytes) as llm:
        found = behind_prefixes(partial(answer_seconds, llm), length, options.repeats)
        rate = llm._engine.tiers.costs.rates.get("host")
    return found | {"loads, GB/s": (rate or 0.0) / 1e9}


def behind_prefixes(ask: Callable[[list[int], int], tuple[float, int]], length: int, repeats: int) -> Figures:
    """Measure first tokens behind two prefixes, of which each evicts the other.

    Args:
        ask: function of a prompt and a number of tokens that returns (seconds, cached tokens).
    """
    shared = [tokens(length, seed) for seed in (1, 2)]
    for seed in range(3):  # compiles, captures, fits costs
        ask(tokens(length + QUESTION_TOKENS, 100 + seed), 1)
    for prefix in shared:
        ask(prefix + tokens(QUESTION_TOKENS, 10), STORE_STEPS)
    cold = []
    warm = []
    for number in range(repeats):
        cold.append(ask(tokens(length + QUESTION_TOKENS, 200 + number), 1)[0])
        for prefix in shared:
            ask(tokens(64, 300 + number), STORE_STEPS)
            seconds, cached = ask(prefix + tokens(QUESTION_TOKENS, 10), 1)
            if cached >= length - BLOCK_SIZE:
                warm.append(seconds)
    if not warm:
        raise RuntimeError(f"no prefix of {length} tokens was loaded in {2 * repeats} requests")
    ratio = statistics.median(warm) / statistics.median(cold)
    note(f"first token behind {length} tokens, loaded over computed", ratio, "", "<= 0.2")
    return {"computed, s": spread(cold), "loaded, s": spread(warm), "ratio": ratio}


def measure_vllm(options: argparse.Namespace) -> Figures:
    """`host` by vLLM: a pool of one prompt, prefixes offloaded to the CPU's memory by its own connector."""
    from transformers import Qwen3Config
    from vllm import LLM as VLLM
    from vllm import SamplingParams as VParams

    room = room_of(options.prefix)
    config = Qwen3Config(**SHAPES[options.shape], dtype="bfloat16", architectures=["Qwen3ForCausalLM"])
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        llm = VLLM(
            folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=room, max_num_seqs=4,
            enable_prefix_caching=True, num_gpu_blocks_override=1 + (room + 2 * BLOCK_SIZE) // 16,
            max_num_batched_tokens=16_384, kv_offloading_size=8 * room * token_bytes(options.shape) / 2**30,
        )  # fmt: skip

    def ask(prompt: list[int], max_tokens: int) -> tuple[float, int]:
        begin = time.perf_counter()
        params = VParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return time.perf_counter() - begin, output.num_cached_tokens or 0

    return behind_prefixes(ask, options.prefix, options.repeats)


def conversations(options: argparse.Namespace, count: int, seconds: float) -> Workload:
    """A sample of whole conversations, with lengths scaled; those that the model is too short for are left out."""
    trace = TRACES["mooncake"]
    sampled = dataclasses.replace(trace, rate=trace.rate / SAMPLE)
    drawn = draw_traffic(sampled, count, rate=count / seconds, scale=options.scale, seed=2)
    requests = [
        TimedRequest(each.arrival, each.prompt_token_ids, each.num_output_tokens)
        for each in drawn
        if len(each.prompt_token_ids) + each.num_output_tokens <= MAX_MODEL_LEN
    ]
    return Workload(f"mooncake/{SAMPLE}", requests)


@contextmanager
def open_warm(options: argparse.Namespace, **tier: Any) -> Iterator[LLM]:
    """An engine that has compiled, captured and fitted its costs."""
    with open_llm(options.shape, POOL_TOKENS, max_model_len=MAX_MODEL_LEN, max_num_seqs=32, **tier) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        for seed in range(4):
            llm.generate([tokens(MAX_MODEL_LEN // 2, 1000 + 2 * seed + n) for n in range(2)], params, use_tqdm=False)
        end = time.monotonic() + options.capture_seconds
        while time.monotonic() < end and llm._open_engine().model_runner.capture_ahead():
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


def measure_replay(options: argparse.Namespace) -> Figures:
    """The same requests with the pool alone, and with eight times as much in host memory."""
    with open_warm(options) as llm:
        at_once = conversations(options, options.requests, 1.0)
        capacity = len(at_once.requests) / played(llm, at_once)["seconds"]
        count = max(8, int(options.load * capacity * options.seconds))
        workload = conversations(options, count, options.seconds)
        plain = played(llm, workload)
    with open_warm(options, prefix_cache_host_bytes=8 * POOL_TOKENS * token_bytes(options.shape)) as llm:
        tiered = played(llm, workload)
    note("hit rate with host memory over that of the pool alone", tiered["hit_rate"] / plain["hit_rate"], "", ">= 2")
    note("mean TTFT with host memory over that", tiered["ttft_mean"] / plain["ttft_mean"], "", "<= 0.6")
    return {"capacity": capacity, "rate": count / options.seconds, "pool alone": plain, "host memory": tiered}


PARTS = {
    "start": Part(measure_start),
    "overhead": Part(measure_overhead),
    "beams": Part(measure_beams),
    "host": Part(measure_host, is_default=False),
    "replay": Part(measure_replay, gpu=True, is_default=False),
    "vllm": Part(measure_vllm, gpu=True, needs=("vllm",), is_default=False),
    "first": Part(measure_first, is_default=False),
}
OPTIONS = {
    "repeats": Option(3, "measured runs"),
    "requests": Option(16, "of overhead and beams; that tell the capacity of replay, 120 for its figures"),
    "folder": Option(None, "of first: the directory of its tier"),
    "shape": Option("8b", "of host, replay and vllm"),
    "prefix": Option(8192, "tokens, of host and vllm"),
    "load": Option(0.65, "share of the capacity, of replay"),
    "seconds": Option(60.0, "of replay"),
    "scale": Option(0.25, "of the lengths of replay"),
    "capture_seconds": Option(10.0, "of each engine before the replay"),
}

if __name__ == "__main__":
    run_parts(__doc__, PARTS, OPTIONS)
