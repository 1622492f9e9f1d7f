"""Engine snapshot of the live view: requests by id with their counts, block pool, last steps.

It holds no tokens and no text, so that viewers cannot read other users' requests.
"""

from __future__ import annotations

import base64
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, repeat
from operator import is_not
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.block_manager import BlockManager
from nanovllm.engine import Engine
from nanovllm.features.engine_stats import BudgetStats, EngineStats, TierStats
from nanovllm.observability.step_records import StepRecord
from nanovllm.observability.trace_writer import details_of
from nanovllm.outputs import SchedulerStats
from nanovllm.sequence import Sequence as Sample

if TYPE_CHECKING:
    from nanovllm.serving.replicas.pool import ReplicaPool
    from nanovllm.serving.replicas.pool_request import PoolRequest

MAX_CELLS = 1024  # cells of the pool map; a cell covers several blocks of a larger pool
MAX_ROWS = 32  # rows of running requests, and of waiting ones
MAX_ID_CHARS = 64
MAX_POSITIONS = 256  # questions of pages with a reported queue position

# Columns of the feed's rows, in order. Times are microseconds, for steps since the feed's zero.
STEP_VALUES = (
    "step", "time", "start", "sequences", "decode", "prefill", "cached", "running", "waiting", "used_blocks",
    "schedule_us", "execute_us", "update_us", "ttfts_us", "groups", "budget", "predicted_us",
    "accepted",
)  # fmt: skip
REQUEST_VALUES = (
    "id", "sample", "state", "computed", "known", "prompt", "cached", "limit", "age_us", "preemptions", "client",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """State of an engine between two steps.

    time: seconds on the engine's clock.
    steps: the last 1,000 step records.
    requests: REQUEST_VALUES of the first running and the first waiting requests, with ages as of `time`.
    num_running, num_waiting: number of all running and waiting requests.
    num_holders, findable: a byte per block, see `pool_usage`.
    counters: totals since construction.
    seconds: time that the engine thread spent on the snapshot.
    machine: "device" and "dtype" of the weights; with replicas, the dtype only if set as an option.
    queue_positions: position in the queue, from 1, of each waiting question of a page, by its x-request-id.
    budget: tokens, error and goal (microseconds) of `BudgetStats`, with an itl_goal.
    drafts: tokens drafted and accepted by each source; empty without speculation.
    tiers: counters of the prefix cache's tiers; empty without tiers.
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
    machine: dict[str, str] = field(default_factory=dict)
    queue_positions: dict[str, int] = field(default_factory=dict)
    budget: tuple[int, float | None, int] | None = None
    drafts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    tiers: TierStats | None = None


def take_snapshot(engine: Any, steps: deque[StepRecord]) -> EngineSnapshot:
    """Take a snapshot; call it in the engine thread, which appends to `steps`."""
    return _snapshot_of_pool(engine, steps) if engine.statuses else _snapshot_of_engine(engine, steps)


def with_queue_positions(snapshot: EngineSnapshot, engine: Any, questions: Mapping[str, str]) -> EngineSnapshot:
    """Add the queue positions of questions; call it in the engine thread, right after `take_snapshot`.

    Args:
        questions: x-request-ids by the engine's request ids; the first MAX_POSITIONS waiting ones get a position.
    """
    began = time.perf_counter()
    positions: dict[str, int] = {}
    for position, request_id in enumerate(_waiting_ids(engine), 1):
        if len(positions) == min(MAX_POSITIONS, len(questions)):
            break
        if (asked := questions.get(request_id)) is not None:
            positions.setdefault(asked, position)
    return replace(snapshot, queue_positions=positions, seconds=snapshot.seconds + time.perf_counter() - began)


def _waiting_ids(engine: Any) -> Iterator[str]:
    """Request ids in the order of service, one per waiting sequence."""
    if engine.statuses:
        for request_id, request in engine.requests.items():
            if not any(sample.token_ids for sample in request.samples):
                yield from repeat(request_id, request.new.params.n)
    else:
        yield from (sequence.request_id for sequence in engine.scheduler.waiting.in_order())


def _snapshot_of_engine(engine: Engine, steps: deque[StepRecord]) -> EngineSnapshot:
    began = time.perf_counter()
    now = engine.clock()
    scheduler = engine.scheduler
    pool = engine.block_manager
    shown = [*islice(scheduler.running, MAX_ROWS), *islice(scheduler.waiting, MAX_ROWS)]
    stats = scheduler.stats
    num_holders, findable = pool_usage(pool)
    speculation = scheduler.proposer.stats()
    return EngineSnapshot(
        now,
        tuple(steps),
        [_request_row(sequence, now) for sequence in shown],
        len(scheduler.running),
        len(scheduler.waiting),
        num_holders,
        findable,
        _counters(stats, pool.num_evictions),
        time.perf_counter() - began,
        _machine(engine),
        budget=None if (budget := scheduler.budget.stats()) is None else _budget(budget),
        drafts={} if speculation is None else speculation.by_source,
        tiers=None if engine.tiers is None else engine.tiers.stats(),
    )


def _counters(stats: SchedulerStats | EngineStats, num_evictions: int) -> dict[str, int]:
    return {
        "steps": stats.num_steps,
        "failed_steps": stats.num_failed_steps,
        "output_tokens": stats.num_output_tokens,
        "preemptions": stats.num_preemptions,
        "evictions": num_evictions,
        "cache_queries": stats.prefix_cache_queries,
        "cache_hits": stats.prefix_cache_hits,
    }


def _budget(stats: BudgetStats) -> tuple[int, float | None, int]:
    return stats.num_tokens, stats.error, round(1e6 * stats.itl_goal)


def group_rows(steps: Sequence[StepRecord]) -> list[tuple[str, int, int, int]]:
    """Name, used, findable and all blocks of each cache group after the last step; empty for a single group."""
    groups = steps[-1].cache_groups if steps else ()
    rows = [(each.name, each.num_used_blocks, each.num_findable_blocks, each.num_blocks) for each in groups]
    return rows if len(rows) > 1 else []


def _machine(engine: Engine) -> dict[str, str]:
    binding = engine.model_runner.binding
    return {"device": str(binding.device), "dtype": str(binding.dtype).removeprefix("torch.")}


def _snapshot_of_pool(pool: ReplicaPool, steps: deque[StepRecord]) -> EngineSnapshot:
    """Snapshot of several replicas: their requests, and sums over their blocks, in arbitrary order."""
    began = time.perf_counter()
    now = pool.clock()
    stats = pool.stats()
    longest = pool.config.max_model_len
    rows = [
        row for request in islice(pool.requests.values(), 2 * MAX_ROWS) for row in _pool_rows(request, now, longest)
    ]
    num_cached = min(stats.num_free_blocks, max(0, stats.num_findable_blocks - stats.num_used_blocks))
    num_others = stats.num_free_blocks - num_cached
    return EngineSnapshot(
        now,
        tuple(steps),
        rows[: 2 * MAX_ROWS],
        stats.num_running,
        stats.num_waiting,
        bytes(1) + b"\1" * stats.num_used_blocks + bytes(stats.num_free_blocks),
        bytes(1 + stats.num_used_blocks) + b"\1" * num_cached + bytes(num_others),
        _counters(stats, stats.prefix_cache_evictions),
        time.perf_counter() - began,
        {name: option for name in ("device", "dtype") if (option := getattr(pool.config, name)) != "auto"},
        budget=None if stats.budget is None else _budget(stats.budget),
        drafts={} if stats.speculation is None else stats.speculation.by_source,
        tiers=stats.tiers,
    )


def _pool_rows(request: PoolRequest, now: float, longest: int) -> Iterator[tuple[Any, ...]]:
    """Rows of a request's samples; one that has no token yet counts as waiting."""
    num_prompt_tokens = len(request.new.prompt_token_ids)
    metrics = request.metrics
    limit = min(num_prompt_tokens + (request.new.params.max_tokens or longest), longest)
    for index, sample in enumerate(request.samples):
        if sample.finish_reason is None:
            num_tokens = len(sample.token_ids)
            yield (
                request.new.request_id[:MAX_ID_CHARS],
                index,
                "decode" if num_tokens else "waiting",
                num_prompt_tokens + num_tokens if num_tokens else 0,
                num_prompt_tokens + num_tokens,
                num_prompt_tokens,
                metrics.num_cached_tokens,
                limit,
                round(1e6 * (now - request.new.arrival_time)),
                metrics.num_preemptions,
                request.new.client[:MAX_ID_CHARS],
            )


def _request_row(sequence: Sample, now: float) -> tuple[Any, ...]:
    lacking = sequence.num_known_tokens - sequence.num_computed_tokens
    if not sequence.is_running:
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
        sequence.max_num_tokens,
        round(1e6 * (now - sequence.arrival_time)),
        sequence.num_preemptions,
        sequence.client[:MAX_ID_CHARS],
    )


def step_row(record: StepRecord, zero: float) -> tuple[Any, ...]:
    """Return STEP_VALUES of a step, with times relative to `zero` on the engine's clock."""
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
        details_of(record),
        record.budget,
        None if record.predicted_time is None else round(1e6 * record.predicted_time),
        record.num_accepted_tokens,
    )


def pool_usage(manager: BlockManager) -> tuple[bytes, bytes]:
    """Two bytes per block, null block included: number of holders (255: 255 or more), and 1 if findable."""
    # Without a loop in Python, since pools may have 100,000 blocks.
    try:
        num_holders = bytes(manager.ref_counts)
    except ValueError:  # a count that no byte can hold
        num_holders = bytes(map(min, manager.ref_counts, repeat(255)))
    return num_holders, bytes(map(is_not, manager.entry_of, repeat(None)))


def pool_map(num_holders: bytes, findable: bytes) -> dict[str, Any]:
    """Summarise the blocks in at most MAX_CELLS cells, without the null block.

    Returns "blocks_per_cell"; "total": number of free, cached (free but findable), used and shared blocks; and "cells":
    the last three counts of each cell as little-endian uint16 in base64.
    """
    holders = np.frombuffer(num_holders, np.uint8)[1:]  # [num_blocks]
    is_found = np.frombuffer(findable, np.uint8)[1:]
    blocks_per_cell = max(1, -(-len(holders) // MAX_CELLS))  # no blocks: replicas that have not reported yet
    kinds = np.stack([(holders == 0) & (is_found == 1), holders == 1, holders > 1], axis=1)  # [num_blocks, 3]
    cells = np.add.reduceat(kinds.astype("<u2"), np.arange(0, len(kinds), blocks_per_cell), axis=0, dtype="<u2")
    cached, used, shared = kinds.sum(axis=0).tolist()
    return {
        "blocks_per_cell": blocks_per_cell,
        "total": [len(holders) - cached - used - shared, cached, used, shared],
        "cells": base64.b64encode(cells.tobytes()).decode(),
    }
