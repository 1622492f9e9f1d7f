"""Runs workloads on this engine and on peers, in turn, each in a process of its own; prints a table and JSON.

    python bench/throughput.py                                     W, P and a single request on this engine
    python bench/throughput.py --engines nanovllm transformers     beside transformers' own generate, with ratios
    python bench/throughput.py --engines nanovllm vllm --vllm-python ../vllm/bin/python --json results.json
    python bench/throughput.py --set enforce_eager=True            with an option of this engine

Runs alternate, and the table gives medians; the last column is this engine's rate over the peer's. See `engines.py` for
what each run does. vLLM for CPUs is started as its documentation tunes it: threads bound, and tcmalloc and Intel's
OpenMP loaded before everything else where they are found.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from engines import ENGINES
from workloads import WORKLOADS

from nanovllm.default_model import ensure_default_model

TWINS = Path(__file__).with_name("engines.py")


def run_apart(engine: str, arguments: argparse.Namespace, model: Path) -> list[dict[str, Any]]:
    """All workloads on one engine, in a process of its own."""
    python, environment = sys.executable, dict(os.environ)
    if engine == "vllm":
        python = arguments.vllm_python
        environment["LD_PRELOAD"] = ":".join(_tuned_libraries(python))
    command = [python, str(TWINS), engine, "--model", str(model), "--dtype", arguments.dtype]
    command += ["--workloads", *arguments.workloads]
    if engine == "nanovllm":
        command += [f"--set={item}" for item in arguments.set]
    if arguments.requests:
        command += ["--requests", str(arguments.requests)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or len(results) != len(arguments.workloads):
        raise RuntimeError(f"{engine} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return results


def _tuned_libraries(python: str) -> list[str]:
    environment = Path(python).parent.parent
    patterns = ("/usr/lib/*/libtcmalloc_minimal.so.4", f"{environment}/lib/libiomp5.so")
    return [found[0] for found in map(glob.glob, patterns) if found]


def percentile(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))]


def table(results: list[dict[str, Any]]) -> str:
    lines = [
        f"{'workload':<9}{'engine':<25}{'tokens/s (min-max)':<22}{'ms/token':>9}{'TTFT p50 / p99 s':>19}"
        f"{'ITL mean ms':>13}{'peak MiB':>10}{'load s':>8}{'ratio':>7}"
    ]
    for workload in dict.fromkeys(result["workload"] for result in results):
        runs: dict[str, list[dict[str, Any]]] = {}
        for result in results:
            if result["workload"] == workload:
                runs.setdefault(result["engine"], []).append(result)
        rates = {engine: statistics.median(run["tokens_per_second"] for run in of) for engine, of in runs.items()}
        ours = next(iter(rates.values()))
        for engine, of in runs.items():
            run = of[-1]
            low, *_, high = sorted([run["tokens_per_second"] for run in of] * 2)
            ttft = f"{percentile(run['ttft'], 0.5):.2f} / {percentile(run['ttft'], 0.99):.2f}" if run["ttft"] else "-"
            itl = f"{1e3 * statistics.mean(run['itl']):.1f}" if run["itl"] else "-"
            rate = f"{rates[engine]:.0f} ({low:.0f}-{high:.0f})"
            lines.append(
                f"{workload:<9}{engine:<25}{rate:<22}{1e3 / rates[engine]:>9.2f}{ttft:>19}{itl:>13}"
                f"{run['peak_memory_mib']:>10.0f}{run['load_seconds']:>8.1f}{ours / rates[engine]:>7.2f}"
            )
    return "\n".join(lines)


def read_rate() -> float:
    """Bytes a second that all threads together read from memory: the best of ten sums over 256 MiB."""
    import torch

    values, best = torch.ones(2**26), 0.0
    for _ in range(10):
        begin = time.perf_counter()
        values.sum()
        best = max(best, values.nbytes / (time.perf_counter() - begin))
    return best


def byte_limit(model: Path, dtype: str) -> str:
    """What a single request's token takes at least: every weight is read once."""
    weights = sum(path.stat().st_size for path in model.glob("*.safetensors")) * (2 if dtype == "float32" else 1)
    rate = read_rate()
    return f"by bytes a single token takes {1e3 * weights / rate:.2f} ms ({rate / 1e9:.0f} GB/s)"


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
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["W", "P", "single"])
    parser.add_argument("--runs", type=int, default=3, help="of each engine and workload, in turn (default 3)")
    parser.add_argument("--requests", type=int, help="cut the workloads to their first requests")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="an option of this engine")
    parser.add_argument("--vllm-python", metavar="PYTHON", help="the interpreter of vLLM's environment")
    parser.add_argument("--json", metavar="FILE", help="write every run's figures here")
    arguments = parser.parse_args()
    if "vllm" in arguments.engines and not arguments.vllm_python:
        parser.error("vllm needs --vllm-python, the interpreter of an environment that has it")
    model, results = ensure_default_model(), []
    for _ in range(arguments.runs):
        print(byte_limit(model, arguments.dtype), flush=True)
        for engine in arguments.engines:
            results += (latest := run_apart(engine, arguments, model))
            rates = [f"{result['workload']} {result['tokens_per_second']:.0f}" for result in latest]
            print(f"{engine}, tokens/s: {', '.join(rates)}", file=sys.stderr, flush=True)
            if arguments.json:  # after every process: a long comparison that is cut short keeps what it has
                with open(arguments.json, "w", encoding="utf-8") as file:
                    json.dump({"environment": environment(), "runs": results}, file, indent=1)
    print(table(results))


if __name__ == "__main__":
    main()
