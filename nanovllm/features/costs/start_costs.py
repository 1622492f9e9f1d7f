"""Costs of steps before the first request: a few steps of no request, timed, and the file of a calibration."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from nanovllm.batch import ScheduledBatch
from nanovllm.features.costs.cost_model import CostModel

REPEATS = 3  # runs of each step; the fastest counts, and a step of over a second runs once
LONG_STEP = 0.25  # seconds; after a first step that takes longer, none of several sequences is tried


def fastest(batch: ScheduledBatch, execute: Callable[[ScheduledBatch], object], clock: Callable[[], float]) -> float:
    """Seconds of a step that is run to its end REPEATS times."""
    seconds = []
    for _ in range(REPEATS):
        begin = clock()
        execute(batch)
        seconds.append(clock() - begin)
        if seconds[-1] > 1.0:
            break
    return max(min(seconds), 1e-9)


def read_costs(path: str) -> CostModel:
    """The cost model of a calibration file; raises OSError if it cannot be read, ValueError for any other file."""
    try:
        return CostModel.from_dict(json.loads(Path(path).read_text(encoding="utf-8"))["cost_model"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"step_costs is {path!r}, which is no calibration ({type(error).__name__}: {error}); `nanovllm calibrate` "
            "writes one."
        ) from error
