"""N clients that stream at once, in this process and over HTTP: what steps cost, what they get, what stays behind.

    python bench/machines/server_load.py                    the default model, 500 clients
    python bench/machines/server_load.py --model tiny       a model so small that the host's work is most of a step
    python bench/machines/server_load.py streams            the ways of this process alone

Ways take turns on one engine: "final" requests of this process, of which nobody reads along (the measure); "delta" and
"cumulative" ones, which take an output for each token; and "http", streams of a server on the loopback to clients in a
process of their own. The figure is the time from one step to the next while all requests decode: its median over all
rounds, and its tenth percentile, which other work disturbs less; beside it stands this process's CPU time a token.

streams: final, delta and cumulative.
load: final and http; a last round has faults: some clients vanish, some read nothing until others are done.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import psutil
import torch
from harness import Figures, Option, Part, in_a_new_process, in_turn, run_parts  # beside this file
from transformers import LlamaConfig, LlamaForCausalLM

from nanovllm import AsyncLLM, SamplingParams, StepRecord
from nanovllm.models.default_model import DEFAULT_MODEL, ensure_default_model
from nanovllm.serving.server.app import build_server, create_app
from nanovllm.serving.server.settings import ServerSettings

VANISHING = 5  # of so many clients, one
SLOW = 7


def model_and_tokenizer(name: str) -> tuple[Any, Any]:
    """The default model, or two small random layers under its tokenizer and vocabulary of a few thousand."""
    if name != "tiny":
        return name, None
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=4096, num_hidden_layers=2, max_position_embeddings=4096, eos_token_id=None, **sizes)
    return LlamaForCausalLM(config).eval(), str(ensure_default_model())


def prompt_of(number: int) -> list[int]:
    return [17 + number % 4000, 99, 7, 30]


# ------------------------------------------------------------------------------------------------ the clients' process


async def client(number: int, options: argparse.Namespace, others_done: asyncio.Event) -> str:
    """One stream; returns "served", "vanished" (on purpose) or "lost"."""
    vanishes = options.faults and number % VANISHING == 0
    is_slow = options.faults and not vanishes and number % SLOW == 0
    body = {"prompt": prompt_of(number), "max_tokens": options.tokens, "temperature": 0, "ignore_eos": True}
    data = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", options.port, limit=4096)
    head = f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    if is_slow:
        await others_done.wait()
    end = b""
    num_received = 0
    while received := await reader.read(65536):
        end = (end + received)[-1000:]
        num_received += len(received)
        if vanishes and num_received > 500 + 100 * (number % 20):
            writer.transport.abort()
            return "vanished"
    writer.close()
    whole = f'"completion_tokens":{options.tokens},'.encode()
    return "served" if b"data: [DONE]\n\n" in end and whole in end else "lost"


async def clients(options: argparse.Namespace) -> dict[str, int]:
    others_done = asyncio.Event()
    numbers = range(options.clients)
    tasks = [asyncio.ensure_future(client(number, options, others_done)) for number in numbers]
    quick = [task for number, task in enumerate(tasks) if number % SLOW]
    await asyncio.gather(*quick)
    others_done.set()
    outcomes = await asyncio.gather(*tasks)
    return {outcome: outcomes.count(outcome) for outcome in ("served", "vanished", "lost")}


def measure_clients(options: argparse.Namespace) -> Figures:
    """Read the streams of a server; `load` runs it in a process of its own."""
    return asyncio.run(clients(options))


# ------------------------------------------------------------------------------------------------- the server's process


@dataclass(frozen=True, slots=True)
class Opened:
    """An engine, and the records of its steps since they were last taken."""

    llm: AsyncLLM
    records: list[StepRecord]
    options: argparse.Namespace

    def stream(self, kind: str) -> None:
        """All requests at once, read by this process."""
        asyncio.run(self._stream(kind))

    async def _stream(self, kind: str) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=self.options.tokens, ignore_eos=True)

        async def client(number: int) -> None:
            async for _ in self.llm.generate(prompt_of(number), params, output_kind=kind):
                pass

        await asyncio.gather(*map(client, range(self.options.clients)))

    def timed(self, way: Callable[[], Any], _: int) -> tuple[list[float], float, Any]:
        """Run a way: seconds from step to step while all decode, CPU microseconds a token, what it returned."""
        gc.collect()
        self.records.clear()
        count = self.options.clients
        cpu = time.process_time()
        result = way()
        cpu = time.process_time() - cpu
        steps = [
            after.time - before.time
            for before, after in pairwise(self.records)
            if before.num_decode_tokens == after.num_decode_tokens == count
        ]
        return steps, 1e6 * cpu / count / self.options.tokens, result


@contextmanager
def opened(options: argparse.Namespace) -> Iterator[Opened]:
    records: list[StepRecord] = []
    model, tokenizer = model_and_tokenizer(options.model)
    limits = {"max_num_seqs": options.clients, "max_model_len": 512, "kv_cache_memory_bytes": 4 * 2**30}
    llm = AsyncLLM(model, tokenizer=tokenizer, on_step=records.append, record_itl=True, **limits)
    try:
        yield Opened(llm, records, options)
    finally:
        asyncio.run(llm.close())


@contextmanager
def server_of(llm: AsyncLLM) -> Iterator[int]:
    """Serve an engine in a thread; yields the port."""
    settings = ServerSettings(port=0, access_log=False, served_model_name="model")
    server = build_server(create_app(llm, settings), llm, settings)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.handle_exit(15, None)
        thread.join()


def read_over_http(options: argparse.Namespace, port: int, *, faults: bool = False) -> dict[str, int]:
    given = ["--port", str(port), "--clients", str(options.clients), "--tokens", str(options.tokens)]
    return in_a_new_process(__file__, "clients", *given, *(["--faults"] if faults else []))["result"]


def compared(runs: dict[str, list[tuple[list[float], float, Any]]]) -> Figures:
    """Figures of each way, and how much slower its steps are than those of the final ones."""
    found: Figures = {}
    for way, each in runs.items():
        steps = [seconds for found_steps, _, _ in each for seconds in found_steps]
        row = {"p10, ms": 1e3 * statistics.quantiles(steps, n=10)[0], "median, ms": 1e3 * statistics.median(steps)}
        found[way] = row | {"steps": len(steps), "least CPU us a token": min(cpu for _, cpu, _ in each)}
    for row in found.values():
        for name in ("p10, ms", "median, ms"):
            row[f"{name}, against final"] = row[name] / found["final"][name] - 1
    return found


def measure_streams(options: argparse.Namespace) -> Figures:
    with opened(options) as engine:
        ways = {kind: partial(engine.timed, partial(engine.stream, kind)) for kind in ("final", "delta", "cumulative")}
        return compared(in_turn(ways, options.rounds))


def measure_load(options: argparse.Namespace) -> Figures:
    process = psutil.Process()
    with opened(options) as engine, server_of(engine.llm) as port:
        outcomes = read_over_http(options, port)  # kernels are compiled, memory is touched
        before = process.memory_info().rss
        ways = {"final": partial(engine.stream, "final"), "http": partial(read_over_http, options, port)}
        runs = in_turn({name: partial(engine.timed, way) for name, way in ways.items()}, options.rounds)
        faulty = read_over_http(options, port, faults=True)
        for found in [*(result for _, _, result in runs["http"]), faulty]:
            outcomes = {name: count + found[name] for name, count in outcomes.items()}
        stats = asyncio.run(engine.llm.stats())
        memory = [round(num_bytes / 2**20) for num_bytes in (before, process.memory_info().rss)]
    return compared(runs) | {
        "outcomes": outcomes,
        "leaked blocks": stats.num_used_blocks,
        "unfinished": stats.num_running + stats.num_waiting,
        "memory, MiB": memory,
    }


PARTS = {
    "streams": Part(measure_streams),
    "load": Part(measure_load),
    "clients": Part(measure_clients, is_default=False),
}
OPTIONS = {
    "model": Option(DEFAULT_MODEL, "a model, or tiny"),
    "clients": Option(500, "at once"),
    "tokens": Option(50, "that each is sent"),
    "rounds": Option(3, "measured runs of each way"),
    "port": Option(0, "of clients: the server's"),
    "faults": Option(False, "of clients: some vanish, some read late"),
}

if __name__ == "__main__":
    run_parts(__doc__, PARTS, OPTIONS)
