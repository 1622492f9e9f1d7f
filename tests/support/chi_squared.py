"""Pearson's chi-squared test of counts against probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

# A correct sampler fails for one seed in ten thousand; the seeds are fixed.
SIGNIFICANCE = 1e-4


def p_value(counts: Tensor, probabilities: Tensor) -> float:
    """Return the p-value of Pearson's chi-squared test of counts against probabilities."""
    expected = counts.sum() * probabilities.double()
    assert expected.min() >= 5, "too few draws for the statistic to be one of chi-square"
    statistic = ((counts.double() - expected) ** 2 / expected).sum()
    freedom = torch.tensor(len(counts) - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))
