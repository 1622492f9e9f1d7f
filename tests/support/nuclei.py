"""Random logits, and those whose most probable token has half of all mass, to the last bit."""

import math

import torch

from nanovllm.sampler import masses


def nuclei_that_end_exactly():
    """The first token has the mass of all others: of one close below it, or of two that have a half each."""
    near = torch.tensor([0.0, -1e-9])  # e^-1e-9 is 1 in float32
    around = -math.log(2.0) + torch.arange(-64, 65) * 2.0**-24
    half = around[masses(around) == 0.5][0].item()
    rows = [near, torch.tensor([0.0, half, half])]
    for row in rows:
        mass = masses(row)
        assert mass[0] == mass[1:].sum()
    return rows


def random_logits(num_rows, vocab_size, *, scale=2.0, seed=0):
    return scale * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))
