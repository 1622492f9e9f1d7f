"""What the live view costs the engine's thread: `pytest bench/micro/test_bench_live_view.py`. Reported, never
asserted."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from nanovllm.observability.step_records import RECENT_STEPS, StepRecord
from nanovllm.serving.server.live.engine_snapshot import EngineSnapshot, take_snapshot
from nanovllm.serving.server.live.live_feed import SnapshotMessages
from tests.support.steady_decodes import BLOCK_SIZE, make_scheduler, make_sequence, report_per

RECORD = StepRecord(1, 1.0, 0.9, 64, 64, 0, 0, 64, 0, 640, 0.0, 0.0, 0.0, 0.0, ())


def test_a_step_is_remembered(benchmark: BenchmarkFixture):
    """All that a step costs while nobody watches; a thousand at a time, since one is below the clock's grain."""
    steps: deque[StepRecord] = deque(maxlen=RECENT_STEPS)

    def remember() -> None:
        for _ in range(1000):
            steps.append(RECORD)

    report_per(benchmark, "step", 1000, remember)


@pytest.mark.parametrize("num_blocks", [1_000, 10_000, 100_000])
def test_a_snapshot(benchmark: BenchmarkFixture, num_blocks: int):
    """What the engine's thread does for it: 64 requests run, a thousand steps are remembered."""
    scheduler = make_scheduler(64, num_blocks + 1)
    for arrival in range(64):
        scheduler.add(make_sequence(arrival, [arrival] * 10 * BLOCK_SIZE))
    batch = scheduler.schedule()
    scheduler.update(batch, [7] * len(batch.sampling))
    engine = SimpleNamespace(clock=lambda: 1.0, scheduler=scheduler, block_manager=scheduler.block_manager)
    steps = deque([RECORD] * RECENT_STEPS)
    benchmark.pedantic(lambda: take_snapshot(engine, steps), rounds=100, warmup_rounds=5)
    benchmark.extra_info["us"] = round(benchmark.stats.stats.median * 1e6)


@pytest.mark.parametrize("num_blocks", [1_000, 10_000, 100_000])
def test_a_message(benchmark: BenchmarkFixture, num_blocks: int):
    """In the event loop's thread, once for all who watch: 5 new steps, 64 rows, and a pool that has changed."""
    steps = tuple(replace(RECORD, step_id=number) for number in range(RECENT_STEPS))
    row = (f"chatcmpl-{0:032x}", 0, "decode", 1000, 1001, 500, 64, 1_000_000, 0)
    usage = bytes(num_blocks + 1), bytes(num_blocks + 1)
    snapshot = EngineSnapshot(1.0, steps, [row] * 64, 32, 32, *usage, {"steps": 1}, 0.0)
    benchmark.pedantic(
        lambda: SnapshotMessages(snapshot, 0.0, None).message(RECENT_STEPS - 6, knows_pool=False),
        rounds=100,
        warmup_rounds=5,
    )
    benchmark.extra_info["us"] = round(benchmark.stats.stats.median * 1e6)
