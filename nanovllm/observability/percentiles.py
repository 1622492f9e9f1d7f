"""Mean, median and tails: how everything here that measures times sums them up."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def spread(values: Iterable[float]) -> dict[str, float] | None:
    """By name: mean, p50, p90, p99 and max of some values; None of none.

    A percentile lies between two values as far as its rank lies between theirs.
    """
    of = np.fromiter(values, np.float64)
    if not of.size:
        return None
    p50, p90, p99 = np.percentile(of, (50, 90, 99)).tolist()
    return {"mean": float(of.mean()), "p50": p50, "p90": p90, "p99": p99, "max": float(of.max())}
