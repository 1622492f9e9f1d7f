"""Plays a workload in real time, and what comes of it as figures."""

from __future__ import annotations

import heapq
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from nanovllm.gc_control import OldObjectsFrozen
from nanovllm.observability.percentiles import spread
from nanovllm.tools.workloads.workloads import TimedRequest, Workload


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that has ended.

    number: its place in the workload.
    token_times: when each of its output tokens was there, on the clock of `time.monotonic`.
    """

    number: int
    token_times: list[float]
    num_cached_tokens: int = 0


class Player(Protocol):
    """An engine, loaded, as `play` sees it."""

    takes_arrivals: bool  # False: all requests have to be there before the first step

    def prepare(self, workload: Workload) -> None:
        """Forget what was cached; unmeasured preparation for this workload. Raises ValueError if it cannot be run."""

    def add(self, number: int, request: TimedRequest) -> None:
        """Queue a request, greedy and ignoring end-of-sequence tokens."""

    def step(self) -> list[Finished]:
        """Do a little of the work, or wait a little for it; returns what ended."""

    def counters(self) -> dict[str, int]:
        """Of work done so far: "steps" and "computed_tokens", as far as the engine tells."""

    def config(self) -> dict[str, Any]:
        """The options that it runs with, as far as it tells."""

    def close(self) -> None:
        """Stop what runs in the background."""


@dataclass(frozen=True, slots=True)
class Playback:
    """A workload that was played: how long it took, when each request was due, and what came of it."""

    seconds: float
    arrivals: list[float]
    finished: list[Finished]


def play(
    player: Player,
    workload: Workload,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Playback:
    """Hand each request over when it is due, and step until all have ended.

    What falls due during a step is handed over behind it; the time to its first token counts from when it was due.
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
    with OldObjectsFrozen():
        while len(finished) < len(requests):
            now = clock()
            while due and due[0][0] <= now:
                arrival, number = heapq.heappop(due)
                arrivals[number] = arrival
                player.add(number, requests[number])
            if len(arrivals) == len(finished):
                sleep(due[0][0] - now)
                continue
            for ended in player.step():
                finished[ended.number] = ended
                for follower in followers[ended.number]:
                    heapq.heappush(due, (ended.token_times[-1] + requests[follower].arrival, follower))
        seconds = clock() - start
    places = range(len(requests))
    return Playback(seconds, [arrivals[place] for place in places], [finished[place] for place in places])


def figures(workload: Workload, played: Playback) -> dict[str, Any]:
    """What is reported of a playback: rates, and spreads of times to first token and between tokens, in seconds."""
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
        "ttft": spread(ended.token_times[0] - arrival for arrival, ended in firsts),
        "itl": spread(gaps),
        "cached_tokens": sum(ended.num_cached_tokens for ended in played.finished),
    }
