"""Worker process of one engine: `python -m nanovllm.tools.bench.worker JOB.json`, started by `processes.py`."""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import platform
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from nanovllm import __version__
from nanovllm.tools.bench.engines import ENGINES, load_engine
from nanovllm.tools.bench.replay import BenchEngine, figures, replay
from nanovllm.tools.workloads.files import read_trace
from nanovllm.tools.workloads.workloads import Workload

TIMED_WARM_UP = 64  # requests of a timed workload: all of them at once would be another workload
PACKAGES = ("torch", "transformers", "numpy", "vllm", "llama-cpp-python")


def main(path: str) -> int:
    """Run a job, and write its results or its error to the file named in the job."""
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    try:
        answer: dict[str, Any] = {"runs": run_job(job)}
    except (ValueError, TypeError, RuntimeError, ImportError, OSError) as error:
        if job["verbose"]:
            raise
        answer = {"error": str(error)}
    Path(job["answer"]).write_text(json.dumps(answer), encoding="utf-8")
    return "error" in answer


def run_job(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Load the job's engine and replay its workloads; returns the figures of each."""
    workloads = [read_trace(path) for path in job["traces"]]
    longest = max(len(r.prompt_token_ids) + r.num_output_tokens for workload in workloads for r in workload.requests)
    trace = _measured_trace(job["record"]) if job["record"] else None
    begin = time.perf_counter()
    engine = load_engine(
        job["engine"], job["model"], dict(job["options"]), longest, sampling=job.get("sampling"), trace=trace
    )
    load_seconds = time.perf_counter() - begin
    gc.freeze()  # no engine's time includes collections of loaded objects
    try:
        runs = []
        for workload in workloads:
            runs.append(measure(engine, workload, job, trace))
            if job.get("progress"):
                with open(job["progress"], "a", encoding="utf-8") as file:
                    file.write(json.dumps(runs[-1]) + "\n")
    finally:
        engine.close()
        if trace:
            trace.close()
    about = {"engine": job["label"], "environment": environment(), "config": engine.config()}
    return [about | {"load_seconds": load_seconds} | run for run in runs]


def measure(engine: BenchEngine, workload: Workload, job: dict[str, Any], trace: Any = None) -> dict[str, Any]:
    """Replay a workload for warm-up with all arrivals at 0, then measured; returns its figures."""
    counts = [ENGINES[job["engine"]][0].warm_up_requests, TIMED_WARM_UP if workload.is_timed else None]
    warm_up = workload.first(min([count for count in counts if count is not None], default=len(workload.requests)))
    warm_up = warm_up.hurried()
    for _ in range(job["warm_ups"]):
        engine.prepare(warm_up)
        replay(engine, warm_up)
    profile = _step_profile() if job["profile"] else None
    engine.prepare(workload)
    before = engine.counters()
    with profile.recording() if profile else nullcontext(), trace.recording() if trace else nullcontext():
        played = replay(engine, workload)
    result = figures(workload, played) | {name: count - before[name] for name, count in engine.counters().items()}
    if "computed_tokens" in result:
        result["tokens_per_step"] = result["computed_tokens"] / result["steps"]
    if profile:
        result["parts"] = profile.parts()
    return result | peak_memory()


# The environments of other engines lack these imports' dependencies.
def _measured_trace(path: str) -> Any:
    from nanovllm.tools.bench.measured_trace import MeasuredTrace

    return MeasuredTrace(path)


def _step_profile() -> Any:
    from nanovllm.tools.bench.step_profile import StepProfile

    return StepProfile()


def peak_memory() -> dict[str, float]:
    """Return peak memory in MiB: sum over this process and its children, and this process's share of the GPU."""
    import psutil

    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with open(f"/proc/{process.pid}/status", encoding="utf-8") as status:
            total += sum(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))
    peak = {"peak_memory_mib": total}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        peak["peak_gpu_memory_mib"] = torch.cuda.max_memory_reserved() / 2**20
    return peak


def environment() -> dict[str, Any]:
    """Return package versions and hardware of this process."""
    versions = {"python": platform.python_version(), "nanovllm": __version__}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    with open("/proc/cpuinfo", encoding="utf-8") as cpuinfo:
        processor = [line.split(":")[1].strip() for line in cpuinfo if line.startswith("model name")][:1]
    torch = sys.modules.get("torch")
    return {
        **versions,
        "processor": " ".join(processor) or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads() if torch else None,
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch and torch.cuda.is_available() else None,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
