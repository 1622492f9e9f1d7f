"""A chi-squared test of counts against probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

# A right sampler fails a chi-square test for one seed in ten thousand, and the seeds are fixed.
SIGNIFICANCE = 1e-4


def p_value(counts: Tensor, probabilities: Tensor) -> float:
    """Pearson's chi-square test: how probable counts at least as odd as these are under the given probabilities."""
    expected = counts.sum() * probabilities.double()
    assert expected.min() >= 5, "too few draws for the statistic to be one of chi-square"
    statistic = ((counts.double() - expected) ** 2 / expected).sum()
    freedom = torch.tensor(len(counts) - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))
