"""Cost model: the time of a step from its work, fitted to measured steps by non-negative least absolute deviations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import mul
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from nanovllm.cache.cache_pools import CacheGroup
from nanovllm.core.batch import ScheduledBatch
from nanovllm.execution.buckets import RowSizes

FULL = CacheGroup()
# Candidate numbers of tokens at which dense layers turn from memory-bound to compute-bound.
KNEES = (4, 8, 16, 32, 64, 128, 256, 512)
NUM_REWEIGHTINGS = 5
SMALL_MISS = 0.02  # relative error; below it the loss is quadratic, above it linear (Huber 1964)


class StepWork(NamedTuple):
    """Quantities that determine the time of a step.

    num_tokens: rows of the dense layers: new tokens, on a GPU padded to the bucket size.
    num_decodes, num_chunks: sequences by kind of attention.
    num_context_tokens: KV entries that decodes read; a prefix common to decodes with the same first block counts once,
        as a kernel may read it once. With cache groups: those in sight, each group's by its share of a token's bytes.
    num_shared_context_tokens: further entries if each decode counted its whole context.
    num_chunk_pairs: (query, key) pairs in the attention of chunks, likewise.
    num_samples: rows of the vocabulary projection and the sampler.
    """

    num_tokens: int
    num_decodes: int
    num_chunks: int
    num_context_tokens: int
    num_shared_context_tokens: int
    num_chunk_pairs: int
    num_samples: int

    @classmethod
    def from_batch(
        cls, batch: ScheduledBatch, block_size: int, sizes: RowSizes | None = None, groups: Sequence[CacheGroup] = ()
    ) -> StepWork:
        """Return the work of a batch.

        Args:
            sizes: buckets that the engine pads to, if any.
            groups: the model's cache groups; none for full attention alone.
        """
        num_decodes, num_tokens, num_pairs, num_samples = batch.num_decodes, batch.num_decodes, 0, batch.num_decodes
        num_single = num_decodes
        for _, start, size, num_drawn, _, _ in batch.prefills:
            num_tokens += size
            num_single += size == 1
            num_pairs += _num_pairs(groups, start, size)
            num_samples += num_drawn
        decodes = batch.entries[:num_decodes]
        shared = context = 0
        if groups and not groups[0].kind.is_full:
            context = sum([_num_seen(groups, entry.start + 1) for entry in decodes])
        else:
            share = groups[0].block_bytes / sum(group.block_bytes for group in groups) if groups else 1
            shared = block_size * _num_shared_blocks([entry.block_table for entry in decodes])
            context = round(sum([_num_seen(groups, entry.start + 1) for entry in decodes]) - share * shared)
            shared = round(share * shared)
        num_chunks = len(batch.entries) - num_decodes
        if sizes is not None:
            _, num_tokens = sizes.padded(num_single, num_tokens - num_single)  # laid out as decodes
        return cls(num_tokens, num_decodes, num_chunks, context, shared, num_pairs, num_samples)

    @property
    def num_sequences(self) -> int:
        return self.num_decodes + self.num_chunks


def _num_seen(groups: Sequence[CacheGroup], num_tokens: int) -> int:
    return _weighted(groups, [group.kind.num_seen(num_tokens) for group in groups]) if groups else num_tokens


def _num_pairs(groups: Sequence[CacheGroup], start: int, size: int) -> int:
    return _weighted(groups, [group.kind.num_pairs(start, size) for group in groups or (FULL,)])


def _weighted(groups: Sequence[CacheGroup], counts: list[int]) -> int:
    """The groups' counts, each by its share of the bytes of a token."""
    if len(counts) == 1:
        return counts[0]
    num_bytes = [group.block_bytes for group in groups]
    mean: float = sum(map(mul, num_bytes, counts)) / sum(num_bytes)
    return round(mean)


def _num_shared_blocks(tables: Sequence[list[int]]) -> int:
    """Block reads saved by sharing a common prefix."""
    if len({table[0] for table in tables}) == len(tables):
        return 0
    groups: dict[int, list[list[int]]] = {}
    for table in tables:
        groups.setdefault(table[0], []).append(table)
    num_blocks = 0
    for group in groups.values():
        first, last = min(group), max(group)  # their common prefix is the group's
        pairs = enumerate(zip(first, last, strict=False))
        common = next((number for number, (a, b) in pairs if a != b), min(len(first), len(last)))
        num_blocks += (len(group) - 1) * common
    return num_blocks


@dataclass(frozen=True, slots=True)
class DeviceCost:
    """Seconds of a step between its launch and its tokens.

    fixed: every step: reading the weights, starting the kernels.
    per_token_below, per_token_above: dense work per new token up to the `knee`-th and after it. The first is about 0
        where reading the weights bounds small steps.
    per_decode, per_chunk: attention of one more sequence.
    per_context_token: reading one token's K and V for a decode.
    per_shared_context_token: reading a shared token for one more decode; 0 if the kernel reads it once.
    per_chunk_pair: one query with one key of a chunk.
    per_sample: vocabulary projection and sampling of one row.
    both: a step with decodes and chunks: each layer calls attention twice.
    """

    knee: int
    fixed: float = 0.0
    per_token_below: float = 0.0
    per_token_above: float = 0.0
    per_decode: float = 0.0
    per_chunk: float = 0.0
    per_context_token: float = 0.0
    per_shared_context_token: float = 0.0
    per_chunk_pair: float = 0.0
    per_sample: float = 0.0
    both: float = 0.0

    def seconds(self, work: StepWork) -> float:
        return float(sum(map(mul, self.coefficients, _columns(work, self.knee))))

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Coefficients in the order of `_columns`."""
        return (
            self.fixed,
            self.per_token_below,
            self.per_token_above,
            self.per_decode,
            self.per_chunk,
            self.per_context_token,
            self.per_shared_context_token,
            self.per_chunk_pair,
            self.per_sample,
            self.both,
        )


def _columns(work: StepWork, knee: int) -> tuple[int, ...]:
    """Factors of the coefficients of `DeviceCost`, in their order."""
    below = min(work.num_tokens, knee)
    return (1, below, work.num_tokens - below, *work[1:], int(work.num_decodes > 0 and work.num_chunks > 0))


@dataclass(frozen=True, slots=True)
class HostCost:
    """Host seconds of a step: a fixed part, one per sequence, and more for each that has a chunk."""

    fixed: float = 0.0
    per_sequence: float = 0.0
    per_chunk: float = 0.0

    def seconds(self, num_sequences: int, num_chunks: int = 0) -> float:
        return self.fixed + self.per_sequence * num_sequences + self.per_chunk * num_chunks


@dataclass(frozen=True, slots=True)
class IntakeCost:
    """Host seconds of adding a request: a fixed part, and one per prompt token."""

    fixed: float = 0.0
    per_token: float = 0.0

    def seconds(self, num_prompt_tokens: int) -> float:
        return self.fixed + self.per_token * num_prompt_tokens


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of the parts of a step, and of adding a request.

    schedule: scheduling the step.
    device: computing it.
    update: from the arrival of its tokens to the start of the next step or the next added request.
    launch: building the batch layout and launching the step on a GPU.
    launch_blocks: launching computes the step, as on a CPU; overlap then hides nothing, and `device` is all of execute.
    head_start: last part of a launch, during which an idle device already computes; a step queued on a busy device
        takes this much longer than `device`.
    intake: validating and queueing a request between two steps; a server validates in another thread, which shares the
        interpreter.
    front_delay: from a request's arrival to its engine: delay of a server's threads and of the front of several
        replicas. Engines cannot measure it: it is `RequestMetrics.queue_time` on an idle server, less the intake.
    """

    schedule: HostCost
    device: DeviceCost
    update: HostCost
    launch: HostCost = HostCost()
    launch_blocks: bool = True
    intake: IntakeCost = IntakeCost()
    head_start: float = 0.0
    front_delay: float = 0.0


class StepSample(NamedTuple):
    """A measured step; times in seconds.

    device_time: from the end of the launch on a GPU, all of execute on a CPU.
    """

    work: StepWork
    schedule_time: float
    launch_time: float
    device_time: float
    update_time: float

    @property
    def execute_time(self) -> float:
        """Seconds from the begin of the launch to its tokens."""
        return self.launch_time + self.device_time


def fit(
    samples: Sequence[StepSample],
    intakes: Sequence[tuple[int, float]] = (),
    *,
    launch_blocks: bool,
    head_start: float = 0.0,
) -> CostModel:
    """Fit a cost model to relative errors; those of the device time are relative to the whole execution.

    Args:
        intakes: (prompt tokens, seconds) of added requests.
        head_start: of the model, as measured.

    Raises ValueError if there are fewer samples than coefficients.
    """
    if len(samples) < 10:
        raise ValueError(f"{len(samples)} measured steps are too few to fit a cost model; at least 10 are needed.")
    return CostModel(
        schedule=_fit_host(samples, [sample.schedule_time for sample in samples]),
        device=fit_device(samples),
        update=_fit_host(samples, [sample.update_time for sample in samples]),
        launch=HostCost() if launch_blocks else _fit_host(samples, [sample.launch_time for sample in samples]),
        launch_blocks=launch_blocks,
        intake=_fit_intake(intakes),
        head_start=head_start,
    )


def fit_device(samples: Sequence[StepSample]) -> DeviceCost:
    """Fit coefficients and knee by least absolute deviations, relative to the execution of each step.

    Least absolute deviations bound the effect of outliers, such as steps without their CUDA graph; they are minimised
    by reweighted least squares (Holland and Welsch 1977). Without a step that shares context, shared tokens cost as
    much as unshared ones.
    """
    samples = [sample for sample in samples if sample.execute_time > 0.0]
    works = [sample.work for sample in samples]
    seconds = np.asarray([sample.device_time for sample in samples])
    scales = np.asarray([sample.execute_time for sample in samples])
    fits = []
    for knee in KNEES:
        rows, weights = np.asarray([_columns(work, knee) for work in works], dtype=float), np.ones(len(samples))
        for _ in range(1 + NUM_REWEIGHTINGS):
            coefficients, _ = non_negative_least_squares(rows, seconds, scales / weights)
            misses = np.abs(rows @ coefficients - seconds) / scales
            weights = np.maximum(misses, SMALL_MISS) ** -0.5
        fits.append((float(misses.sum()), DeviceCost(knee, *coefficients)))
    _, best = min(fits, key=lambda candidate: candidate[0])
    if not any(work.num_shared_context_tokens for work in works):
        best = replace(best, per_shared_context_token=best.per_context_token)
    return best


def _fit_host(samples: Sequence[StepSample], seconds: Sequence[float]) -> HostCost:
    rows = [(1, sample.work.num_sequences, sample.work.num_chunks) for sample in samples]
    coefficients, _ = non_negative_least_squares(rows, seconds)
    return HostCost(*coefficients)


def _fit_intake(intakes: Sequence[tuple[int, float]]) -> IntakeCost:
    if not intakes:
        return IntakeCost()
    coefficients, _ = non_negative_least_squares([(1, size) for size, _ in intakes], [took for _, took in intakes])
    return IntakeCost(*coefficients)


def non_negative_least_squares(
    rows: ArrayLike, targets: ArrayLike, scales: ArrayLike | None = None
) -> tuple[list[float], float]:
    """Return coefficients c >= 0 that minimise the sum of ((rows @ c - targets) / scales)², and that sum.

    Rows without a positive scale do not count; by default the scales are the targets.

    The optimum is a plain least-squares solution over its positive entries, so the best non-negative solution over all
    subsets of columns is found by trying each; with at most ten columns there are few.
    """
    times = np.asarray(targets, dtype=float)
    divisors = times if scales is None else np.asarray(scales, dtype=float)
    keep = divisors > 0.0
    matrix = np.asarray(rows, dtype=float)[keep] / divisors[keep, None]  # [num_samples, num_columns], relative
    scale = np.maximum(np.abs(matrix).max(axis=0, initial=0.0), 1e-300)
    # A rotation (QR) keeps all distances and reduces the rows to the number of columns.
    triangle = np.linalg.qr(np.column_stack([matrix / scale, times[keep] / divisors[keep]])).R
    matrix, goal = triangle[:, :-1], triangle[:, -1]
    num_columns = matrix.shape[1]
    best, least = np.zeros(num_columns), float(goal @ goal)
    for size in range(1, num_columns + 1):
        for columns in itertools.combinations(range(num_columns), size):
            part = matrix[:, columns]
            solution = np.linalg.lstsq(part, goal, rcond=None)[0]
            misses = part @ solution - goal
            if misses @ misses < least and (solution >= 0.0).all():
                best, least = np.zeros(num_columns), float(misses @ misses)
                best[list(columns)] = solution
    return (best / scale).tolist(), least
