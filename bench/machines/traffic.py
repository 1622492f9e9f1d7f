"""A GPU as people use it: traffic of log-normal lengths, each sampling option, a long context, shared prefixes.

    python bench/machines/traffic.py --out traffic.json                          all parts, this engine and vLLM
    python bench/machines/traffic.py offline poisson --rates 30 100 --engines nanovllm
    python bench/machines/traffic.py --engines nanovllm vllm:python=../vllm/bin/python
    python bench/machines/traffic.py offline+w poisson                           offline and w on one engine of each
    python bench/machines/traffic.py poisson --workload azure-conv --rates 10 20 a look-alike of a public trace
    python bench/machines/traffic.py --tiny                                      a tiny model, also on a CPU

offline   400 requests at once: start-up, the very first call of a process, later calls
w         W1 and W3, as `nanovllm bench` has them
poisson   the same requests as streams, at 30, 60 and 100 a second after idle time: TTFT and ITL at the client
options   steps of 4, 64 and 256 decodes at context 640 with each sampling option
long      one request at 32,768 tokens of context, against what its bytes take at the device's copy rate
shared    64 decodes with 4,096 shared and 256 own tokens, against 64 that share nothing

Weights are random, in the shape of Qwen3-0.6B. Each part of each engine runs in a process of its own, parts joined by +
in one and on one engine; one that fails is named, and the rest runs. CUDA graph captures and pauses are counted from
this engine's log and step records: a pause is a step that takes more than 1.2 times the median of steps of its kind,
and over 5 ms more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.machines.traffic_engines import OFFLINE
from bench.machines.traffic_report import Results
from bench.machines.traffic_worker import ABOUT, ALONE, TINY, Job, Sizes, job_file
from nanovllm.tools.workloads.specs import parse_spec

ROOT = Path(__file__).resolve().parents[2]
CACHES = (
    "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT", "NANOVLLM_CACHE", "CUDA_CACHE_PATH",
    "TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME",
)  # fmt: skip
TINY_OPTIONS = {"num_kv_blocks": 200, "block_size": 16, "enforce_eager": True}
LOG_CHARACTERS = 3000  # of a failed process's output
PIPE_SECONDS = 10.0  # for the last results of a process that has ended


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine to measure: its label in results, its name, options and interpreter."""

    label: str
    name: str
    options: dict[str, Any]
    python: str

    @classmethod
    def parse(cls, text: str) -> Engine:
        """Parse "NAME" or "NAME:OPTION=VALUE,..."; the option `python` is the interpreter."""
        name, options = parse_spec(text)
        if name not in OFFLINE:
            raise ValueError(f"no engine {name!r}; there are {', '.join(OFFLINE)}.")
        return cls(text, name, options, options.pop("python", sys.executable))


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs parts in processes of their own.

    job: what is common to all of them.
    folder: for job files and logs.
    caches: environment variables that place the compilers' caches.
    vllm_path: folder on vLLM's PYTHONPATH, or None.
    timeout: seconds for a process.
    """

    job: Job
    results: Results
    folder: Path
    caches: dict[str, str]
    vllm_path: str | None
    timeout: float

    def run(self, part: str, engine: Engine) -> None:
        """Run a part on an engine; a failure is printed and kept in the results."""
        begin = time.monotonic()
        job = replace(
            self.job, part=part, engine=engine.name, start_time=begin, options=self.job.options | engine.options
        )
        log = self.folder / "log"
        try:
            reason = self._ended(job, engine, log)
        except OSError as error:
            reason = str(error)
        if reason:
            text = log.read_text(encoding="utf-8", errors="replace").rstrip()
            print(text[-LOG_CHARACTERS:], flush=True)
            reason = f"{reason}: {text.splitlines()[-1]}" if text else reason
            self.results.failures.append((part, engine.label, reason))
        seconds = time.monotonic() - begin
        self.results.ended(part, engine.label, seconds)
        print(f"{part} {engine.label}: {reason or 'done'}, {seconds:.1f} s", flush=True)

    def _ended(self, job: Job, engine: Engine, log: Path) -> str | None:
        """Run a process to its end; returns why it failed, or None."""
        reading, writing = os.pipe()
        reader = threading.Thread(target=self._read, args=(reading, engine.label), daemon=True)
        reader.start()
        path = self.folder / "job.json"
        path.write_text(job_file(job, writing), encoding="utf-8")
        try:
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [engine.python, "-m", "bench.machines.traffic_worker", str(path)], cwd=ROOT,
                    env=self._environment(engine), stdout=output, stderr=output, pass_fds=[writing],
                    start_new_session=True,
                )  # fmt: skip
        finally:
            os.close(writing)
        try:
            status = process.wait(self.timeout)
            return f"its process exited with {status}" if status else None
        except subprocess.TimeoutExpired:
            return f"it took more than {self.timeout:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # with the processes that it started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            reader.join(PIPE_SECONDS)

    def _read(self, descriptor: int, label: str) -> None:
        """Print and keep each result as it comes, with its ratios to another engine's."""
        with os.fdopen(descriptor, encoding="utf-8") as pipe:
            for line in pipe:
                result = json.loads(line)
                part = result["part"]
                if result["case"] == ABOUT:
                    self.results.about |= result["figures"]
                else:
                    self.results.add(part, result["case"], label, result["figures"])
                figures = {k: round(v, 3) if isinstance(v, float) else v for k, v in result["figures"].items()}
                print(f"  {part} {label}, {result['case']}: {json.dumps(figures)}", flush=True)
                for compared in self.results.ratios(part, result["case"], label):
                    print(f"  {part}, {result['case']}, {compared}", flush=True)

    def _environment(self, engine: Engine) -> dict[str, str]:
        path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        if engine.name == "vllm" and self.vllm_path:
            path.insert(1, self.vllm_path)
        return {**os.environ, **self.caches, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parts = ["offline", "w", "poisson", "options", "long", "shared"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help=f"of {', '.join(parts)}; all but poisson may be joined by + (default: each)",
    )
    parser.add_argument("--engines", nargs="+", metavar="NAME[:OPTION=VALUE,...]", help="nanovllm, vllm,"
                        " with options of the engine or python=PATH; the first is compared with the others (default:"
                        " both, nanovllm alone with --tiny)")  # fmt: skip
    parser.add_argument("--rates", nargs="+", type=float, default=[30.0, 60.0, 100.0], help="requests a second")
    parser.add_argument("--workload", metavar="NAME[:KEY=VALUE,...]", help="requests of offline and poisson instead of"
                        " log-normal lengths, such as azure-conv:scale=0.25; rates keep its own arrivals")  # fmt: skip
    parser.add_argument("--requests", type=int, help="of offline and poisson (default 400)")
    parser.add_argument("--counts", nargs="+", type=int, help="decodes a step in options (default 4 64 256)")
    parser.add_argument("--idle", type=float, default=30.0, help="seconds before the first rate (default %(default)s);"
                        " at most 5 before the others")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=2, help="later calls of offline (default %(default)s)")
    parser.add_argument("--cold-cache", action="store_true", help="the compilers' caches lie in a new, empty folder")
    parser.add_argument("--vllm-path", metavar="FOLDER", help="on vLLM's PYTHONPATH, where it is not installed")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for a part (default %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few requests, to try everything out")
    parser.add_argument("--out", type=Path, help="JSON file, written after each result; .md beside it is the table")
    options = parser.parse_args(arguments)
    options.parts = options.parts or parts
    for part in options.parts:
        names = part.split("+")
        if unknown := set(names) - set(parts):
            parser.error(f"there is no part {min(unknown)!r}; there are {', '.join(parts)}")
        if len(names) > 1 and (shared := {*names} & {*ALONE}):
            parser.error(f"{min(shared)} takes an engine of its own and cannot be joined to others, as in {part!r}")
        if "offline" in names[1:]:
            parser.error(f"offline measures the first call of a process, so it comes first, not as in {part!r}")
    if min(options.rates) <= 0 or options.idle < 0:
        parser.error("--rates must be above 0, and --idle at least 0")
    texts = options.engines or (["nanovllm"] if options.tiny else ["nanovllm", "vllm"])
    try:
        options.engines = [Engine.parse(text) for text in texts]
        sizes_of(options).traffic()
    except ValueError as error:
        parser.error(str(error))
    return options


def sizes_of(options: argparse.Namespace) -> Sizes:
    sizes = TINY if options.tiny else Sizes()
    if options.requests:
        sizes = replace(sizes, requests=options.requests)
    if options.workload:
        sizes = replace(sizes, workload=options.workload)
    return replace(sizes, counts=options.counts) if options.counts else sizes


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    results = Results([engine.label for engine in options.engines], options.out)
    with tempfile.TemporaryDirectory(prefix="nanovllm-traffic-") as name:
        folder = Path(name)
        caches = {variable: str(folder / "caches" / variable) for variable in CACHES} if options.cold_cache else {}
        shape, engine_options = ("tiny", TINY_OPTIONS) if options.tiny else ("0.6b", {"dtype": "bfloat16"})
        job = Job(
            part="", engine="", model="", shape=shape, start_time=0.0, options=engine_options, sizes=sizes_of(options),
            rates=options.rates, idle=options.idle, repeats=options.repeats, copy_rate=0.0,
        )  # fmt: skip
        runner = Runner(job, results, folder, caches, options.vllm_path, options.timeout)
        runner.run("prepare", Engine("nanovllm", "nanovllm", {}, sys.executable))
        if "model" not in results.about:
            return 1
        found = results.about
        runner = replace(runner, job=replace(job, model=found["model"], copy_rate=found["copy_rate"]))
        try:
            for part in options.parts:
                for engine in options.engines:
                    runner.run(part, engine)
        finally:  # also of what an interrupted run has
            table = results.markdown()
            print(f"\n{table}", flush=True)
            if options.out:
                options.out.with_suffix(".md").write_text(table + "\n", encoding="utf-8")
    return bool(results.failures)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # engines' processes end with this one
    sys.exit(main())
