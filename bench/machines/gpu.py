"""Speed on one GPU: workloads W1 to W4 and an 8-billion-parameter shape, start-up, and where a step's time goes.

    python bench/machines/gpu.py --out results.jsonl checks startup w1 w2 w3 w4 big steps

Without names all of them run, in about ten minutes; a table comes last. Weights are random, in the shape of Qwen3-0.6B
(or Qwen3-8B): they cost what trained ones cost. Each line of the output is a result, written as soon as it is there.
Floors by bytes are taken against the read rate measured in the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import Part, engine_of, note, params_of, prompts_of, read_rate, run_parts, seconds_of  # beside this file
from random_models import SHAPES, NoText, checkpoint, random_model, token_bytes, weight_bytes

from nanovllm import LLM
from nanovllm.tools.workloads.workloads import Workload, random_requests, w1, w2


def engine(shape: str = "0.6b", **options: Any) -> LLM:
    return LLM(checkpoint(shape), tokenizer=NoText(), dtype="bfloat16", **options)


def repeated(llm: LLM, workload: Workload, *, repeats: int = 3, reset: bool = True) -> list[float]:
    """Seconds of several runs, after one that is not counted: it captures what the workload needs."""
    seconds = []
    for _ in range(repeats + 1):
        if reset:
            llm.reset_prefix_cache()
        seconds.append(seconds_of(llm, workload))
    return seconds[1:]


def floor_seconds(shape: str, workload: Workload, max_num_seqs: int, rate: float) -> float:
    """By bytes: weights once a step, every token of context once for each output token; prompts are not counted."""
    sizes_of = [(len(request.prompt_token_ids), request.num_output_tokens) for request in workload.requests]
    context = sum(n * length + n * (n + 1) // 2 for length, n in sizes_of)
    waves = -(-len(sizes_of) // max_num_seqs)
    return (context * token_bytes(shape) + waves * max(n for _, n in sizes_of) * weight_bytes(shape)) / rate


# ------------------------------------------------------------------------------------------------------- the stages

RATE = 0.0  # bytes a second that the GPU reads


def stage_checks() -> dict[str, Any]:
    """The tests that need a GPU, several at a time where pytest-xdist is there."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    with contextlib.suppress(ImportError):
        __import__("xdist")
        command.append("-n8")
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = run.stdout.splitlines()
    note("failed checks", run.returncode, "", "0")
    return {"passed": run.returncode == 0, "output": [line for line in lines if line.startswith("FAILED")] + lines[-1:]}


STARTUP_TARGETS = {"cold": "<= 60", "warm": "<= 15", "eager": "<= 3"}


def stage_startup() -> dict[str, Any]:
    """Seconds from nothing to a first token, in processes of their own: cold (empty caches), warm, eager."""
    folder = checkpoint("0.6b")
    script = (
        "import time; t=time.perf_counter(); import sys; sys.path.insert(0, {here!r}); import torch\n"
        "from random_models import NoText\nfrom nanovllm import LLM, SamplingParams\n"
        "i=time.perf_counter(); torch.zeros(1, device='cuda'); d=time.perf_counter()\n"
        "llm=LLM({folder!r}, tokenizer=NoText(), enforce_eager={eager}); l=time.perf_counter()\n"
        "llm.generate([[1,2,3]], SamplingParams(max_tokens=1, temperature=0.6), use_tqdm=False)\n"
        "print([round(x, 2) for x in (i-t, d-i, l-d, time.perf_counter()-l)])\n"
    )
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as empty:
        for name, eager in (("cold", False), ("warm", False), ("eager", True)):
            environment = {"TORCHINDUCTOR_CACHE_DIR": f"{empty}/inductor", "TRITON_CACHE_DIR": f"{empty}/triton"}
            run = subprocess.run(
                [sys.executable, "-c", script.format(here=str(Path(__file__).parent), folder=str(folder), eager=eager)],
                env={**os.environ, **environment}, capture_output=True, text=True, check=False,
            )  # fmt: skip
            result[name] = json.loads(run.stdout.splitlines()[-1]) if run.returncode == 0 else run.stderr[-2000:]
        if isinstance(result[name], list):
            note(f"start-up {name}, load and first token", sum(result[name][2:]), "s", STARTUP_TARGETS[name])
    return {"import, device, load, first token": result}


def stage_w1(**options: Any) -> dict[str, Any]:
    workload = w1()
    with engine(max_model_len=4096, **options) as llm:
        seconds = repeated(llm, workload)
        steps = llm.stats().num_steps
        graphs = len(llm._engine.model_runner.executor._forwards.graphs)
        memory = {"pool": llm.config.num_kv_blocks, "free, GiB": torch.cuda.mem_get_info()[0] / 2**30}
        memory |= {"reserved": torch.cuda.memory_reserved() / 2**30, "allocated": torch.cuda.memory_allocated() / 2**30}
    floor = floor_seconds("0.6b", workload, 256, RATE)
    best = statistics.median(seconds)
    note("W1", best, "s", "<= 5.15 (vLLM 0.22.1: 5.66)")
    note("W1, share of the floor by bytes", floor / best, "", "")
    return {
        "seconds": seconds, "tokens_per_second": workload.num_output_tokens / best, "floor": floor,
        "share_of_floor": floor / best, "steps": steps / 4, "graphs": graphs, "memory": memory,
    }  # fmt: skip


def stage_w2() -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, caching, target in (("on", True, "<= 1.25 (vLLM: 1.53)"), ("off", False, "<= 3.0 (vLLM: 3.22)")):
        for max_num_seqs in (256, 1024):
            with engine(max_model_len=4096, enable_prefix_caching=caching, max_num_seqs=max_num_seqs) as llm:
                seconds = result[f"{name}, {max_num_seqs} at once"] = repeated(llm, w2())
            note(f"W2, prefix caching {name}, {max_num_seqs} at once", statistics.median(seconds), "s", target)
    return result


def stage_w3() -> dict[str, Any]:
    result = {}
    with engine(max_model_len=4096) as llm:
        for length in (128, 2048):
            short, long = (random_requests(requests=1, prompt=length, output=count) for count in (1, 513))
            times = [b - a for a, b in zip(repeated(llm, short), repeated(llm, long), strict=True)]
            tokens = result[f"{length} in, ms a token"] = [1e3 * seconds / 512 for seconds in times]
            target = "<= 1.2 (vLLM: 1.64)" if length == 128 else "<= 1.3 (vLLM: 1.75)"
            note(f"W3, {length} in", statistics.median(tokens), "ms", target)
    return result


def stage_w4() -> dict[str, Any]:
    """64 requests decode; 8 prompts of 8,192 tokens arrive: what they see of it, for several budgets."""
    result = {}
    for budget in (1024, 2048, 2560, 3072, 8192):
        with engine(max_model_len=9216, max_num_batched_tokens=budget) as llm:
            runs = [_whales(llm) for _ in range(3)][1:]
            result[budget] = {name: min(run[name] for run in runs) for name in runs[0]}
            print("  w4", budget, result[budget], flush=True)
            note(f"W4, budget {budget}: ITL max", result[budget]["itl max, ms"], "ms", "<= 15 (vLLM: 31.5)")
            note(f"W4, budget {budget}: all first tokens", result[budget]["all first tokens, ms"], "ms", "<= 330 (258)")
    return result


def _whales(llm: LLM) -> dict[str, float]:
    engine = llm._open_engine()
    llm.reset_prefix_cache()
    small = random_requests(requests=64, prompt=512, output=600)
    whales = random_requests(requests=8, prompt=8192, output=4, seed=1)

    add(engine, small, "small")
    for _ in range(100):
        engine.step()
    alone = gaps_of(engine.step, lambda n: n < 50)
    begin = time.perf_counter()
    add(engine, whales, "whale")
    gaps = gaps_of(engine.step, lambda _: len(engine.outputs) < 8)
    firsts = [output.metrics.first_token_time for output in engine.outputs if output.request_id.startswith("whale")]
    offset = time.monotonic() - time.perf_counter()
    for number in range(64):
        engine.abort(f"small{number}")
    engine.outputs.clear()
    return {
        "all first tokens, ms": 1e3 * (max(firsts) - offset - begin),
        "itl max, ms": 1e3 * max(gaps), "itl median, ms": 1e3 * statistics.median(gaps),
        "itl alone, ms": 1e3 * statistics.median(alone),
    }  # fmt: skip


def add(engine: Any, workload: Workload, name: str = "") -> None:
    for number, (prompt, params) in enumerate(zip(prompts_of(workload), params_of(workload), strict=True)):
        engine.add(engine.input_processor.process_one(f"{name}{number}", prompt, params))


def gaps_of(step: Callable[[], object], goes_on: Callable[[int], bool]) -> list[float]:
    gaps: list[float] = []
    last = time.perf_counter()
    while goes_on(len(gaps)):
        step()
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
    return gaps


PROMPTS = {"1 x 65,536": (1, 65_536), "1 x 122,880": (1, 122_880), "16 x 16,384": (16, 16_384), "8 x 1,024": (8, 1024)}


def stage_prompts() -> dict[str, Any]:
    """Prompts with one output token each: seconds, and operations a second."""
    result: dict[str, Any] = {}
    with engine("0.6b-128k", max_num_seqs=64) as llm:
        for name, (requests, prompt) in PROMPTS.items():
            seconds = statistics.median(repeated(llm, random_requests(requests=requests, prompt=prompt, output=1)))
            flops = requests * prompt_flops("0.6b", prompt)
            result[name] = {"seconds": seconds, "tokens/s": requests * prompt / seconds, "flop/s": flops / seconds}
            print("  prompts", name, result[name], flush=True)
            note(f"prompts, {name}", seconds, "s", "")
            note(f"prompts, {name}: arithmetic", flops / seconds / 1e12, "TFLOP/s", "")
    return result


def prompt_flops(shape: str, length: int) -> float:
    """Two operations for each multiply-add of a prompt: its weights, without the output projection, and attention."""
    sizes = SHAPES[shape]
    heads, head_dim = sizes["num_attention_heads"], sizes["head_dim"]
    weights = weight_bytes(shape) / 2 - sizes["vocab_size"] * sizes["hidden_size"]
    pairs = length * (length + 1) / 2
    return 2.0 * weights * length + 4.0 * pairs * heads * head_dim * sizes["num_hidden_layers"]


def stage_big() -> dict[str, Any]:
    workload = random_requests(requests=64, prompt=512, output=256)
    # Not from a file, since 16 GB take a minute to write and to read again; but the engine's own, as one from a file.
    with engine_of(random_model("8b"), max_model_len=9216) as llm:
        seconds = repeated(llm, workload)
        whales = statistics.median(repeated(llm, random_requests(requests=8, prompt=8192, output=1)))
        short = repeated(llm, random_requests(requests=64, prompt=512, output=1))
    floor = floor_seconds("8b", workload, 64, RATE)
    best = statistics.median(seconds)
    share = floor / (best - statistics.median(short))
    note("8B, decodes' share of their floor", share, "", ">= 0.75")
    note("8B, 8 prompts of 8,192", 8 * 8192 / whales, "tokens/s", ">= 1.05 x vLLM")
    note("8B, 64 requests", best, "s", "")
    return {
        "seconds": seconds,
        "8 x 8,192": whales,
        "prompts alone": short,
        "decode floor": floor,
        "share": floor / best,
        "decodes": share,
    }


def stage_steps() -> dict[str, Any]:
    """A profiler's view of decode steps: kernels by time, and how long the device was idle."""
    result = {}
    for count, context in ((1, 384), (4, 384), (64, 640), (256, 800)):
        with engine(max_model_len=4096) as llm:
            result[count] = _profile(llm, count, context)
            note(f"step, {count} requests at {context}", result[count]["step, ms"], "ms", "")
            note(f"step, {count} requests: idle share", result[count]["idle share"], "", "<= 0.02 at 256")
    return result


def stage_pool() -> dict[str, Any]:
    """The time of a step must not depend on the size of the pool."""
    result = {}
    for num_blocks in (512, 2048, 8192):
        with engine(max_model_len=2048, num_kv_blocks=num_blocks) as llm:
            result[num_blocks] = _step_seconds(llm, 32, 384)
            note(f"step, 32 requests, pool of {num_blocks} blocks", 1e3 * result[num_blocks], "ms", "all alike")
    return result


def _step_seconds(llm: LLM, count: int, context: int) -> float:
    """The median of decode steps."""
    engine = llm._open_engine()
    add(engine, random_requests(requests=count, prompt=context, output=100), "step")
    while engine.scheduler.waiting or any(s.num_output_tokens < 10 for s in engine.scheduler.running):
        engine.step()
    return statistics.median(gaps_of(engine.step, lambda n: n < 60))


def _profile(llm: LLM, count: int, context: int) -> dict[str, Any]:
    engine = llm._open_engine()
    add(engine, random_requests(requests=count, prompt=context, output=200), "profile")
    engine.step()
    if count * context > 40_000:
        prompts = kernels_of(engine, 3, f"{count} prompts")
        print(f"  {count} prompts {prompts}", flush=True)
    while engine.scheduler.waiting or any(s.num_output_tokens < 4 for s in engine.scheduler.running):
        engine.step()
    gaps = gaps_of(engine.step, lambda n: n < 40)
    return {"step, ms": 1e3 * statistics.median(gaps)} | kernels_of(engine, 20, str(count))


def kernels_of(engine: Any, num_steps: int, name_of_steps: str) -> dict[str, Any]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(num_steps):
            engine.step()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type.name == "CUDA"]
    kernels = sorted((event.time_range.start, event.time_range.end, event.name) for event in events)
    busy, end = 0.0, kernels[0][0]
    by_name: dict[str, list[float]] = {}
    for start, stop, name in kernels:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
        by_name.setdefault(name, []).append(stop - start)
    span = end - kernels[0][0]
    top = sorted(by_name.items(), key=lambda item: -sum(item[1]))
    for name, times in top[:24]:
        print(f"  {name_of_steps:4} {sum(times) / num_steps:9.1f} us {len(times) / num_steps:7.1f} x  {name[:100]}")
    return {
        "kernels a step": len(kernels) / num_steps, "busy, ms": busy / num_steps / 1e3, "idle share": 1 - busy / span
    }  # fmt: skip


def read_the_rate(_: argparse.Namespace) -> None:
    global RATE
    RATE = read_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, read {RATE / 1e12:.2f} TB/s", flush=True)


KV_REQUESTS, KV_CONTEXT = 32, 16_384


def stage_kv() -> dict[str, Any]:
    """K and V in 8-bit floats beside bfloat16: steps of 32 requests at 16,384 tokens of an 8B shape, prompts, W1."""
    result: dict[str, Any] = {}
    for form in ("auto", "fp8", "auto", "fp8"):  # in turn
        found = result.setdefault(form, {"step, ms": [], "w1, s": [], "prompts, s": []})
        for measure in (_kv_steps, _kv_w1):
            try:
                for name, value in measure(form).items():
                    found[name].append(value)
            except Exception as error:
                found.setdefault("failed", []).append(f"{measure.__name__}: {error!r}")
            print("  kv", form, found, flush=True)
    for name, target in (("step, ms", ">= 1.4"), ("w1, s", ">= 1.35"), ("prompts, s", "")):
        plain, own = (result[form][name] for form in ("auto", "fp8"))
        if plain and own:
            note(f"fp8 KV, {name}: ratio", min(plain) / min(own), "", target)
    return result


def _kv_steps(form: str) -> dict[str, float]:
    with engine_of(random_model("8b"), max_model_len=KV_CONTEXT + 256, kv_cache_dtype=form) as llm:
        engine = llm._open_engine()
        begin = time.perf_counter()
        add(engine, random_requests(requests=KV_REQUESTS, prompt=KV_CONTEXT, output=300))
        while engine.scheduler.waiting or any(s.num_output_tokens < 1 for s in engine.scheduler.running):
            engine.step()
        prompts = time.perf_counter() - begin
        while any(s.num_output_tokens < 10 for s in engine.scheduler.running):
            engine.step()
        return {"prompts, s": prompts, "step, ms": 1e3 * statistics.median(gaps_of(engine.step, lambda n: n < 60))}


def _kv_w1(form: str) -> dict[str, float]:
    with engine(max_model_len=4096, kv_cache_dtype=form) as llm:
        return {"w1, s": statistics.median(repeated(llm, w1(), repeats=2))}


def stage_quantised() -> dict[str, Any]:
    """Steps and prompts of an 8B shape with weights quantised as they are loaded, times bfloat16."""
    result: dict[str, Any] = {}
    targets = {"int4": {1: ">= 2.0", 64: ">= 1.3"}, "fp8": {1: ">= 1.5", 64: ">= 1.4"}}
    for form in (None, "int4", "int8", "fp8"):
        with engine("8b", max_model_len=2304, quantization=form) as llm:
            times = result[form or "bfloat16"] = {}
            for count in (1, 4, 8, 64):
                times[count] = 1e3 * _step_seconds(llm, count, 384)
                while llm._open_engine().has_unfinished:
                    llm._open_engine().step()
            times["prompts"] = statistics.median(repeated(llm, random_requests(requests=8, prompt=2048, output=1)))
        print("  quantised", form, times, flush=True)
        for what, value in times.items():
            if form is not None:
                target = targets.get(form, {}).get(what, "")
                note(f"{form}, {what}: times bfloat16", result["bfloat16"][what] / value, "", target)
    return result


STAGES: dict[str, Callable[[], dict[str, Any]]] = {
    "checks": stage_checks,
    "startup": stage_startup,
    "w1": stage_w1,
    "w2": stage_w2,
    "w3": stage_w3,
    "w4": stage_w4,
    "prompts": stage_prompts,
    "big": stage_big,
    "steps": stage_steps,
    "pool": stage_pool,
    "kv": stage_kv,
    "quantised": stage_quantised,
}


def part_of(stage: Callable[[], dict[str, Any]]) -> Part:
    return Part(lambda _: stage(), gpu=True)


if __name__ == "__main__":
    run_parts(__doc__, {name: part_of(stage) for name, stage in STAGES.items()}, {}, begin=read_the_rate)
