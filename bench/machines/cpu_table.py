"""One column for this machine's processor: its class, the forms that run, what it reaches at best, and workloads.

    python bench/machines/cpu_table.py --json zen5.json
    python bench/machines/cpu_table.py --shapes 1b 1b:Q4_K 4b 4b:Q4_K      random weights, streams and prompts
    ... --shapes 1b:Q4_K --variants "one stream" --llama-cpp llama-batched-bench      in turn with llama.cpp
    python bench/machines/cpu_table.py --tables zen5.json granite_rapids.json      as Markdown, side by side

Peaks are the best of many short bursts of all threads at once (`cpu_rates.cpp`): multiply-adds from registers alone,
and bytes read from memory in order. A workload's share of the product peak counts two operations for each multiply-add
of products and attention; its share of the memory rate counts the weights once a step and each decode's K and V once,
those of a common prefix once a step. Each workload runs in a process of its own: once for warm-up, then measured. On a
machine that does other work too, --processor-time divides by the processor time of a thread instead of the time passed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("cpu_rates.cpp")
NUM_BURSTS, READ_BYTES = 25, 192 * 2**20  # of each thread
GREEDY: dict[str, Any] = {"temperature": 0.0}
WARM: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "W": ("W", GREEDY),
    "W, temperature 0.8": ("W", {"temperature": 0.8}),
    "W, and top_p 0.95": ("W", WARM),
    "W, and top_k 50": ("W", WARM | {"top_k": 50}),
    "W, repetition penalty": ("W", GREEDY | {"repetition_penalty": 1.1}),
    "W, 5 log-probabilities": ("W", GREEDY | {"logprobs": 5}),
    "P": ("P", GREEDY),
    "single": ("single", GREEDY),
}
# Of larger models with random weights.
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "one stream": ("random:requests=1,prompt=128,output=32", GREEDY),
    "4 streams": ("random:requests=4,prompt=128,output=32", GREEDY),
    "16 streams": ("random:requests=16,prompt=128,output=32", GREEDY),
    "prompts": ("random:requests=4,prompt=1024,output=1", GREEDY),
}


# --------------------------------------------------------------------------------------------------------------- peaks


def rates(num_threads: int, by_processor: bool) -> dict[str, float]:
    """GFLOP/s of float32 and bfloat16 products (0 without an instruction for them), and GB/s of reading."""
    from nanovllm.device import cpp_compiler
    from nanovllm.fast.kernels.processor_classes import targets

    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/rates.so"
        options = ["-O3", *targets()[0].flags, "-std=c++17", "-shared", "-fPIC"]
        subprocess.run([cpp_compiler(), *options, str(SOURCE), "-o", library], check=True)
        functions = ctypes.CDLL(library)
    result = {}
    for name, function, rounds in (
        ("float32 GFLOP/s", functions.multiply_floats, 400_000),
        ("bfloat16 GFLOP/s", functions.multiply_bfloat16, 200_000),
    ):
        function.argtypes, function.restype = [ctypes.c_int64, ctypes.c_void_p], ctypes.c_double
        found = best_rate(num_threads, lambda _, to, call=function, count=rounds: call(count, to))
        result[name] = found[by_processor] / 1e9
    read = functions.read_bytes
    read.argtypes, read.restype = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p], ctypes.c_double
    maps = [mmap.mmap(-1, READ_BYTES) for _ in range(num_threads)]
    places = [(ctypes.c_char * READ_BYTES).from_buffer(memory) for memory in maps]
    for place in places:
        ctypes.memset(place, 1, READ_BYTES)
    found = best_rate(num_threads, lambda thread, to: read(ctypes.addressof(places[thread]), READ_BYTES, to))
    return result | {"memory GB/s": found[by_processor] / 1e9}


def best_rate(num_threads: int, call: Callable[[int, Any], float]) -> tuple[float, float]:
    """What all threads do in a second, in their best common burst, and in a second of each one's processor time."""
    barrier = threading.Barrier(num_threads)
    spans: list[list[tuple[float, float, float, float]]] = [[] for _ in range(num_threads)]

    def run(thread: int) -> None:
        result = ctypes.c_int64()
        for _ in range(NUM_BURSTS):
            barrier.wait()
            begin, before = time.perf_counter(), time.thread_time()
            done = call(thread, ctypes.byref(result))  # without the interpreter's lock
            spans[thread].append((begin, time.perf_counter(), time.thread_time() - before, done))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bursts = list(zip(*spans, strict=True))
    passed = max(sum(b[3] for b in burst) / (max(b[1] for b in burst) - min(b[0] for b in burst)) for burst in bursts)
    return passed, max(sum(b[3] / b[2] for b in burst) for burst in bursts)


# --------------------------------------------------------------------------------------------------------------- forms


def forms(engine: Any) -> dict[str, str]:
    """In which form each part runs, all of them found right at start; others would not be here."""
    from nanovllm.fast.row_kernels import load_row_kernels

    runner = engine.model_runner
    if not runner.choice.kernels:
        return {"attention": runner.choice.backend, "products": "oneDNN", "sampling": "PyTorch"}
    kernels = runner.choice.kernels[0]
    is_half = engine.model_runner.binding.dtype.itemsize == 2
    vectors = {"amx": "avx512_bf16"}.get(kernels.target, kernels.target)
    return {
        "products": kernels.target if is_half else vectors,
        "attention": kernels.target if is_half else vectors,
        "sampling": vectors if load_row_kernels() is not None else "PyTorch",
        "layers": "fused" if runner.binding.fused_layers else "modules",
    }


# ----------------------------------------------------------------------------------------------------------- workloads


def work(config: Any, workload: Any, played: Any, counts: dict[str, int], weight: float) -> tuple[float, float]:
    """Operations, and bytes read, of a replayed workload; `weight` bytes each."""
    heads, kv_heads, layers = config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    layer = config.hidden_size * dim * (2 * heads + 2 * kv_heads) + 3 * config.hidden_size * config.intermediate_size
    head = config.hidden_size * config.vocab_size
    sampled = sum(request.num_output_tokens for request in workload.requests)
    operations = 2.0 * layers * layer * counts["computed_tokens"] + 2.0 * head * sampled
    token_bytes, read, cached = 2 * 2 * kv_heads * dim * layers, 0.0, 0
    for ended in played.finished:
        request = workload.requests[ended.number]
        prompt, end = len(request.prompt_token_ids), len(request.prompt_token_ids) + request.num_output_tokens - 1
        positions = range(ended.num_cached_tokens, end)
        operations += 4.0 * heads * dim * layers * sum(position + 1 for position in positions)
        read += token_bytes * sum(position + 1 - ended.num_cached_tokens for position in range(prompt, end))
        cached = max(cached, ended.num_cached_tokens)
    return operations, read + counts["steps"] * (weight * (layers * layer + head) + token_bytes * cached)


def measure_variant(name: str, num_requests: int | None, model: str | None) -> dict[str, Any]:
    """Figures of a variant, in this process."""
    import torch

    from nanovllm.features.sampling_params import SamplingParams
    from nanovllm.models.default_model import DEFAULT_MODEL
    from nanovllm.tools.bench.engines import NanoVLLM
    from nanovllm.tools.bench.replay import figures, replay
    from nanovllm.tools.workloads import specs

    workload_name, options = (VARIANTS | STREAMS)[name]
    tokenizer, weight = {}, 2.0
    if name in STREAMS:
        from random_models import NoText, checkpoint, gguf_file  # beside this file

        shape, _, form = (model or "").partition(":")
        tokenizer, weight = {"tokenizer": NoText()}, {"": 2.0, "BF16": 2.0, "Q4_K": 144 / 256}[form]
        model = str(gguf_file(shape, form) if form else checkpoint(shape))
    workload = specs.build(workload_name)
    workload = workload.first(min(num_requests or len(workload.requests), len(workload.requests)))

    class Engine(NanoVLLM):
        def add(self, number: int, request: Any) -> None:
            params = SamplingParams(**options, ignore_eos=True, max_tokens=request.num_output_tokens, seed=number)
            self._engine.add(self._engine.input_processor.process_one(str(number), request.prompt_token_ids, params))

    cache = 512 * 2**20 if name in VARIANTS else 2**31
    options_of_engine = {"kv_cache_memory_bytes": cache, "device": "cpu", "dtype": "bfloat16", **tokenizer}
    engine = Engine(model or DEFAULT_MODEL, options_of_engine, 1)
    for _ in range(2):
        engine.prepare(workload)
        before, processor_time = engine.counters(), time.process_time()
        played = replay(engine, workload)
        processor_time = time.process_time() - processor_time
    counts = {key: count - before[key] for key, count in engine.counters().items()}
    config = engine._engine.model_runner.binding.model.config.get_text_config(decoder=True)
    operations, num_bytes = work(config, workload, played, counts, weight)
    result = figures(workload, played)
    return {
        "threads": torch.get_num_threads(),
        "seconds": result["seconds"],
        "processor seconds": processor_time,
        "tokens/s": result["output_tokens_per_second"],
        "GFLOP": operations / 1e9,
        "GB": num_bytes / 1e9,
        "forms": forms(engine._engine),
    }


def in_process(arguments: list[str], num_threads: int) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": str(num_threads)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def llama_cpp(binary: str, shape: str, name: str, num_threads: int) -> dict[str, float]:
    """Figures of `llama-batched-bench` for a variant of STREAMS, in a file with equally many bytes of weights."""
    from random_models import gguf_file  # beside this file

    from nanovllm.tools.workloads import specs

    requests = specs.build(STREAMS[name][0]).requests
    prompt, output = len(requests[0].prompt_token_ids), requests[0].num_output_tokens
    shape, _, form = shape.partition(":")
    numbers = {"npp": prompt, "ntg": output, "npl": len(requests), "c": len(requests) * (prompt + output),
               "t": num_threads, "tb": num_threads}  # fmt: skip
    command = [binary, "-m", str(gguf_file(shape, form or "BF16")), "--output-format", "jsonl"]
    command += [part for key, number in numbers.items() for part in (f"-{key}", str(number))]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    found = json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))
    return {"seconds": found["t"], "tokens/s": len(requests) * output / found["t"]}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    from nanovllm.fast.kernels.processor_classes import targets
    from nanovllm.tools.bench.worker import environment

    about = environment()
    result: dict[str, Any] = {
        "processor": about["processor"], "class": targets()[0].name, "cores": about["cores"],
        "memory GiB": about["memory_gib"], "torch": about["torch"], "date": time.strftime("%Y-%m-%d"),
        "by processor time": options.processor_time, "threads": {},
    }  # fmt: skip
    peaks = ["--processor-time"] * options.processor_time
    limit = ["--requests", str(options.requests)] if options.requests else []
    limit += ["--model", options.model] if options.model else []
    for count in options.threads:
        column: dict[str, Any] = {"peaks": in_process([*peaks, "--rates", str(count)], count), "workloads": {}}
        result["threads"][str(count)] = column
        names = options.variants or list(STREAMS if options.shapes else VARIANTS)
        shapes = [(f"{shape}, {name}", name, ["--model", shape]) for shape in options.shapes for name in names]
        for label, name, more in shapes or [(name, name, []) for name in names]:
            measured = column["workloads"][label] = in_process(["--variant", name, *limit, *more], count)
            print(f"{count} threads, {label}: {measured['tokens/s']:.1f} tokens/s", file=sys.stderr, flush=True)
            if options.llama_cpp:
                peer = measured | llama_cpp(options.llama_cpp, more[-1], name, count)
                column["workloads"][f"{label}, llama.cpp"] = peer
                print(f"  llama.cpp: {peer['tokens/s']:.1f} tokens/s", file=sys.stderr, flush=True)
    return result


# --------------------------------------------------------------------------------------------------------------- table


def table(machines: list[dict[str, Any]]) -> str:
    """Machines side by side, a column for each number of threads."""
    columns = [(machine, count, of) for machine in machines for count, of in machine["threads"].items()]
    lines = [
        "| | "
        + " | ".join(f"{m['processor']}, {count} thread{'s' * (count != '1')}" for m, count, _ in columns)
        + " |",
        "|---|" + "---|" * len(columns),
        "| class | " + " | ".join(machine["class"] for machine, _, _ in columns) + " |",
    ]
    first = [next(iter(of["workloads"].values())) for _, _, of in columns]
    for part in dict.fromkeys(part for figures in first for part in figures["forms"]):
        lines.append(f"| {part} | " + " | ".join(figures["forms"].get(part, "-") for figures in first) + " |")
    for peak in dict.fromkeys(peak for _, _, of in columns for peak in of["peaks"]):
        lines.append(f"| peak {peak} | " + " | ".join(f"{of['peaks'][peak]:,.0f}" for _, _, of in columns) + " |")
    for name in dict.fromkeys(name for _, _, of in columns for name in of["workloads"]):
        lines.append(f"| {name} | " + " | ".join(cell(of, name, m["by processor time"]) for m, _, of in columns) + " |")
    return "\n".join(lines)


def cell(of: dict[str, Any], name: str, by_processor: bool) -> str:
    """Tokens a second, and the shares of the product peak and of the memory rate."""
    if name not in of["workloads"]:
        return "-"
    figures, peaks = of["workloads"][name], of["peaks"]
    seconds = figures["processor seconds"] / figures["threads"] if by_processor else figures["seconds"]
    rate = figures["tokens/s"] * figures["seconds"] / seconds
    product_peak = max(peaks["bfloat16 GFLOP/s"], peaks["float32 GFLOP/s"])
    products = figures["GFLOP"] / seconds / product_peak
    memory = figures["GB"] / seconds / peaks["memory GB/s"]
    return f"{rate:.{rate < 20:d}f} tokens/s, {products:.1%} of products, {memory:.0%} of memory"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, len(os.sched_getaffinity(0))}))
    parser.add_argument("--variants", nargs="+", choices=[*VARIANTS, *STREAMS], metavar="NAME", help="default: all")
    parser.add_argument("--shapes", nargs="+", default=[], help="of random_models.py, in bfloat16 or :Q4_K, in place")
    parser.add_argument("--llama-cpp", help="llama-batched-bench, for --shapes without --requests, by time passed")
    parser.add_argument("--requests", type=int, help="the first of each workload alone")
    parser.add_argument("--model", help="folder of another model; default: the embedded one")
    parser.add_argument("--processor-time", action="store_true")
    parser.add_argument("--tables", type=Path, nargs="+", metavar="FILE", help="print these files, measure nothing")
    parser.add_argument("--rates", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.variants or ()) - set(STREAMS if options.shapes else VARIANTS):
        parser.error(f"--variants {', '.join(sorted(unknown))}: --shapes has {', '.join(STREAMS)}, a model the others")
    if options.llama_cpp and (not options.shapes or options.requests or options.processor_time):
        parser.error("--llama-cpp needs --shapes, without --requests and --processor-time")
    if options.rates:
        print(json.dumps(rates(options.rates, options.processor_time)))
    elif options.variant:
        print(json.dumps(measure_variant(options.variant, options.requests, options.model)))
    elif options.tables:
        print(table([json.loads(path.read_text(encoding="utf-8")) for path in options.tables]))
    else:
        result = measure(options)
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(table([result]))


if __name__ == "__main__":
    main()
