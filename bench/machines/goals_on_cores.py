"""Latency goals against fixed budgets on a CPU's cores: each setting and traffic in a process on two cores, at once.

    python bench/machines/goals_on_cores.py --shares 0.5            16 cores, three minutes; then 0.8, then 1

All settings of a traffic play the same requests at the same time, on random weights of `--shape`. Rows are printed as
they come, and a verdict for each rate at the end. `goals_by_rate.py` tells what is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.machines.goals_by_rate import HEAD, Bench, Machine, Row, verdict
from bench.machines.random_models import checkpoint
from nanovllm.tools.tune.goals import RequestGoals

# traffic -> (scale of the lengths, requests a second at 1 of the capacity), of two cores of a Xeon with AMX
TRAFFIC = {"azure-conv": (0.25, 3.6), "azure-code": (0.1, 1.0)}
GOAL, LIMITS = 0.1, RequestGoals(2.0, 0.12)
LARGEST = 1024
SETTINGS: dict[str, dict[str, Any]] = {
    "goal 100 ms": {"max_num_batched_tokens": LARGEST, "itl_goal": GOAL},
    **{str(budget): {"max_num_batched_tokens": budget} for budget in (128, 256, 512)},
}


def play(options: argparse.Namespace) -> None:
    """Play one setting and traffic on this process's cores; rows go to the output and the file."""
    scale, capacity = TRAFFIC[options.traffic[0]]
    capacity = options.capacity or capacity
    machine = Machine(str(checkpoint(options.shape)), {"dtype": "bfloat16"}, idle=0.0)
    rows = []
    for share in options.shares:
        rate = share * capacity
        sizes = argparse.Namespace(scale=scale, requests=max(4, round(rate * options.play)), seeds=1)
        bench = Bench(sizes, LIMITS, SETTINGS)
        rows.append(bench.row("measured", options.traffic[0], share, rate, options.setting, machine))
        print(rows[-1], flush=True)
        options.out.write_text(json.dumps([asdict(row) for row in rows]), encoding="utf-8")
    machine.end()


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traffic", nargs="+", choices=list(TRAFFIC), default=list(TRAFFIC))
    parser.add_argument("--shares", nargs="+", type=float, default=[0.5, 0.8, 1.0], help="of the capacity")
    parser.add_argument("--capacity", type=float, help="requests a second, instead of a default for each traffic")
    parser.add_argument("--play", type=float, default=130.0, help="seconds in which the requests of a rate arrive")
    parser.add_argument("--shape", default="135m", help="of the model with random weights")
    parser.add_argument("--cores-each", type=int, default=2)
    parser.add_argument("--setting", choices=list(SETTINGS), help="this one alone, in this process")
    parser.add_argument("--out", type=Path, help="file of that process's rows")
    options = parser.parse_args(arguments)
    if options.setting is not None:
        play(options)
        return 0
    checkpoint(options.shape)  # once, before all ask for it
    cores, each = sorted(os.sched_getaffinity(0)), options.cores_each
    print(HEAD, flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    tasks = [(traffic, setting) for traffic in options.traffic for setting in SETTINGS]
    with tempfile.TemporaryDirectory() as folder:
        runs, outs = [], []
        for number, (traffic, setting) in enumerate(tasks):
            first = number * each % len(cores)
            outs.append(Path(folder) / f"{number}.json")
            chosen = ["--traffic", traffic, "--setting", setting, "--out", str(outs[-1])]
            own = {*cores[first : first + each]}
            runs.append(
                subprocess.Popen(
                    [sys.executable, __file__, *arguments, *chosen],
                    env=environment,
                    preexec_fn=lambda own=own: os.sched_setaffinity(0, own),
                )
            )
        failed = [run.wait() for run in runs]
        rows = [Row(**row) for out in outs if out.exists() for row in json.loads(out.read_text(encoding="utf-8"))]
    print("\n" + "\n".join(verdict(rows, GOAL)), flush=True)
    return int(any(failed))


if __name__ == "__main__":
    sys.exit(main())
