"""N clients that stream at once from a server on the loopback: what they get, what stays behind, what steps cost.

    python bench/machines/server_load.py                   the default model, 500 clients
    python bench/machines/server_load.py --model tiny      a model so small that the host's work is most of a step

Two ways take turns on one engine: "final" requests from this process, of which nobody reads along (the measure), and
streams over HTTP to clients in a process of their own. The figure is the time from one step to the next while all
requests decode; beside it stands this process's CPU time for each token, in the round that took least. A last round has
faults: some clients vanish in mid-stream, some read nothing until others are done.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.machines.async_streams import model_and_tokenizer
from nanovllm import AsyncLLM, SamplingParams, StepRecord
from nanovllm.model.default_model import DEFAULT_MODEL
from nanovllm.server.app import build_server, create_app
from nanovllm.server.settings import ServerSettings

VANISHING, SLOW = 5, 7  # of so many clients, one


# ------------------------------------------------------------------------------------------------ the clients' process


async def client(number: int, arguments: argparse.Namespace, others_done: asyncio.Event) -> str:
    """One stream; returns "served", "vanished" (on purpose) or "lost"."""
    vanishes = arguments.faults and number % VANISHING == 0
    is_slow = arguments.faults and not vanishes and number % SLOW == 0
    body = {"prompt": prompt_of(number), "max_tokens": arguments.tokens, "temperature": 0, "ignore_eos": True}
    data = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", arguments.port, limit=4096)
    head = f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    if is_slow:
        await others_done.wait()
    end, num_received = b"", 0
    while received := await reader.read(65536):
        end = (end + received)[-1000:]
        num_received += len(received)
        if vanishes and num_received > 500 + 100 * (number % 20):
            writer.transport.abort()
            return "vanished"
    writer.close()
    whole = f'"completion_tokens":{arguments.tokens},'.encode()
    return "served" if b"data: [DONE]\n\n" in end and whole in end else "lost"


async def clients(arguments: argparse.Namespace) -> dict[str, int]:
    others_done = asyncio.Event()
    numbers = range(arguments.clients)
    tasks = [asyncio.ensure_future(client(number, arguments, others_done)) for number in numbers]
    quick = [task for number, task in enumerate(tasks) if number % SLOW]
    await asyncio.gather(*quick)
    others_done.set()
    outcomes = await asyncio.gather(*tasks)
    return {outcome: outcomes.count(outcome) for outcome in ("served", "vanished", "lost")}


def prompt_of(number: int) -> list[int]:
    return [17 + number % 4000, 99, 7, 30]


# ------------------------------------------------------------------------------------------------- the server's process


def run_clients(arguments: argparse.Namespace, port: int, *, faults: bool) -> dict[str, int]:
    command = [sys.executable, __file__, "--port", str(port), "--clients", str(arguments.clients)]
    command += ["--tokens", str(arguments.tokens)] + (["--faults"] if faults else [])
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


async def run_final(engine: AsyncLLM, arguments: argparse.Namespace) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=arguments.tokens, ignore_eos=True)

    async def one(number: int) -> None:
        async for _ in engine.generate(prompt_of(number), params, output_kind="final"):
            pass

    await asyncio.gather(*map(one, range(arguments.clients)))


def step_times(records: list[StepRecord], count: int) -> list[float]:
    """Seconds from one step to the next, both of `count` decodes; the records are taken."""
    taken, records[:] = records[:], []
    return [b.time - a.time for a, b in pairwise(taken) if a.num_decode_tokens == b.num_decode_tokens == count]


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    records: list[StepRecord] = []
    model, tokenizer = model_and_tokenizer(arguments.model)
    limits = {"max_num_seqs": arguments.clients, "max_model_len": 512, "kv_cache_memory_bytes": 4 * 2**30}
    engine = AsyncLLM(model, tokenizer=tokenizer, on_step=records.append, record_itl=True, **limits)
    settings = ServerSettings(port=0, access_log=False, served_model_name="model")
    app = create_app(engine, settings)
    server = build_server(app, engine, settings)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    process = psutil.Process()
    seconds: dict[str, list[float]] = {"final": [], "streams": []}
    outcomes = run_clients(arguments, port, faults=False)  # kernels are compiled, memory is touched
    memory = process.memory_info().rss
    cpu: dict[str, list[float]] = {"final": [], "streams": []}
    for _ in range(arguments.rounds):
        records.clear()
        start = time.process_time()
        asyncio.run(run_final(engine, arguments))
        middle = time.process_time()
        seconds["final"] += step_times(records, arguments.clients)
        found = run_clients(arguments, port, faults=False)
        cpu["final"].append(middle - start)
        cpu["streams"].append(time.process_time() - middle)
        outcomes = {name: outcomes[name] + found[name] for name in found}
        seconds["streams"] += step_times(records, arguments.clients)
    faulty = run_clients(arguments, port, faults=True)
    outcomes = {name: outcomes[name] + faulty[name] for name in faulty}
    stats = asyncio.run(engine.stats())
    memory_end = process.memory_info().rss
    server.handle_exit(15, None)
    thread.join()
    return {
        "outcomes": outcomes,
        "slow_readers": len([n for n in range(arguments.clients) if n % SLOW == 0 and n % VANISHING]),
        "leaked_blocks": stats.num_used_blocks,
        "unfinished": stats.num_running + stats.num_waiting,
        "memory_mib": [round(memory / 2**20), round(memory_end / 2**20)],
        "steps": {name: len(times) for name, times in seconds.items()},
        "median_ms": {name: statistics.median(times) * 1e3 for name, times in seconds.items()},
        "p10_ms": {name: statistics.quantiles(times, n=10)[0] * 1e3 for name, times in seconds.items()},
        "cpu_us": {name: min(times) / arguments.clients / arguments.tokens * 1e6 for name, times in cpu.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a model, or 'tiny' (default %(default)s)")
    parser.add_argument("--clients", type=int, default=500, help="at once (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=50, help="that each is sent (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)  # of the clients' process
    parser.add_argument("--faults", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.port is not None:
        print(json.dumps(asyncio.run(clients(arguments))))
        return
    logging.basicConfig(format="%(message)s")
    figures = measure(arguments)
    for name, value in figures.items():
        print(f"{name:<14}{value}")
    for name in ("median_ms", "p10_ms"):
        print(f"{name:<14}streams against final {figures[name]['streams'] / figures[name]['final'] - 1:+.1%}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
