"""A server under attack: what other clients notice, kind by kind of attack, against limits.

    python bench/machines/server_attack.py                            the default model, every kind of attack
    python bench/machines/server_attack.py --model tiny --kinds vanishing headers
    python bench/machines/server_attack.py --scale 0.1 --json attacks.json

A server listens on the loopback in this process. A bystander streams from it and asks for /health in a second process,
and attacks (server_attack_kinds.py) come from a third, one kind after another. A fourth process is a trivial asyncio
server, which the bystander asks as often: the machine's own delays are in both servers' times. For each kind:

    gap          longest time between two pieces of the bystander's stream
    step         longest step of the engine in that time
    excess       largest difference of a gap and the longest step in it: what the server adds to the model
    health       percentiles of GET /health: 50, 99 and the maximum, with 90 in the JSON
    trivial      the same of the trivial server
    beyond       largest difference of health and trivial at the same percentile
    pause        longest time for which a thread of the server's process did not get to run
    collection   longest run of Python's garbage collector
    memory       growth of the server's memory
    answers      number of connections by what became of them
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import subprocess
import sys
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.machines.async_streams import model_and_tokenizer
from bench.machines.server_attack_kinds import KINDS, PROMPT
from nanovllm import AsyncLLM, StepRecord
from nanovllm.model.default_model import DEFAULT_MODEL
from nanovllm.process.gc_control import OldObjectsFrozen
from nanovllm.server.app import SWITCH_SECONDS, build_server, create_app
from nanovllm.server.settings import ServerSettings

CLIENTS = Path(__file__).with_name("server_attack_clients.py")
LIMITS = {"excess_ms": 100.0, "beyond_ms": 50.0}
PERCENTILES = {"": 50, "_p90": 90, "_p99": 99, "_max": 100}
SETTLE_SECONDS = 1.0  # of the bystander alone after an attack, which may leave work behind
WATCH_SECONDS = 0.002  # for which the watch over the process sleeps


class Watch:
    """What happens in this process between `begin` and `row`: steps, pauses, collections, memory."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self._pause = self._collection = 0.0
        self._process = psutil.Process()
        threading.Thread(target=self._look_for_pauses, daemon=True).start()
        gc.callbacks.append(self._time_collection)

    def begin(self) -> None:
        self.records.clear()
        self._pause = self._collection = 0.0
        self._memory = self._process.memory_info().rss

    def row(self) -> dict[str, float]:
        return {
            "pause_ms": self._pause * 1e3,
            "collection_ms": self._collection * 1e3,
            "memory_mib": (self._process.memory_info().rss - self._memory) / 2**20,
        }

    def _look_for_pauses(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(WATCH_SECONDS)
            now = time.monotonic()
            self._pause = max(self._pause, now - last - WATCH_SECONDS)
            last = now

    def _time_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._start = time.monotonic()
        else:
            self._collection = max(self._collection, time.monotonic() - self._start)


def delays(arrivals: list[list[float]], records: list[StepRecord]) -> dict[str, float]:
    """The longest gap, the longest step, and the largest difference of a gap and the longest step in it."""
    gaps = [gap for times in arrivals for gap in pairwise(times)]
    steps = [(record.start_time, record.time) for record in records]
    begins, ends = [begin for begin, _ in steps], [end for _, end in steps]
    excess = longest = 0.0
    for begin, end in gaps:
        within = steps[bisect_right(ends, begin) : bisect_left(begins, end)]
        step = max((b - a for a, b in within), default=0.0)
        excess, longest = max(excess, end - begin - step), max(longest, step)
    gap = max(end - begin for begin, end in gaps)
    return {"gap_ms": gap * 1e3, "step_ms": longest * 1e3, "excess_ms": excess * 1e3}


def health_figures(health: list[float], trivial: list[float]) -> dict[str, float]:
    """Percentiles of both servers' times, and the largest difference of the two at the same percentile."""
    own, other = (np.percentile(seconds, list(PERCENTILES.values())) * 1e3 for seconds in (health, trivial))
    row = {f"health{name}_ms": time for name, time in zip(PERCENTILES, own.tolist(), strict=True)}
    row |= {f"trivial{name}_ms": time for name, time in zip(PERCENTILES, other.tolist(), strict=True)}
    return row | {"beyond_ms": float(np.max(own - other))}


def measure(watch: Watch, kind: str, command: list[str], scale: float) -> dict[str, Any]:
    """Attack beside a bystander."""
    watch.begin()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as bystander:
        assert bystander.stdin and bystander.stdout
        bystander.stdout.readline()  # it streams
        attacker = [*command, "--kind", kind, "--scale", str(scale)]
        answers = json.loads(subprocess.run(attacker, check=True, stdout=subprocess.PIPE).stdout)
        time.sleep(SETTLE_SECONDS * min(1.0, scale))
        found = json.loads(bystander.communicate()[0])
    row = delays(found["arrivals"], watch.records) | watch.row() | {"answers": answers}
    row |= health_figures(found["health"], found["trivial"])
    return row | {"passes": all(row[name] <= limit for name, limit in LIMITS.items())}


@contextlib.contextmanager
def serving(model_name: str, watch: Watch) -> Iterator[list[str]]:
    """A server in threads of this process; yields the command of its bystander."""
    model, tokenizer = model_and_tokenizer(model_name)
    engine = AsyncLLM(model, tokenizer=tokenizer, on_step=watch.records.append, max_num_seqs=256)
    settings = ServerSettings(port=0, access_log=False, served_model_name="model", drain_timeout=0.0)
    server = build_server(create_app(engine, settings), engine, settings)
    sys.setswitchinterval(SWITCH_SECONDS)  # as `nanovllm serve` does, and the next
    OldObjectsFrozen.freeze_for_good()
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    clients = [sys.executable, str(CLIENTS)]
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        num_tokens = engine.config.max_model_len - len(PROMPT)
        with subprocess.Popen(clients, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trivial:
            assert trivial.stdin and trivial.stdout
            ports = ["--port", str(port), "--trivial-port", trivial.stdout.readline().strip()]
            yield [*clients, *ports, "--tokens", str(num_tokens)]
    finally:
        server.handle_exit(15, None)
        thread.join()


def show(rows: dict[str, dict[str, Any]]) -> None:
    columns = ["gap", "step", "excess", "health", "health_p99", "health_max", "trivial", "trivial_p99", "trivial_max"]
    columns += ["beyond", "pause", "collection"]
    print(f"{'kind':<22}" + "".join(f"{name:>12}" for name in [*columns, "memory"]) + "  verdict  answers")
    for kind, row in rows.items():
        figures = "".join(f"{row[name + '_ms']:>12.1f}" for name in columns) + f"{row['memory_mib']:>12.0f}"
        print(f"{kind:<22}{figures}  {'passes' if row['passes'] else 'FAILS':<7}  {row['answers']}")
    print("milliseconds, memory in MiB; limits: " + ", ".join(f"{name} {limit:g}" for name, limit in LIMITS.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a model, or 'tiny' (default %(default)s)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of attacks (default: all)")
    parser.add_argument("--scale", type=float, default=1.0, help="of counts, times and bodies (default %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    watch = Watch()
    with serving(arguments.model, watch) as command:
        rows = {kind: measure(watch, kind, command, arguments.scale) for kind in arguments.kinds}
    show(rows)
    if arguments.json:
        arguments.json.write_text(json.dumps({"limits": LIMITS, "kinds": rows}, indent=1) + "\n")
    return int(not all(row["passes"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
