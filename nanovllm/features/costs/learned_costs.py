"""Costs of steps, learned while the engine runs: a recursive fit of `DeviceCost` to each step's work and seconds.

No torch.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from nanovllm.batch import ScheduledBatch, ScheduledSequence
from nanovllm.features.costs.buckets import RowSizes
from nanovllm.features.costs.cost_model import KNEES, DeviceCost, StepWork, columns
from nanovllm.features.engine_config import AUTO_GOAL, EngineConfig
from nanovllm.features.groups.cache_pools import CacheGroup
from nanovllm.observability.step_records import Observer, StepRecord

MEMORY_STEPS = 20  # steps after which a step's weight is 1/e; after 50 it is a twelfth
NOISE = 0.25  # relative; larger errors count by their size, not its square (Huber 1964)
MISS = 2.0  # a step with this multiple, or this fraction, of its prediction is another event: a capture, a page
MAX_MISSES = 4  # Misses in a row that are ignored; the machine has changed if there are more
RIDGE = 0.01  # Weight that keeps coefficients where samples do not determine them
NUM_SWEEPS = 4
NUM_FIRST_SWEEPS = 300
NUM_ERRORS = 100
# margin = this percentile of measured / predicted over so many prefill steps. A request waits for some ten such steps:
# at 95 % two requests in five would have a gap above the goal, and 99 % cost more first tokens.
NUM_EXCESSES = 300
KEPT_SHARE = 0.98
# itl_goal="auto", on a CPU and a GPU: text still flows, at a cost of at most 5 % of a batch; or the time of so many
# blocks, if that is longer.
DEFAULT_GOAL_S = 0.1
GPU_GOAL_S = 0.05
DEFAULT_GOAL_BLOCKS = 4
# A CPU's ttft_goal with it, in itl_goals: up to the capacity hardly a prompt waits half of them, in a batch most do.
DEFAULT_TTFT_GOALS = 50
BUSY = 2.0  # a machine that is busy at start may take this many times as long for a step; such a goal is kept
NO_WORK = StepWork(0, 0, 0, 0, 0, 0, 0)
MIN_DECODE_COST, MAX_DECODE_COST = 1.0, 100.0  # Prompt tokens; the few steps of a start may fit others

logger = logging.getLogger("nanovllm")


class RecursiveFit:
    """Least squares of relative errors over recent steps, with coefficients that are never negative.

    The sums of the normal equations decay, and each step moves the coefficients that it depends on towards their
    solution by coordinate descent, from where they are.
    """

    def __init__(self, cost: DeviceCost) -> None:
        self.num_misses = 0
        self._knee = cost.knee
        self._coefficients = np.array(cost.coefficients)  # [10]
        size = len(self._coefficients)
        self._products = np.zeros((size, size))  # sum of outer products of rows, decays with each step
        self._sums = np.zeros(size)  # sum of rows, decays with each step
        self._squares = np.zeros(size)  # the last square of each column that was not 0
        self._errors: deque[float] = deque(maxlen=NUM_ERRORS)
        self._excess: deque[float] = deque(maxlen=NUM_EXCESSES)  # ratios measured / predicted of steps with chunks
        self._in_a_row = {False: 0, True: 0}  # misses of steps without and with chunks

    @classmethod
    def begin(cls, samples: Iterable[tuple[StepWork, float]]) -> RecursiveFit:
        """A fit to a few steps alone, with the knee that fits them best."""
        known = list(samples)

        def fitted(knee: int) -> tuple[float, RecursiveFit]:
            fit = cls(DeviceCost(knee))
            for work, seconds in known:
                fit._add(fit._row(work, seconds), 1.0)
            fit._descend(np.flatnonzero(fit._squares), NUM_FIRST_SWEEPS)
            return sum(abs(fit.seconds(work) / seconds - 1.0) for work, seconds in known), fit

        return min(map(fitted, KNEES), key=lambda pair: pair[0])[1]

    @property
    def cost(self) -> DeviceCost:
        return DeviceCost(self._knee, *self._coefficients.tolist())

    @property
    def error(self) -> float | None:
        """Median over the last 100 steps of |predicted / measured - 1|."""
        return median(self._errors) if self._errors else None

    @property
    def margin(self) -> float:
        """98th percentile of measured / predicted seconds over the last 300 steps with chunks, 1 to `MISS`."""
        excess = sorted(self._excess)
        return max(1.0, excess[int(KEPT_SHARE * len(excess))]) if excess else 1.0

    def seconds(self, work: StepWork) -> float:
        return float(self._coefficients @ columns(work, self._knee))

    def learn(self, work: StepWork, seconds: float) -> None:
        """Learn from a measured step, unless it misses its prediction for the first few times in a row."""
        if seconds <= 0.0:
            return
        row = self._row(work, seconds)
        ratio = float(self._coefficients @ row)
        error = abs(ratio - 1.0)
        self._errors.append(error)
        weight = min(1.0, NOISE / max(error, 1e-9))
        has_chunks = work.num_chunks > 0
        if 1.0 / MISS < ratio < MISS:
            self._in_a_row[has_chunks] = 0
            if has_chunks:
                self._excess.append(1.0 / ratio)
        else:
            self.num_misses += 1
            self._in_a_row[has_chunks] += 1
            if self._in_a_row[has_chunks] <= MAX_MISSES:
                return
            weight = 1.0
            self._products *= 0.1  # Earlier samples are of another machine
            self._sums *= 0.1
        self._add(row, weight)
        self._descend(np.flatnonzero(row), NUM_SWEEPS)

    def _row(self, work: StepWork, seconds: float) -> np.ndarray:
        return np.array(columns(work, self._knee), dtype=float) / seconds  # [10]; times the coefficients it should be 1

    def _add(self, row: np.ndarray, weight: float) -> None:
        decay = 1.0 - 1.0 / MEMORY_STEPS
        self._products = decay * self._products + weight * np.outer(row, row)
        self._sums = decay * self._sums + weight * row
        self._squares = np.where(row > 0.0, row * row, self._squares)

    def _descend(self, places: np.ndarray, num_sweeps: int) -> None:
        """Minimise over the coefficients at some places, one by one, with a ridge."""
        products = self._products
        values = self._coefficients
        for _ in range(num_sweeps):
            for place in places.tolist():
                ridge = RIDGE * self._squares[place]
                gap = self._sums[place] - products[place] @ values
                values[place] = max(0.0, values[place] + gap / (products[place, place] + ridge))


def automatic_goal(config: EngineConfig, block_seconds: float) -> float:
    """Seconds of itl_goal="auto", given the seconds of a step of one block."""
    least = GPU_GOAL_S if config.device.startswith("cuda") else DEFAULT_GOAL_S
    return max(least, DEFAULT_GOAL_BLOCKS * block_seconds)


def resolve_goal(config: EngineConfig, block_seconds: float) -> EngineConfig:
    """Settle automatic goals by the device's type and the seconds of a step of one block.

    Raises ValueError for less than half of them; for a goal between, a warning says that steps will exceed it.
    """
    if config.itl_goal == AUTO_GOAL:
        goal = automatic_goal(config, block_seconds)
        ttft_goal = config.ttft_goal
        if ttft_goal is None and not config.device.startswith("cuda"):
            ttft_goal = DEFAULT_TTFT_GOALS * goal
        return replace(config, itl_goal=goal, ttft_goal=ttft_goal)
    assert config.itl_goal is not None
    if config.itl_goal < block_seconds / BUSY:
        raise ValueError(
            f"itl_goal is {config.itl_goal:g} s, but a step of one block of {config.block_size} tokens takes "
            f"{block_seconds:.2g} s on this machine, so prompts could not proceed within it. Set itl_goal to at least "
            f"{2 * block_seconds:.2g} s, or a smaller block_size."
        )
    if config.itl_goal < block_seconds:
        logger.warning(
            "itl_goal is %g s, and a step of one block of %d tokens took %.2g s at start: unless the machine was busy, "
            "ITL exceeds the goal while prompts are computed, one block a step",
            config.itl_goal, config.block_size, block_seconds,
        )  # fmt: skip
    return config


def relative_decode_cost(cost: DeviceCost, config: EngineConfig) -> float:
    """Seconds of a generated token / seconds of a prompt token, in full batches, which clients compete for.

    Args:
        config: fully resolved.
    """
    size = min(config.max_num_batched_tokens, config.max_model_len - 1)
    count = config.max_num_seqs
    num_held = (config.num_kv_blocks - 1) * config.block_size
    context = min(num_held, count * config.max_model_len) // 2  # sequences are half as long as they may become
    prompt = cost.seconds(NO_WORK.with_chunk(0, size)) / size
    decode = cost.seconds(StepWork(count, count, 0, context, 0, 0, count)) / count
    return min(max(decode / max(prompt, 1e-12), MIN_DECODE_COST), MAX_DECODE_COST)


class LearnedCosts(Observer):
    """`StepCosts` of an engine, which learns from its step records.

    A step's seconds are a decode's wait for it: from the end of the previous step, or from its own scheduling.

    when_learned: Callback that gets the engine's time after each step with chunks.

    Args:
        config: fully resolved.
        groups: the model's cache groups; none for full attention alone.
        cost: Cost at which the fit begins; by default 0, until `fit` is replaced.
    """

    def __init__(self, config: EngineConfig, groups: Sequence[CacheGroup] = (), cost: DeviceCost | None = None) -> None:
        self.fit = RecursiveFit(cost or DeviceCost(KNEES[0]))
        self.last_time = 0.0
        self.when_learned: Callable[[float], None] | None = None
        self._block_size = config.block_size
        self._groups = groups
        self.row_sizes = RowSizes.from_config(config)
        self._filling: dict[tuple[int, int], tuple[int, ...]] = {}  # (padded decodes, limit) -> sizes
        self._work: tuple[ScheduledBatch, StepWork] | None = None  # Last batch and its work

    @property
    def error(self) -> float | None:
        return self.fit.error

    @property
    def num_misses(self) -> int:
        return self.fit.num_misses

    @property
    def block_seconds(self) -> float:
        """Seconds of a step of one block alone."""
        return self.fit.seconds(NO_WORK.with_chunk(0, self._block_size, self.row_sizes, self._groups))

    def sizes(self, num_decodes: int, limit: int) -> Sequence[int]:
        if self.row_sizes is None:
            return range(self._block_size, limit + 1)
        padded, _ = self.row_sizes.padded(num_decodes, 1)
        if (padded, limit) not in self._filling:
            rows = [size - padded for size in self.row_sizes.mixed_rows]
            self._filling[padded, limit] = (*(size for size in rows if 0 < size < limit), limit)
        return self._filling[padded, limit]

    def work(self, batch: ScheduledBatch) -> StepWork:
        if self._work is None or self._work[0] is not batch:  # it is asked for the step's record, and then learned from
            self._work = batch, StepWork.from_batch(batch, self._block_size, self.row_sizes, self._groups)
        return self._work[1]

    def predicted(self, batch: ScheduledBatch) -> float:
        """Predicted seconds of a step; half of the steps take less."""
        return self.fit.seconds(self.work(batch))

    def forecast(self, decodes: Sequence[ScheduledSequence], start: int) -> Callable[[int], float]:
        batch = ScheduledBatch(0, tuple(decodes), len(decodes))
        work = StepWork.from_batch(batch, self._block_size, groups=self._groups)
        cost = self.fit.cost
        margin = self.fit.margin
        return lambda size: margin * cost.seconds(work.with_chunk(start, size, self.row_sizes, self._groups))

    def step_ended(self, record: StepRecord, batch: ScheduledBatch) -> None:
        seconds = record.time - max(record.start_time, self.last_time)
        self.last_time = record.time
        self.fit.learn(self.work(batch), seconds)
        if self.when_learned is not None and batch.prefills:
            self.when_learned(record.time)

    def __str__(self) -> str:
        return "the step costs"
