"""What the host pays for scheduling: `pytest bench`. Times are reported, never asserted.

extra_info holds microseconds per running request and step, or per block.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from nanovllm.batch import ScheduledBatch
from nanovllm.block_manager import BlockManager
from nanovllm.observability.step_records import OnStep, StepHook, StepObservers
from nanovllm.observability.trace_writer import TraceWriter
from nanovllm.responses import StepTimes
from nanovllm.sequence import Sequence
from tests.support.steady_decodes import BLOCK_SIZE, MAX_MODEL_LEN, decoding, make_sequence, report_per

NUM_RUNNING = [64, 256, 1024]


@pytest.mark.parametrize("num_running", NUM_RUNNING)
@pytest.mark.parametrize("num_waiting", [0, 1000])
def test_steady_decode(benchmark: BenchmarkFixture, num_running: int, num_waiting: int):
    scheduler = decoding(num_running, num_waiting)
    tokens = [7] * num_running

    def step() -> None:
        scheduler.update(scheduler.schedule(), tokens)

    report_per(benchmark, "request and step", num_running, step)


@pytest.mark.parametrize("num_running", NUM_RUNNING)
def test_steady_decode_read_one_step_late(benchmark: BenchmarkFixture, num_running: int):
    scheduler = decoding(num_running)
    tokens = [7] * num_running
    in_flight = [scheduler.schedule()]

    def step() -> None:
        in_flight.append(scheduler.schedule())
        scheduler.update(in_flight.pop(0), tokens)

    report_per(benchmark, "request and step", num_running, step)


@pytest.mark.parametrize("hook", [None, lambda record: None], ids=["nobody listens", "hook"])
@pytest.mark.parametrize("num_running", NUM_RUNNING)
def test_record_of_a_step(benchmark: BenchmarkFixture, num_running: int, hook: StepHook | None):
    """What `on_step` costs besides itself: the record is built and handed over."""
    scheduler, observers = decoding(num_running), StepObservers([] if hook is None else [OnStep(hook)])
    batch = scheduler.schedule()

    def record() -> None:
        observers.step_ended(scheduler, batch, StepTimes(0.0), 0.0, [])

    report_per(benchmark, "step", 1, record)


@pytest.mark.parametrize("changes", [False, True], ids=["steady", "a request comes and one ends in each"])
@pytest.mark.parametrize("num_running", NUM_RUNNING)
def test_trace_of_a_step(benchmark: BenchmarkFixture, tmp_path: Path, num_running: int, changes: bool):
    """What a `TraceWriter` costs: the record is built, and its lines are formatted and written."""
    scheduler = decoding(num_running, num_waiting=1100 if changes else 0)
    with TraceWriter(tmp_path / "out.json") as trace:
        trace.begin(scheduler.config)
        observers = StepObservers([trace])
        observers.notify("request_added", [*scheduler.running, *scheduler.waiting])
        times = itertools.count(1)

        def prepare() -> tuple[tuple[ScheduledBatch, list[Sequence]], dict[str, object]]:
            oldest = scheduler.running[0]
            if changes:
                scheduler.finish(oldest, "length")
            batch = scheduler.schedule()
            scheduler.update(batch, [7] * len(batch.sampling))
            return (batch, [oldest]), {}

        def record(batch: ScheduledBatch, ended: list[Sequence]) -> None:
            time = next(times) * 0.01
            step_times = StepTimes(time - 0.01, 0.0001, 0.0, 0.009, time - 0.0001, time)
            observers.step_ended(scheduler, batch, step_times, time, ended)

        benchmark.pedantic(record, setup=prepare, rounds=1000, warmup_rounds=0)
    benchmark.extra_info["us per step"] = round(benchmark.stats.stats.median * 1e6, 3)


@pytest.mark.parametrize("num_blocks", [8, 63])
def test_admission_behind_a_long_shared_prefix(benchmark: BenchmarkFixture, num_blocks: int):
    """A request whose prefix is cached: hash chain, lookup, claim, one new block, release."""
    manager = BlockManager(1 + 4 * MAX_MODEL_LEN // BLOCK_SIZE, BLOCK_SIZE)
    rng = random.Random(0)
    prefix = [rng.randrange(50_000) for _ in range(num_blocks * BLOCK_SIZE)]
    owner = make_sequence(0, prefix)
    manager.allocate(owner, num_blocks)
    manager.register(owner, 0, num_blocks, step_id=1)
    manager.commit(1)
    requests = iter([make_sequence(arrival, [*prefix, arrival % 50_000]) for arrival in range(1, 1101)])

    def admit() -> None:
        sequence = next(requests)
        hits = manager.lookup(sequence)
        assert len(hits) == num_blocks
        manager.claim(sequence, hits)
        manager.allocate(sequence, 1)
        manager.release(sequence)

    report_per(benchmark, "block", num_blocks, admit)


@pytest.mark.parametrize("num_blocks", [8, 63])
def test_allocation_that_evicts(benchmark: BenchmarkFixture, num_blocks: int):
    """A new prompt in a full pool: every block is taken from another prefix, registered and given back."""
    manager = BlockManager(1 + num_blocks, BLOCK_SIZE)
    rng = random.Random(0)
    tail = [rng.randrange(50_000) for _ in range(num_blocks * BLOCK_SIZE - 1)]
    requests = iter([make_sequence(arrival, [arrival, *tail]) for arrival in range(1100)])

    def compute() -> None:
        sequence = next(requests)
        manager.allocate(sequence, num_blocks)
        manager.register(sequence, 0, num_blocks, step_id=1)
        manager.commit(1)
        manager.release(sequence)

    report_per(benchmark, "block", num_blocks, compute)


@pytest.mark.parametrize("num_blocks", [8, 63])
def test_hash_chain(benchmark: BenchmarkFixture, num_blocks: int):
    manager = BlockManager(2, BLOCK_SIZE)
    sequence = make_sequence(0, [token % 50_000 for token in range(num_blocks * BLOCK_SIZE)])

    def extend() -> None:
        sequence.block_hashes.clear()
        manager._block_hash(sequence, num_blocks - 1)

    report_per(benchmark, "block", num_blocks, extend)
