"""Benchmark runs: workloads on engines in turn, each in a new worker process."""

from __future__ import annotations

import glob
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nanovllm
from nanovllm.tools.bench.engines import ENGINES
from nanovllm.tools.workloads.files import write_trace
from nanovllm.tools.workloads.specs import format_value, parse_spec
from nanovllm.tools.workloads.workloads import Workload

Run = dict[str, Any]  # figures of a workload
POLL_SECONDS = 0.2
PACKAGE = Path(nanovllm.__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine to measure.

    label: name in results, such as "nanovllm:overlap=True".
    name: key of `ENGINES`.
    options: options of the engine.
    python: interpreter of its environment.
    """

    label: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    python: str = sys.executable

    @classmethod
    def parse(cls, text: str, base_options: dict[str, Any]) -> EngineSpec:
        """Parse "NAME" or "NAME:OPTION=VALUE,..."; the option `python` is the interpreter.

        Args:
            base_options: defaults for this engine's options; other engines inherit dtype only.
        """
        name, options = parse_spec(text)
        if name not in ENGINES:
            raise ValueError(f"no engine {name!r}; there are {', '.join(ENGINES)}.")
        python = options.pop("python", None)
        values = ",".join(f"{key}={format_value(value)}" for key, value in options.items())
        label = f"{name}:{values}" if values else name
        shared = base_options if name == "nanovllm" else {k: v for k, v in base_options.items() if k == "dtype"}
        package = ENGINES[name][1]
        if python is None and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"{name} is not installed here ({package}). Install it, or name the interpreter of an environment "
                f"that has it: {name}:python=PATH."
            )
        return cls(label, name, shared | options, python or sys.executable)


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings common to all runs.

    repeats: runs of each engine, in turn, each in a new process.
    warm_ups: number of replays before the measured one; slow engines replay a few requests only.
    profile: measure the parts of this engine's steps.
    record: file for a trace of this engine's measured run.
    verbose: pass the engines' standard error through.
    sampling: options of all requests, which are greedy without; see `engines.check_sampling`.
    """

    model: str
    repeats: int = 1
    warm_ups: int = 1
    profile: bool = False
    record: str | None = None
    verbose: bool = False
    sampling: dict[str, Any] = field(default_factory=dict)


def run_all(
    engines: list[EngineSpec],
    workloads: list[Workload],
    settings: Settings,
    *,
    after_run: Callable[[dict[str, Any]], None] = lambda _: None,
    after_workload: Callable[[EngineSpec, Workload, Run], None] = lambda *_: None,
) -> dict[str, Any]:
    """Run every engine on every workload; returns the content of `--json`.

    Args:
        after_run: callback with the result so far after each process, to save it if a long run is interrupted.
        after_workload: callback with the figures of each workload after its replay.

    Raises RuntimeError if an engine failed, or cannot run a workload (see `check_arrivals`).
    """
    result: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "model": settings.model,
        "repeats": settings.repeats,
        "warm_ups": settings.warm_ups,
        "sampling": settings.sampling,
        "workloads": {workload.name: about(workload) for workload in workloads},
        "runs": [],
    }
    with tempfile.TemporaryDirectory(prefix="nanovllm-bench-") as name:
        folder = Path(name)
        traces = [folder / f"{number}.jsonl" for number in range(len(workloads))]
        for workload, trace in zip(workloads, traces, strict=True):
            write_trace(workload, trace)
        for repeat in range(settings.repeats):
            for engine in engines:

                def tell(number: int, run: Run, engine: EngineSpec = engine) -> None:
                    after_workload(engine, workloads[number], run)

                runs = run_in_subprocess(engine, traces, settings, folder, after_workload=tell)
                for workload, run in zip(workloads, runs, strict=True):
                    result["runs"].append({"workload": workload.name, "repeat": repeat} | run)
                after_run(result)
    return result


def about(workload: Workload) -> dict[str, Any]:
    """Describe a workload in results."""
    return {
        "parameters": workload.parameters,
        "requests": len(workload.requests),
        "prompt_tokens": workload.num_prompt_tokens,
        "output_tokens": workload.num_output_tokens,
    }


def run_in_subprocess(
    engine: EngineSpec,
    traces: list[Path],
    settings: Settings,
    folder: Path,
    *,
    after_workload: Callable[[int, Run], None] = lambda *_: None,
) -> list[Run]:
    """Run all workloads on one engine in a new process; returns a run for each.

    Args:
        after_workload: callback with index and figures of each workload after its replay.
    """
    answer = folder / "answer.json"
    progress = folder / "progress.jsonl"
    for path in (answer, progress):
        path.unlink(missing_ok=True)
    job = {
        "engine": engine.name, "label": engine.label, "model": settings.model, "options": engine.options,
        "traces": [str(trace) for trace in traces], "warm_ups": settings.warm_ups, "profile": settings.profile,
        "record": settings.record, "verbose": settings.verbose, "answer": str(answer), "progress": str(progress),
        "sampling": settings.sampling,
    }  # fmt: skip
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    command = [engine.python, "-m", "nanovllm.tools.bench.worker", str(folder / "job.json")]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, env=_environment(engine, folder), stdout=subprocess.DEVNULL,
            stderr=None if settings.verbose else errors,
        )  # fmt: skip
        try:
            _follow(process, progress, after_workload)
        finally:
            process.kill()  # Ctrl-C must end the worker, too; no effect if it has ended
            process.wait()
        errors.seek(0)
        last_words = errors.read().decode(errors="replace")[-4000:]
    reported = json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else {}
    if "runs" in reported:
        runs: list[Run] = reported["runs"]
        return runs
    reason = reported.get("error") or f"its process exited with {process.returncode}\n{last_words}"
    raise RuntimeError(f"{engine.label}: {reason}")


def _follow(process: subprocess.Popen[bytes], progress: Path, after_workload: Callable[[int, Run], None]) -> None:
    """Wait for a worker's end, and pass on each workload's figures as they arrive."""
    num_told = 0
    has_ended = False
    while not has_ended:
        try:
            process.wait(POLL_SECONDS)
            has_ended = True
        except subprocess.TimeoutExpired:
            pass
        lines = progress.read_text(encoding="utf-8").split("\n")[:-1] if progress.exists() else []
        for number in range(num_told, len(lines)):
            after_workload(number, json.loads(lines[number]))
        num_told = len(lines)


def _environment(engine: EngineSpec, folder: Path) -> dict[str, str]:
    """Environment variables of the worker: another interpreter can import this package, but no other one of ours."""
    home = PACKAGE.parent
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    if engine.python != sys.executable:
        home = folder / "package"
        home.mkdir(exist_ok=True)
        if not (home / "nanovllm").exists():
            (home / "nanovllm").symlink_to(PACKAGE)
    elsewhere = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{home}{os.pathsep}{elsewhere}" if elsewhere else str(home)
    if engine.name == "vllm":  # preloads that its documentation recommends on a CPU
        prefix = Path(engine.python).parent.parent
        patterns = ("/usr/lib/*/libtcmalloc_minimal.so.4", f"{prefix}/lib/libiomp5.so")
        preload = [found[0] for found in map(glob.glob, patterns) if found]
        environment["LD_PRELOAD"] = ":".join([*preload, *filter(None, [environment.get("LD_PRELOAD")])])
    return environment
