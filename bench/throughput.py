"""Runs workloads on this engine and on peers, in turn in one process each, and prints a table and JSON.

    python bench/throughput.py                                   W and P on this engine
    python bench/throughput.py --engines nanovllm transformers   beside transformers' own generate, with ratios
    python bench/throughput.py --set enforce_eager=True --json results.json

Each engine runs in a process of its own, so that neither finds the other's caches or threads; runs alternate, and the
table gives medians. All requests are there from the start, greedy, and ignore end-of-sequence tokens.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

from workloads import WORKLOADS, Workload


def run_nanovllm(workload: Workload, dtype: str, options: dict[str, Any], warm_up: Workload) -> dict[str, Any]:
    from nanovllm import LLM, SamplingParams

    def params(of: Workload) -> list[SamplingParams]:
        return [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=n) for n in of.output_lengths]

    started = time.perf_counter()
    with LLM(dtype=dtype, **options) as llm:
        loaded = time.perf_counter()
        llm.generate(warm_up.prompts, params(warm_up), use_tqdm=False)
        llm.reset_prefix_cache()
        before = llm.stats()
        begin = time.perf_counter()
        outputs = llm.generate(workload.prompts, params(workload), use_tqdm=False)
        seconds = time.perf_counter() - begin
        after = llm.stats()
    first = [output.metrics.first_token_time - output.metrics.arrival_time for output in outputs]
    gaps = [
        (output.metrics.finished_time - output.metrics.first_token_time) / (len(output.outputs[0].token_ids) - 1)
        for output in outputs
    ]
    assert [len(output.outputs[0].token_ids) for output in outputs] == workload.output_lengths
    return {
        "seconds": seconds,
        "load_seconds": loaded - started,
        "ttft": sorted(first),
        "itl": sorted(gaps),
        "steps": after.num_steps - before.num_steps,
        "cached_tokens": sum(output.num_cached_tokens for output in outputs),
    }


def run_transformers(workload: Workload, dtype: str, options: dict[str, Any], warm_up: Workload) -> dict[str, Any]:
    """`generate` on static batches of 16, padded on the left, each as long as its longest output."""
    import torch
    from transformers import AutoModelForCausalLM

    from nanovllm.default_model import ensure_default_model

    started = time.perf_counter()
    dtype = {"auto": "bfloat16"}.get(dtype, dtype)
    model = AutoModelForCausalLM.from_pretrained(ensure_default_model(), dtype=getattr(torch, dtype))
    loaded = time.perf_counter()

    def generate(of: Workload) -> tuple[list[float], list[float]]:
        """Time to first token and mean time between tokens, for each request."""
        first, gaps = [], []
        begin = time.perf_counter()
        for start in range(0, len(of.prompts), 16):
            batch, length = of.prompts[start : start + 16], max(of.output_lengths[start : start + 16])
            width = max(map(len, batch))
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
            times: list[float] = []

            def clock(ids: Any, scores: Any, times: list[float] = times) -> Any:
                times.append(time.perf_counter())
                return scores

            with torch.no_grad():
                model.generate(
                    ids, attention_mask=mask, do_sample=False, max_new_tokens=length, min_new_tokens=length,
                    pad_token_id=0, logits_processor=[clock],
                )  # fmt: skip
            first += [times[0] - begin] * len(batch)
            gaps += [(times[-1] - times[0]) / max(1, length - 1)] * len(batch)
        return first, gaps

    generate(warm_up)
    begin = time.perf_counter()
    first, gaps = generate(workload)
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "load_seconds": loaded - started, "ttft": sorted(first), "itl": sorted(gaps)}


ENGINES = {"nanovllm": run_nanovllm, "transformers": run_transformers}


def run_here(engine: str, workload: Workload, dtype: str, options: dict[str, Any]) -> dict[str, Any]:
    result = ENGINES[engine](workload, dtype, options, WORKLOADS["W"]().first(4))
    result |= {
        "engine": engine,
        "workload": workload.name,
        "dtype": dtype,
        "options": options,
        "output_tokens": workload.num_output_tokens,
        "tokens_per_second": workload.num_output_tokens / result["seconds"],
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    return result


def run_apart(engine: str, workload: str, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", "--engines", engine, "--workloads", workload]
    command += ["--dtype", arguments.dtype, *(f"--set={item}" for item in arguments.set)]
    if arguments.requests:
        command += ["--requests", str(arguments.requests)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def percentile(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))]


def table(results: list[dict[str, Any]]) -> str:
    lines = [
        "workload  engine        tokens/s (min-max)        TTFT p50 / p99 s   ITL mean ms   peak MiB  load s   ratio"
    ]
    for workload in dict.fromkeys(result["workload"] for result in results):
        rates: dict[str, list[float]] = {}
        for result in results:
            if result["workload"] == workload:
                rates.setdefault(result["engine"], []).append(result["tokens_per_second"])
        ours = statistics.median(next(iter(rates.values())))
        for engine, values in rates.items():
            run = next(r for r in reversed(results) if r["workload"] == workload and r["engine"] == engine)
            rate = statistics.median(values)
            lines.append(
                f"{workload:<9} {engine:<13} {rate:7.0f} ({min(values):.0f}-{max(values):.0f})".ljust(51)
                + f"{percentile(run['ttft'], 0.5):8.2f} / {percentile(run['ttft'], 0.99):.2f}"
                + f"{1e3 * statistics.mean(run['itl']):14.1f}{run['peak_memory_mib']:11.0f}{run['load_seconds']:8.1f}"
                + f"{ours / rate:8.2f}"
            )
    return "\n".join(lines)


def environment() -> dict[str, Any]:
    import torch
    import transformers

    with open("/proc/cpuinfo", encoding="utf-8") as cpuinfo:
        model = [line.split(":")[1].strip() for line in cpuinfo if line.startswith("model name")][:1]
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "processor": model,
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["nanovllm"])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["W", "P"])
    parser.add_argument("--runs", type=int, default=3, help="of each engine and workload, in turn (default 3)")
    parser.add_argument("--requests", type=int, help="cut the workloads to their first requests")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"))
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="an option of this engine")
    parser.add_argument("--json", metavar="FILE", help="write every run's figures here")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        workload = WORKLOADS[arguments.workloads[0]]()
        workload = workload.first(arguments.requests) if arguments.requests else workload
        options = {name: _value(text) for name, text in (item.split("=", 1) for item in arguments.set)}
        print(json.dumps(run_here(arguments.engines[0], workload, arguments.dtype, options)))
        return
    results = []
    for _ in range(arguments.runs):
        for workload in arguments.workloads:
            for engine in arguments.engines:
                results.append(run_apart(engine, workload, arguments))
                rate = results[-1]["tokens_per_second"]
                print(f"{workload} {engine}: {rate:.0f} tokens/s", file=sys.stderr, flush=True)
    print(table(results))
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"environment": environment(), "runs": results}, file, indent=1)


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


if __name__ == "__main__":
    main()
