"""Fit of a cost model to measured steps by non-negative least absolute deviations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from nanovllm.features.costs.cost_model import KNEES, CostModel, DeviceCost, HostCost, IntakeCost, StepWork, columns

NUM_REWEIGHTINGS = 5
SMALL_MISS = 0.02  # relative; up to it errors count squared, as noise, and beyond it as they are (Huber 1964)


class StepSample(NamedTuple):
    """A measured step; times in seconds.

    device_time: time from the end of the launch to the tokens on a GPU, all of execute on a CPU.
    """

    work: StepWork
    schedule_time: float
    launch_time: float
    device_time: float
    update_time: float

    @property
    def execute_time(self) -> float:
        """Time from the start of the launch to its tokens, in seconds."""
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
        head_start: last part of a launch, in seconds, during which an idle device computes; see `CostModel`.

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

    A step that is not of its kind, launched without a CUDA graph for one, draws the fit no further than another. The
    deviations are minimised by least squares, reweighted (Holland and Welsch 1977). Without a step that shares context,
    shared tokens cost as much as others.
    """
    samples = [sample for sample in samples if sample.execute_time > 0.0]
    works = [sample.work for sample in samples]
    seconds = np.asarray([sample.device_time for sample in samples])
    scales = np.asarray([sample.execute_time for sample in samples])
    fits = []
    for knee in KNEES:
        rows = np.asarray([columns(work, knee) for work in works], dtype=float)
        weights = np.ones(len(samples))
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
    matrix = triangle[:, :-1]
    goal = triangle[:, -1]
    num_columns = matrix.shape[1]
    best = np.zeros(num_columns)
    least = float(goal @ goal)
    for size in range(1, num_columns + 1):
        for chosen in itertools.combinations(range(num_columns), size):
            part = matrix[:, chosen]
            solution = np.linalg.lstsq(part, goal, rcond=None)[0]
            misses = part @ solution - goal
            if misses @ misses < least and (solution >= 0.0).all():
                best = np.zeros(num_columns)
                least = float(misses @ misses)
                best[list(chosen)] = solution
    return (best / scale).tolist(), least
