"""What the live view shows of an engine at one moment: its requests by id and counts, its pool, its last steps.

Nothing here holds a token or a text of a request, so that nobody who watches reads what others ask.
"""

from __future__ import annotations

import base64
import time
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from nanovllm.engine import Engine
from nanovllm.observability.step_records import StepRecord
from nanovllm.sequence import Sequence, SequenceStatus

MAX_CELLS = 1024  # of the pool's map; with more blocks a cell stands for several
MAX_ROWS = 32  # of running requests, and as many of waiting ones
MAX_ID_CHARS = 64

# What a row of the feed says, in this order. Times are microseconds, those of steps since the feed's zero.
STEP_VALUES = (
    "step", "time", "start", "sequences", "decode", "prefill", "cached", "running", "waiting", "used_blocks",
    "schedule_us", "execute_us", "update_us", "ttfts_us",
)  # fmt: skip
REQUEST_VALUES = ("id", "sample", "state", "computed", "known", "prompt", "cached", "age_us", "preemptions")


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """An engine between two steps.

    time: on the engine's clock, in seconds.
    steps: the last 1,000 records.
    requests: REQUEST_VALUES of the first that run and the first that wait, ages as of `time`.
    num_running, num_waiting: how many there are in all.
    num_holders, findable: a byte for each block, see `BlockManager.usage`.
    counters: totals since the engine began.
    seconds: what the engine's thread spent on it.
    """

    time: float
    steps: tuple[StepRecord, ...]
    requests: list[tuple[Any, ...]]
    num_running: int
    num_waiting: int
    num_holders: bytes
    findable: bytes
    counters: dict[str, int]
    seconds: float


def take_snapshot(engine: Engine, steps: deque[StepRecord]) -> EngineSnapshot:
    """To be called in the engine's thread, which appends to `steps`."""
    began = time.perf_counter()
    now, scheduler, pool = engine.clock(), engine.scheduler, engine.block_manager
    shown = [*islice(scheduler.running, MAX_ROWS), *islice(scheduler.waiting, MAX_ROWS)]
    stats = scheduler.stats
    num_holders, findable = pool.usage()
    return EngineSnapshot(
        now,
        tuple(steps),
        [_row_of(sequence, now) for sequence in shown],
        len(scheduler.running),
        len(scheduler.waiting),
        num_holders,
        findable,
        {
            "steps": stats.num_steps,
            "failed_steps": stats.num_failed_steps,
            "output_tokens": stats.num_output_tokens,
            "preemptions": stats.num_preemptions,
            "evictions": pool.num_evictions,
            "cache_queries": stats.prefix_cache_queries,
            "cache_hits": stats.prefix_cache_hits,
        },
        time.perf_counter() - began,
    )


def _row_of(sequence: Sequence, now: float) -> tuple[Any, ...]:
    lacking = sequence.num_known_tokens - sequence.num_computed_tokens
    if sequence.status is SequenceStatus.WAITING:
        state = "preempted" if sequence.num_preemptions else "waiting"
    else:
        state = "prefill" if lacking > 1 else "decode"
    return (
        sequence.request_id[:MAX_ID_CHARS],
        sequence.index,
        state,
        sequence.num_computed_tokens,
        sequence.num_known_tokens,
        sequence.num_prompt_tokens,
        sequence.num_cached_tokens,
        round(1e6 * (now - sequence.arrival_time)),
        sequence.num_preemptions,
    )


def step_row(record: StepRecord, zero: float) -> tuple[Any, ...]:
    """STEP_VALUES of a step; its times count from `zero`, on the engine's clock."""
    return (
        record.step_id,
        round(1e6 * (record.time - zero)),
        round(1e6 * (record.start_time - zero)),
        record.num_sequences,
        record.num_decode_tokens,
        record.num_prefill_tokens,
        record.num_cached_tokens,
        record.num_running,
        record.num_waiting,
        record.num_used_blocks,
        *[round(1e6 * t) for t in (record.schedule_time, record.execute_time, record.update_time)],
        [round(1e6 * ttft) for ttft in record.ttfts],
    )


def pool_map(num_holders: bytes, findable: bytes) -> dict[str, Any]:
    """A pool's blocks in at most MAX_CELLS cells, without the null block.

    Returns "blocks_per_cell"; "total", how many are free, cached (free, but findable), in use and shared; and "cells",
    the last three of each cell as little-endian uint16 in base64.
    """
    holders = np.frombuffer(num_holders, np.uint8)[1:]  # [num_blocks]
    is_found = np.frombuffer(findable, np.uint8)[1:]
    blocks_per_cell = -(-len(holders) // MAX_CELLS)
    kinds = np.stack([(holders == 0) & (is_found == 1), holders == 1, holders > 1], axis=1)  # [num_blocks, 3]
    cells = np.add.reduceat(kinds.astype("<u2"), np.arange(0, len(kinds), blocks_per_cell), axis=0, dtype="<u2")
    cached, used, shared = kinds.sum(axis=0).tolist()
    return {
        "blocks_per_cell": blocks_per_cell,
        "total": [len(holders) - cached - used - shared, cached, used, shared],
        "cells": base64.b64encode(cells.tobytes()).decode(),
    }
