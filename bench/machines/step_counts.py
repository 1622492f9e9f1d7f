"""Pauses among an engine's steps, and its CUDA graph captures, counted from step records and the engine's log."""

from __future__ import annotations

import logging
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm import StepRecord  # not where vLLM runs

MIN_STEPS = 5  # of a kind, for a median
PAUSE_RATIO = 1.2
PAUSE_SECONDS = 0.005  # at least so much longer than the median

Kind = tuple[bool, int]  # (whether it computes chunks, tokens rounded up)


@dataclass(slots=True)
class Taken:
    """What one part of a benchmark left: its steps, its captures, and those with an unfinished request."""

    records: list[StepRecord] = field(default_factory=list)
    num_captures: int = 0
    num_busy_captures: int = 0


class StepWatch(logging.Handler):
    """Keeps the step records of an engine and counts its captures, until they are taken.

    num_unfinished: requests that the client has sent and not seen the end of; kept up to date by the client.
    """

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.num_unfinished = 0
        self._taken = Taken()

    @property
    def records(self) -> list[StepRecord]:
        """The steps since the last `take`."""
        return self._taken.records

    def on_step(self, record: StepRecord) -> None:
        self._taken.records.append(record)

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("captured"):
            self._taken.num_captures += 1
            self._taken.num_busy_captures += self.num_unfinished > 0

    def take(self) -> Taken:
        """Return what came since the last call."""
        taken, self._taken = self._taken, Taken()
        return taken

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Listen to the engine's log, at the level that names captures."""
        logger = logging.getLogger("nanovllm")
        before = logger.level
        logger.addHandler(self)
        logger.setLevel(logging.DEBUG)
        try:
            yield
        finally:
            logger.setLevel(before)
            logger.removeHandler(self)


def round_up(count: int) -> int:
    """Round up to 4, 5, 6 or 7 times a power of two; counts up to 8 stay."""
    shift = max(0, (count - 1).bit_length() - 3)
    return -(-count >> shift) << shift


def kind_of(record: StepRecord) -> Kind:
    return record.num_prefill_tokens > 0, round_up(record.num_decode_tokens + record.num_prefill_tokens)


def durations(records: Iterable[StepRecord]) -> Iterator[tuple[Kind, float]]:
    """Yield kind and seconds of each step, since the end of the one before or, after idle time, since its start."""
    last = float("-inf")
    for record in records:
        yield kind_of(record), record.time - max(last, record.start_time)
        last = record.time


def pauses(parts: list[list[StepRecord]]) -> list[list[float]]:
    """Return the seconds above the median of each pause, by part: steps > 1.2 times and > 5 ms above their kind's.

    The medians are over all parts; a kind with few steps takes that of the next larger kind with enough of them.
    """
    timed = [list(durations(records)) for records in parts]
    by_kind: defaultdict[Kind, list[float]] = defaultdict(list)
    for steps in timed:
        for kind, seconds in steps:
            by_kind[kind].append(seconds)
    usual: dict[Kind, float] = {}
    for has_chunks in (False, True):
        above = float("inf")
        for kind in sorted((kind for kind in by_kind if kind[0] == has_chunks), reverse=True):
            if len(by_kind[kind]) >= MIN_STEPS:
                above = statistics.median(by_kind[kind])
            usual[kind] = above
    return [
        [
            seconds - usual[kind]
            for kind, seconds in steps
            if seconds > PAUSE_RATIO * usual[kind] and seconds > usual[kind] + PAUSE_SECONDS
        ]
        for steps in timed
    ]


def captures(taken: Taken) -> dict[str, float]:
    """Return the captures of a part and those with an unfinished request."""
    return {"captures": taken.num_captures, "captures, request unfinished": taken.num_busy_captures}


def counts(parts: list[Taken]) -> list[dict[str, float]]:
    """Return the figures of each part: captures and pauses."""
    return [
        captures(taken)
        | {
            "pauses": len(found),
            "pauses, ms in all": 1e3 * sum(found),
            "longest pause, ms": 1e3 * max(found, default=0.0),
        }
        for taken, found in zip(parts, pauses([taken.records for taken in parts]), strict=True)
    ]


def decode_seconds(records: list[StepRecord], num_decodes: int) -> list[float]:
    """Return the seconds from step to step while `num_decodes` requests decode and nothing else is computed."""
    return [
        after.time - before.time
        for before, after in pairwise(records)
        if before.num_decode_tokens == after.num_decode_tokens == num_decodes
        and before.num_prefill_tokens == after.num_prefill_tokens == 0
    ]
