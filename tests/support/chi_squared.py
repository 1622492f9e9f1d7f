"""Tests of counts against probabilities: Pearson's chi-squared, and of their temperature."""

import torch

# A correct sampler fails for one seed in ten thousand; the seeds are fixed.
SIGNIFICANCE = 1e-4


def p_value(counts, probabilities):
    """Return the p-value of Pearson's chi-squared test of counts against probabilities."""
    expected = counts.sum() * probabilities.double()
    assert expected.min() >= 5, "too few draws for the statistic to be one of chi-square"
    statistic = ((counts.double() - expected) ** 2 / expected).sum()
    freedom = torch.tensor(len(counts) - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


def temperature_p_value(counts, probabilities):
    """Return the p-value of the mean log-probability of what was drawn, which a wrong temperature moves most."""
    counts, logprobs = counts.double(), probabilities.double().log()
    mean = (probabilities * logprobs).sum()
    variance = (probabilities * (logprobs - mean) ** 2).sum() / counts.sum()
    found = (counts * logprobs).sum() / counts.sum()
    return float(torch.special.erfc((found - mean).abs() / (2 * variance).sqrt()))
