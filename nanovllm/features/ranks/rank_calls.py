"""Calls of one function by every rank, in one order with the steps, and the answers of the other ranks."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nanovllm.features.ranks.ranks import Ranks
from nanovllm.features.ranks.workers import WorkerProcesses

POLL_SECONDS = 0.001
_numbers = itertools.count()


def call_together(runner: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call function(runner, *arguments) on every rank, with each one's runner, and wait; returns rank 0's result.

    Raises rank 0's error, or another rank's as RuntimeError (a lack of memory as torch.OutOfMemoryError).
    """
    key = f"call {next(_numbers)}"
    runner.workers.send("answer", key, function, arguments)
    try:
        result = function(runner, *arguments)
    finally:
        answers = list(answers_of(runner.workers, runner.binding.ranks, key))
    for rank, answer in enumerate(answers, 1):
        if answer:
            error = torch.OutOfMemoryError if answer.startswith(b"OutOfMemoryError") else RuntimeError
            raise error(f"rank {rank}: {answer.decode()}")
    return result


def answer_call(runner: Any, key: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Make a call of rank 0 in another rank; an error is the answer."""
    answer = ""
    try:
        function(runner, *arguments)
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    ranks: Ranks = runner.binding.ranks
    ranks.store.set(key_of(key, ranks.rank), answer)


def answers_of(
    workers: WorkerProcesses, ranks: Ranks, key: str, end: Callable[[], float] = lambda: math.inf
) -> Iterator[bytes]:
    """Each other rank's answer, once it has come.

    Raises DeviceError if a rank is gone, and TimeoutError after the time `end`.
    """
    for rank in range(1, ranks.size):
        own = key_of(key, rank)
        while not ranks.store.check([own]):
            workers.check()
            if time.monotonic() > end():
                raise TimeoutError(f"rank {rank} gives no answer: {key}")
            time.sleep(POLL_SECONDS)
        yield ranks.store.get(own)
        ranks.store.delete_key(own)


def key_of(key: str, rank: int) -> str:
    """The key of a rank's answer in the store."""
    return f"{key} of {rank}"
