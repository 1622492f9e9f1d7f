"""Replay of a workload in real time on one engine, and its figures: rate, TTFT, ITL."""

from __future__ import annotations

import heapq
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from nanovllm.observability.percentiles import percentiles
from nanovllm.tools.workloads.workloads import TimedRequest, Workload


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished request.

    number: index in the workload.
    token_times: arrival of each output token on the host, in seconds of `time.monotonic`.
    """

    number: int
    token_times: list[float]
    num_cached_tokens: int = 0


class BenchEngine(Protocol):
    """A loaded engine under `replay`."""

    takes_arrivals: bool  # False: all requests must arrive before the first step
    takes_sampling: bool  # False: always greedy

    def prepare(self, workload: Workload) -> None:
        """Reset the prefix cache and prepare for a workload, unmeasured; raises ValueError if it cannot run."""

    def add(self, number: int, request: TimedRequest) -> None:
        """Queue a request with ignore_eos, greedy unless `sampling` says otherwise."""

    def step(self) -> list[Finished]:
        """Run or await a part of the work; returns the requests that finished."""

    def counters(self) -> dict[str, int]:
        """Return "steps" and "computed_tokens" since construction, as available."""

    def config(self) -> dict[str, Any]:
        """Return the engine's options, as available."""

    def close(self) -> None:
        """Stop background threads and processes."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A replayed workload: duration, due time of each request, and finished requests, by index in the workload."""

    seconds: float
    arrivals: list[float]
    finished: list[Finished]


def replay(
    engine: BenchEngine,
    workload: Workload,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Replay:
    """Add each request when it is due, and step until all have finished.

    A request that becomes due during a step is added after it; its TTFT counts from the due time.
    """
    requests = workload.requests
    followers: defaultdict[int, list[int]] = defaultdict(list)
    for number, request in enumerate(requests):
        if request.after is not None:
            followers[request.after].append(number)
    start = clock()
    due = [(start + request.arrival, number) for number, request in enumerate(requests) if request.after is None]
    heapq.heapify(due)
    arrivals: dict[int, float] = {}
    finished: dict[int, Finished] = {}
    while len(finished) < len(requests):
        now = clock()
        while due and due[0][0] <= now:
            arrival, number = heapq.heappop(due)
            arrivals[number] = arrival
            engine.add(number, requests[number])
        if len(arrivals) == len(finished):
            sleep(due[0][0] - now)
            continue
        for ended in engine.step():
            finished[ended.number] = ended
            for follower in followers[ended.number]:
                heapq.heappush(due, (ended.token_times[-1] + requests[follower].arrival, follower))
    seconds = clock() - start
    numbers = range(len(requests))
    return Replay(seconds, [arrivals[number] for number in numbers], [finished[number] for number in numbers])


def figures(workload: Workload, played: Replay) -> dict[str, Any]:
    """Return the figures of a replay: output tokens/s, and percentiles of TTFT and ITL in seconds."""
    for request, ended in zip(workload.requests, played.finished, strict=True):
        if len(ended.token_times) != request.num_output_tokens:
            raise RuntimeError(
                f"request {ended.number} got {len(ended.token_times)} tokens instead of {request.num_output_tokens}"
            )
    firsts = zip(played.arrivals, played.finished, strict=True)
    gaps = (later - earlier for ended in played.finished for earlier, later in pairwise(ended.token_times))
    return {
        "seconds": played.seconds,
        "output_tokens_per_second": workload.num_output_tokens / played.seconds,
        "ttft": percentiles(ended.token_times[0] - arrival for arrival, ended in firsts),
        "itl": percentiles(gaps),
        "cached_tokens": sum(ended.num_cached_tokens for ended in played.finished),
    }
