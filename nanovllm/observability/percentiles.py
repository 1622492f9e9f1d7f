"""Percentiles of latencies: mean, p50, p90, p99 and max."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def percentiles(values: Iterable[float]) -> dict[str, float] | None:
    """Return mean, p50, p90, p99 and max by name, with linear interpolation; None without values."""
    array = np.fromiter(values, np.float64)
    if not array.size:
        return None
    p50, p90, p99 = np.percentile(array, (50, 90, 99)).tolist()
    return {"mean": float(array.mean()), "p50": p50, "p90": p90, "p99": p99, "max": float(array.max())}
