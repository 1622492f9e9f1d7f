"""`nanovllm serve` with its engine in the server's process, and in one of its own: streams, and TTFT at a rate.

    python bench/machines/engine_process.py                        random weights of Qwen3-0.6B's shape
    python bench/machines/engine_process.py --shape tiny --streams 20 --tokens 50 --rounds 1 --rate 20

Both servers run at once and take turns, each first in every second one; the idle one computes nothing once its graphs
are captured. Clients are processes of their own.

streams: requests that all stream at once over HTTP: output tokens per second, from the first request to the last token.
rate: requests of Poisson arrivals: milliseconds from the moment that a client wants to send to its first token, and
    between two reads of a stream, in which several tokens may come.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MODES = {"in the server's process": "--no-engine-process", "in its own process": "--engine-process"}
NUM_CLIENTS = 4  # processes: one reads some 20,000 events a second
START_S = 1.5  # until all of them have started
PROMPT_TOKENS, RATE_TOKENS = 100, 64

# ---------------------------------------------------------------------------------------------- a process of clients


async def stream(port: int, start: float, prompt: list[int], num_tokens: int) -> list[float]:
    """Times of a stream's reads, from the moment `start` of the wall clock on."""
    await asyncio.sleep(max(0.0, start - time.time()))
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    times: list[float] = []
    end = b""
    while received := await reader.read(65536):
        if times or b"data:" in received:  # the head may come alone
            times.append(time.time() - start)
        end = (end + received)[-100:]
    writer.close()
    if b"data: [DONE]" not in end:
        raise SystemExit(f"a stream ended with {end!r}.")
    return times


async def run_client(work: dict[str, Any]) -> dict[str, list[float]]:
    """All streams of one client process: their first, last and longest times."""
    tasks = [stream(work["port"], work["start"] + at, prompt, work["tokens"]) for at, prompt in work["requests"]]
    every = await asyncio.gather(*tasks)
    gaps = [b - a for times in every for a, b in pairwise(times)]
    ends = [at + times[-1] for (at, _), times in zip(work["requests"], every, strict=True)]
    return {"ttfts": [times[0] for times in every], "gaps": gaps, "ends": ends}


def run_clients(port: int, requests: list[tuple[float, list[int]]], num_tokens: int) -> dict[str, list[float]]:
    command = [sys.executable, __file__, "--client"]
    start = time.time() + START_S
    clients = []
    for number in range(NUM_CLIENTS):
        work = {"port": port, "start": start, "requests": requests[number::NUM_CLIENTS], "tokens": num_tokens}
        client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert client.stdin is not None
        client.stdin.write(json.dumps(work))
        client.stdin.close()
        clients.append(client)
    found: dict[str, list[float]] = {"ttfts": [], "gaps": [], "ends": []}
    for client in clients:
        assert client.stdout is not None
        for name, values in json.loads(client.stdout.read()).items():
            found[name] += values
        client.wait()
    return found


# -------------------------------------------------------------------------------------------------------- the servers


def save_model(shape: str) -> Path:
    """Folder with random weights, and a tokenizer that has a text for each of the model's tokens."""
    sys.path.insert(0, str(ROOT))
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from bench.machines.random_models import SHAPES, checkpoint

    folder = checkpoint(shape)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"\u0120{number:x}" for number in range(SHAPES[shape]["vocab_size"] - len(letters))]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(letters + words)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def open_server(folder: Path, flag: str, arguments: argparse.Namespace) -> tuple[subprocess.Popen[bytes], int]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "nanovllm.cli", "serve", str(folder), flag, "--port", str(port)]
    command += ["--no-access-log", "--max-model-len", "2048", "--kv-cache-memory-bytes", arguments.kv_cache]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environ = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(command, env=environ, start_new_session=True), port


def wait_until_up(server: subprocess.Popen[bytes], port: int) -> None:
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"a server ended with status {server.returncode} before it was up.")


# ----------------------------------------------------------------------------------------------------------- figures


def measure_streams(port: int, arguments: argparse.Namespace, seed: int) -> dict[str, float]:
    generator = random.Random(seed)
    requests = [(0.0, draw_prompt(generator)) for _ in range(arguments.streams)]
    found = run_clients(port, requests, arguments.tokens)
    return {"tokens/s": arguments.streams * arguments.tokens / max(found["ends"])}


def measure_rate(port: int, arguments: argparse.Namespace, seed: int) -> dict[str, float]:
    generator = random.Random(seed)
    requests, at = [], 0.0
    while (at := at + generator.expovariate(arguments.rate)) < arguments.seconds:
        requests.append((at, draw_prompt(generator)))
    found = run_clients(port, requests, RATE_TOKENS)
    ttfts, gaps = (statistics.quantiles(found[name], n=100) for name in ("ttfts", "gaps"))
    return {"TTFT p50 ms": 1e3 * ttfts[49], "TTFT p99 ms": 1e3 * ttfts[98], "ITL p99 ms": 1e3 * gaps[98]}


def draw_prompt(generator: random.Random) -> list[int]:
    return [generator.randrange(500) for _ in range(PROMPT_TOKENS)]


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    folder = save_model(arguments.shape)
    servers = {mode: open_server(folder, flag, arguments) for mode, flag in MODES.items()}
    figures: dict[str, dict[str, list[float]]] = {mode: {} for mode in MODES}
    try:
        for mode, (server, port) in servers.items():
            wait_until_up(server, port)
            measure_streams(port, arguments, seed=0)  # not counted
            print(f"up: {mode}", flush=True)
        time.sleep(arguments.settle)  # on a GPU idle servers capture graphs of shapes that steps missed
        for turn in range(1, arguments.rounds + 1):
            for mode, (_, port) in list(servers.items())[:: 1 if turn % 2 else -1]:
                found = measure_streams(port, arguments, seed=turn) | measure_rate(port, arguments, seed=turn)
                said = ", ".join(f"{name} {value:,.1f}" for name, value in found.items())
                print(f"{turn} {mode}: {said}", flush=True)
                for name, value in found.items():
                    figures[mode].setdefault(name, []).append(value)
    finally:
        for server, _ in servers.values():
            server.send_signal(signal.SIGTERM)
        for server, _ in servers.values():
            server.wait(60)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.6b", help="of bench/machines/random_models.py (default %(default)s)")
    parser.add_argument("--streams", type=int, default=200, help="at once (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="of each stream (default %(default)s)")
    parser.add_argument("--rate", type=float, default=100.0, help="requests per second (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of arrivals (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default %(default)s)")
    parser.add_argument("--settle", type=float, default=20.0, help="seconds before the first (default %(default)s)")
    parser.add_argument("--kv-cache", default="16GiB", help="of each server (default %(default)s)")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        print(json.dumps(asyncio.run(run_client(json.load(sys.stdin)))))
        return
    figures = measure(arguments)
    names = list(next(iter(figures.values())))
    print("| engine | " + " | ".join(names) + " |\n" + "|---" * (1 + len(names)) + "|")
    for mode, found in figures.items():
        cells = [
            f"{statistics.median(found[name]):,.1f} ({min(found[name]):,.1f} to {max(found[name]):,.1f})"
            for name in names
        ]
        print(f"| {mode} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
