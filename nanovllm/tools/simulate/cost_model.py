"""How long a step takes, from what it computes; fitted to measured steps with coefficients that are never negative."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import mul
from typing import NamedTuple

import numpy as np

from nanovllm.batch import ScheduledBatch
from nanovllm.execution.buckets import RowSizes

# Where the slope of the dense work may change: below, reading the weights decides, above it the arithmetic.
KNEES = (4, 8, 16, 32, 64, 128, 256, 512)


class StepShape(NamedTuple):
    """What a step's time depends on.

    num_tokens: rows that pass the dense layers: the new tokens, and on a GPU what their number is rounded up by.
    num_decodes, num_chunks: sequences by the kind of their attention.
    num_context_tokens: KV entries that the decodes read. Of decodes with the same first block, what all of them begin
        with is counted once: a kernel may read it once for all.
    num_shared_context_tokens: how many more it were if each decode counted all of its own.
    num_chunk_pairs: pairs of a query and a key that the chunks' attention multiplies.
    num_samples: rows that reach the vocabulary projection and draw a token.
    """

    num_tokens: int
    num_decodes: int
    num_chunks: int
    num_context_tokens: int
    num_shared_context_tokens: int
    num_chunk_pairs: int
    num_samples: int

    @classmethod
    def of(cls, batch: ScheduledBatch, block_size: int, sizes: RowSizes | None = None) -> StepShape:
        """`sizes` are those that the engine rounds up to, if it does."""
        num_decodes, num_tokens, num_pairs, num_samples = batch.num_decodes, batch.num_decodes, 0, batch.num_decodes
        num_single = num_decodes
        for _, start, size, samples, _, _ in batch.prefills:
            num_tokens += size
            num_single += size == 1
            num_pairs += size * start + size * (size + 1) // 2
            num_samples += samples
        decodes = batch.entries[:num_decodes]
        shared = block_size * _num_shared_blocks([entry.block_table for entry in decodes])
        context = sum([entry.start for entry in decodes]) + num_decodes - shared
        num_chunks = len(batch.entries) - num_decodes
        if sizes is not None:
            _, num_tokens = sizes.padded(num_single, num_tokens - num_single)  # laid out as decodes
        return cls(num_tokens, num_decodes, num_chunks, context, shared, num_pairs, num_samples)

    @property
    def num_sequences(self) -> int:
        return self.num_decodes + self.num_chunks


def _num_shared_blocks(tables: Sequence[list[int]]) -> int:
    """How many blocks less are read if those that tables begin with in common are read once for all of these tables."""
    if len({table[0] for table in tables}) == len(tables):
        return 0
    groups: dict[int, list[list[int]]] = {}
    for table in tables:
        groups.setdefault(table[0], []).append(table)
    num_blocks = 0
    for group in groups.values():
        first, last = min(group), max(group)  # what these two have in common, all between them have
        pairs = enumerate(zip(first, last, strict=False))
        common = next((number for number, (a, b) in pairs if a != b), min(len(first), len(last)))
        num_blocks += (len(group) - 1) * common
    return num_blocks


@dataclass(frozen=True, slots=True)
class DeviceCost:
    """Seconds of a step between its launch and its tokens.

    fixed: of any step: the weights are read, the kernels started.
    per_token_below, per_token_above: dense work of each new token up to the `knee`-th, and of each one behind it. Where
        reading the weights bounds small steps the first is about 0, and both together are a floor and a slope.
    per_decode, per_chunk: attention of one more sequence.
    per_context_token: reading one token's K and V for a decode.
    per_shared_context_token: using it for another decode as well: the same again, unless the kernel reads it once.
    per_chunk_pair: one query with one key of a chunk.
    per_sample: vocabulary projection and drawing, of a row.
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

    def seconds(self, shape: StepShape) -> float:
        return sum(map(mul, self.coefficients, _columns(shape, self.knee)))

    @property
    def coefficients(self) -> tuple[float, ...]:
        """In the order of `_columns`."""
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
        )


def _columns(shape: StepShape, knee: int) -> tuple[int, ...]:
    """What the coefficients of `DeviceCost` multiply, in their order."""
    below = min(shape.num_tokens, knee)
    return (1, below, shape.num_tokens - below, *shape[1:])


@dataclass(frozen=True, slots=True)
class HostCost:
    """Seconds of the host's bookkeeping for a step, and more for each of its sequences."""

    fixed: float = 0.0
    per_sequence: float = 0.0

    def seconds(self, num_sequences: int) -> float:
        return self.fixed + self.per_sequence * num_sequences


@dataclass(frozen=True, slots=True)
class IntakeCost:
    """Seconds of the host's to take a request in, and more for each token of its prompt."""

    fixed: float = 0.0
    per_token: float = 0.0

    def seconds(self, num_prompt_tokens: int) -> float:
        return self.fixed + self.per_token * num_prompt_tokens


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a step's parts, and of a request's beginning.

    schedule: deciding on it.
    device: computing it.
    update: from its tokens' arrival to the beginning of the next step, or of the intakes before that.
    launch: laying it out and handing it to a device of its own.
    launch_blocks: the host computes the step itself, as on a CPU, so overlap hides nothing, and `device` is all that
        executing takes.
    intake: checking and queueing a request, between two steps; checks come before that in another thread of a server,
        which the same interpreter runs.
    """

    schedule: HostCost
    device: DeviceCost
    update: HostCost
    launch: HostCost = HostCost()
    launch_blocks: bool = True
    intake: IntakeCost = IntakeCost()


class StepSample(NamedTuple):
    """One step as it was measured; times in seconds.

    device_time: of a device of its own, from the end of the launch on; else of executing.
    """

    shape: StepShape
    schedule_time: float
    launch_time: float
    device_time: float
    update_time: float


def fit(samples: Sequence[StepSample], intakes: Sequence[tuple[int, float]] = (), *, launch_blocks: bool) -> CostModel:
    """The cost model with the least squared relative errors.

    Args:
        intakes: tokens of a request's prompt, and seconds that it took to take it in.

    Raises ValueError if there are fewer samples than coefficients.
    """
    if len(samples) < 10:
        raise ValueError(f"{len(samples)} measured steps are too few to fit a cost model; at least 10 are needed.")
    return CostModel(
        schedule=_fit_host(samples, [sample.schedule_time for sample in samples]),
        device=fit_device([sample.shape for sample in samples], [sample.device_time for sample in samples]),
        update=_fit_host(samples, [sample.update_time for sample in samples]),
        launch=HostCost() if launch_blocks else _fit_host(samples, [sample.launch_time for sample in samples]),
        launch_blocks=launch_blocks,
        intake=_fit_intake(intakes),
    )


def fit_device(shapes: Sequence[StepShape], seconds: Sequence[float]) -> DeviceCost:
    """The coefficients and the knee with the least squared relative errors.

    If no step shared any context, what sharing saves was not measured, and it is taken to save nothing.
    """
    fits = []
    for knee in KNEES:
        coefficients, error = non_negative_least_squares([_columns(shape, knee) for shape in shapes], seconds)
        fits.append((error, DeviceCost(knee, *coefficients)))
    _, best = min(fits, key=lambda candidate: candidate[0])
    if not any(shape.num_shared_context_tokens for shape in shapes):
        best = replace(best, per_shared_context_token=best.per_context_token)
    return best


def _fit_host(samples: Sequence[StepSample], seconds: Sequence[float]) -> HostCost:
    coefficients, _ = non_negative_least_squares([(1, sample.shape.num_sequences) for sample in samples], seconds)
    return HostCost(*coefficients)


def _fit_intake(intakes: Sequence[tuple[int, float]]) -> IntakeCost:
    if not intakes:
        return IntakeCost()
    coefficients, _ = non_negative_least_squares([(1, size) for size, _ in intakes], [took for _, took in intakes])
    return IntakeCost(*coefficients)


def non_negative_least_squares(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> tuple[list[float], float]:
    """Coefficients c >= 0 that minimise the sum of ((rows @ c - targets) / targets)², and that sum.

    The best c is the plain least-squares solution over its own positive entries, so of the solutions over all subsets
    of columns that came out positive it is the one with the least error. With at most nine columns there are few.
    """
    times = np.asarray(targets, dtype=float)
    keep = times > 0.0
    matrix = np.asarray(rows, dtype=float)[keep] / times[keep, None]  # [num_samples, num_columns], relative
    scale = np.maximum(np.abs(matrix).max(axis=0, initial=0.0), 1e-300)
    # A rotation leaves all distances as they are, and as many rows as there are columns.
    triangle = np.linalg.qr(np.column_stack([matrix / scale, np.ones(len(matrix))])).R
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
