"""One engine in a process of its own: `python -m nanovllm.tools.bench.child JOB.json`, started by `processes.py`."""

from __future__ import annotations

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
from nanovllm.tools.bench.play import Player, figures, play
from nanovllm.tools.bench.players import PLAYERS, open_player
from nanovllm.tools.workloads.files import read_trace
from nanovllm.tools.workloads.workloads import Workload

PACKAGES = ("torch", "transformers", "numpy", "vllm", "llama-cpp-python")


def main(path: str) -> int:
    """Do a job; its results, or the error, are in the file that the job names."""
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
    """Load the job's engine and play its workloads; figures of each."""
    workloads = [read_trace(path) for path in job["traces"]]
    longest = max(len(r.prompt_token_ids) + r.num_output_tokens for workload in workloads for r in workload.requests)
    trace = _play_trace(job["record"]) if job["record"] else None
    begin = time.perf_counter()
    player = open_player(job["engine"], job["model"], dict(job["options"]), longest, trace=trace)
    load_seconds = time.perf_counter() - begin
    try:
        runs = [measure(player, workload, job, trace) for workload in workloads]
    finally:
        player.close()
        if trace:
            trace.close()
    about = {"engine": job["label"], "environment": environment(), "config": player.config()}
    return [about | {"load_seconds": load_seconds} | run for run in runs]


def measure(player: Player, workload: Workload, job: dict[str, Any], trace: Any = None) -> dict[str, Any]:
    """Play a workload unmeasured, hurried, and then measured."""
    warm_up = workload.hurried()
    if (count := PLAYERS[job["engine"]][0].warm_up_requests) is not None:
        warm_up = warm_up.first(count)
    for _ in range(job["warm_ups"]):
        player.prepare(warm_up)
        play(player, warm_up)
    profile = _step_profile() if job["profile"] else None
    player.prepare(workload)
    before = player.counters()
    with profile.recording() if profile else nullcontext(), trace.recording() if trace else nullcontext():
        played = play(player, workload)
    result = figures(workload, played) | {name: count - before[name] for name, count in player.counters().items()}
    if "computed_tokens" in result:
        result["tokens_per_step"] = result["computed_tokens"] / result["steps"]
    if profile:
        result["parts"] = profile.parts()
    return result | peak_memory()


def _play_trace(path: str) -> Any:
    from nanovllm.tools.bench.play_trace import PlayTrace  # imports the scheduler, which peers' environments may lack

    return PlayTrace(path)


def _step_profile() -> Any:
    from nanovllm.tools.bench.step_profile import StepProfile  # imports the engine, which peers' environments may lack

    return StepProfile()


def peak_memory() -> dict[str, float]:
    """In MiB: of this process and its children, each at its own peak, and of the GPU as this process used it."""
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
    """Versions and hardware, as this process has them."""
    import psutil

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
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch and torch.cuda.is_available() else None,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
