"""Device time of what a function launches, by CUDA events, launched as it is or replayed as a CUDA graph."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def captured(run: Callable[[], object]) -> Callable[[], None]:
    """A replay of what `run` launches, captured on a stream of its own after one trial that compiles it."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.no_grad(), torch.cuda.stream(stream):
        run()
        stream.synchronize()
        graph.capture_begin()
        run()
        graph.capture_end()
    return graph.replay


def milliseconds(run: Callable[[], object], *, rounds: int = 10) -> list[float]:
    """Of each of some rounds, one at a time, after two that are not measured."""
    times = []
    for _ in range(2 + rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return times[2:]


def replayed_micros(run: Callable[[], object], *, rounds: int = 10) -> float:
    """The median of some replays."""
    return 1e3 * statistics.median(milliseconds(captured(run), rounds=rounds))


def read_rate() -> float:
    """Bytes per second of a plain sum over 4 GiB; the fastest of several."""
    data = torch.empty(2**31, dtype=torch.bfloat16, device="cuda").normal_()
    return data.nbytes / (min(milliseconds(data.sum)) / 1e3)
