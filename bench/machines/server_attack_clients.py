"""The other processes of server_attack.py: the bystander or one attack, which print what they found as JSON, or a
server that does nothing but answer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.machines.server_attack_kinds import ADDRESS, COMPLETIONS, PROMPT, attack

PROBE_SECONDS = 0.02  # between two questions for /health
HEALTHY = b"HTTP/1.1 200"


async def stream(port: int, num_tokens: int, arrivals: list[list[float]], has_begun: asyncio.Event) -> None:
    """Stream answers one after another; `arrivals` gets a list for each, of the times of its pieces."""
    body = {"prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    while True:
        reader, writer = await asyncio.open_connection(ADDRESS, port)
        writer.write(head.encode() + data)
        times: list[float] = []
        arrivals.append(times)
        while await reader.read(2**16):
            times.append(time.monotonic())
            if len(times) == 3 and not has_begun.is_set():
                has_begun.set()
                print("streams", flush=True)
        writer.close()
        if not times:
            raise RuntimeError("the bystander got no answer")


async def probe(port: int, seconds: list[float], has_begun: asyncio.Event) -> None:
    """Ask for /health again and again beside the stream; `seconds` gets the time of each answer."""
    await has_begun.wait()
    while True:
        start = time.monotonic()
        reader, writer = await asyncio.open_connection(ADDRESS, port)
        writer.write(b"GET /health HTTP/1.0\r\n\r\n")
        if not (await reader.read()).startswith(HEALTHY):
            raise RuntimeError("/health is not 200")
        writer.close()
        seconds.append(time.monotonic() - start)
        await asyncio.sleep(PROBE_SECONDS)


async def stand_by(port: int, trivial_port: int, num_tokens: int) -> dict[str, Any]:
    """Stream from the server, and probe it and the trivial one, until standard input ends."""
    gc.disable()
    arrivals: list[list[float]] = []
    health: list[float] = []
    trivial: list[float] = []
    has_begun = asyncio.Event()
    probes = probe(port, health, has_begun), probe(trivial_port, trivial, has_begun)
    tasks = [asyncio.ensure_future(each) for each in (stream(port, num_tokens, arrivals, has_begun), *probes)]
    end = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await asyncio.wait([*tasks, end], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task.done():
            task.result()
        task.cancel()
    return {"arrivals": arrivals, "health": health, "trivial": trivial}


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):  # the bystander has ended
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEALTHY + b" OK\r\nContent-Length: 0\r\n\r\n")
    writer.close()


async def serve_trivially() -> None:
    """Answer whatever is asked until standard input ends; prints the port."""
    gc.disable()
    server = await asyncio.start_server(answer, ADDRESS, 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, help="of the server; none: this is the trivial server")
    parser.add_argument("--trivial-port", type=int, help="of the trivial server, for the bystander")
    parser.add_argument("--tokens", type=int, help="of each of the bystander's answers")
    parser.add_argument("--kind", help="of attack; none: the bystander")
    parser.add_argument("--scale", type=float)
    arguments = parser.parse_args()
    if arguments.port is None:
        asyncio.run(serve_trivially())
        return
    if arguments.kind is None:
        print(json.dumps(asyncio.run(stand_by(arguments.port, arguments.trivial_port, arguments.tokens))))
        return
    os.nice(19)  # the attacker's own work is not the server's
    print(json.dumps(Counter(asyncio.run(attack(arguments.kind, arguments.port, arguments.scale)))))


if __name__ == "__main__":
    main()
