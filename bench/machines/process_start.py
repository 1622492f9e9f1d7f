"""Times a process of `nanovllm generate` from its start to its first token, and to its end.

    python bench/machines/process_start.py                       # this checkout
    python bench/machines/process_start.py --trees . ../before   # several in turn: medians beside each other
    python bench/machines/process_start.py --phases              # and where the time of one process goes

A process starts with warm caches, bytecode too: the first of each tree is not counted. The first token is there when
the first byte comes out. Processor time is that of all threads; on a machine that does other work it says more.
"""

from __future__ import annotations

import argparse
import importlib
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

ARGUMENTS = ["generate", "The capital of France is", "--max-tokens", "1"]
IMPORTS = ("nanovllm.cli.generate", "nanovllm.serving.llm", "nanovllm.build")
PHASES = (
    ("nanovllm.llm", "LLM.__init__"),
    ("nanovllm.models.loader", "load_weights"),
    ("nanovllm.models.loader", "load_tokenizer"),
    ("nanovllm.features.composition.binding", "build_binding"),
    ("nanovllm.model", "probe_model"),
    ("nanovllm.features.composition.binding", "check_rows"),
    ("nanovllm.build", "resolve_options"),
    ("nanovllm.build", "ModelRunner.__init__"),
    ("nanovllm.fast.replaced_layers", "FastLayers.pack_weights"),
    ("nanovllm.fast.paths", "execute_dummies"),
    ("nanovllm.engine", "Engine.step"),
    ("nanovllm.llm", "LLM.close"),
)


def since_start() -> float:
    """Seconds since the process started, in steps of the clock's tick of 10 ms."""
    ticks = int(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


class Run(NamedTuple):
    first: float  # seconds of wall time to the first byte
    end: float  # to the end of the process
    processor: float  # seconds of user and system time
    memory: float  # MB at most


def run_once(tree: Path, model: list[str]) -> Run:
    program = "import sys; from nanovllm.cli.main import main; sys.exit(main())"
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # installed packages have theirs
    begin = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", program, *ARGUMENTS, *model],
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        bufsize=0,
    ) as process:
        assert process.stdout is not None
        byte = process.stdout.read(1)
        first = time.perf_counter() - begin
        process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        end = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode or not byte.strip():
        raise RuntimeError(f"the process in {tree} ended with status {process.returncode}, its first byte is {byte!r}.")
    return Run(first, end, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def compare(trees: list[Path], num_runs: int, model: list[str]) -> None:
    for tree in trees:
        run_once(tree, model)
    runs: dict[Path, list[Run]] = {tree: [] for tree in trees}
    for _ in range(num_runs):
        for tree, measured in runs.items():
            measured.append(run_once(tree, model))
    print(f"medians of {num_runs} runs, in turn:  first token  least    end  processor  memory")
    for tree, measured in runs.items():
        first, end, processor, memory = (statistics.median(values) for values in zip(*measured, strict=True))
        least = min(run.first for run in measured)
        print(f"{tree!s:>34}  {first:9.2f} s  {least:.2f} s  {end:.2f} s  {processor:7.2f} s  {memory:.0f} MB")


def show_phases(tree: Path, model: list[str]) -> None:
    """Run the command in this process, with the wall and processor time of each phase."""
    sys.path.insert(0, str(tree))
    rows: list[tuple[float, float, float, int, str]] = [(0.0, since_start(), time.process_time(), 0, "Python")]
    depth = [0]

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            begin, processor = since_start(), time.process_time()
            depth[0] += 1
            try:
                return function(*args, **options)
            finally:
                depth[0] -= 1
                rows.append((begin, since_start(), time.process_time() - processor, depth[0], name))

        return run

    from nanovllm.cli.main import main
    from nanovllm.fast.host.gc_control import collector_paused

    with collector_paused():
        for name in IMPORTS:
            timed(f"import {name}", importlib.import_module)(name)
    for module, path in PHASES:
        owner: Any = importlib.import_module(module)
        *parts, name = path.split(".")
        for part in parts:
            owner = getattr(owner, part)
        setattr(owner, name, timed(path, getattr(owner, name)))
    main([*ARGUMENTS, *model])
    print("   from      to    wall  processor")
    for begin, end, processor, level, name in sorted(rows):
        if end - begin >= 0.005:
            print(f"{begin:7.3f} {end:7.3f} {end - begin:7.3f}  {processor:9.3f}  {'  ' * level}{name}")
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(f"{since_start():7.3f} the end; user {usage.ru_utime:.2f} s, system {usage.ru_stime:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", nargs="+", type=Path, default=[Path(__file__).resolve().parents[2]])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--model", help="in place of the default model")
    parser.add_argument("--phases", action="store_true", help="show the phases of one process")
    arguments = parser.parse_args()
    model = [] if arguments.model is None else ["--model", arguments.model]
    if arguments.phases:
        show_phases(arguments.trees[0].resolve(), model)
    else:
        compare([tree.resolve() for tree in arguments.trees], arguments.runs, model)


if __name__ == "__main__":
    main()
