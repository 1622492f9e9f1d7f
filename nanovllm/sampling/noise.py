"""Counter-based Gumbel noise: a pure function of a request's seed, the position and the token id."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.core.sampling_params import GAMMA, MIX_1, MIX_2

# SplitMix64's scheme in 32 bits, at a third of the cost: counters in steps of the golden ratio, mixed by Wellons'
# `lowbias32` once with each half of the row's key.
GAMMA_32 = 0x9E3779B9
_MIX_32 = (16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)  # (shift, factor) of each round


def noise_keys(seeds: SequenceABC[int], positions: SequenceABC[int]) -> NDArray[np.int64]:
    """Keys of the noise [n], from n 64-bit seeds and the positions of the tokens to be drawn."""
    seed = np.array(seeds, np.uint64) + np.uint64(GAMMA)
    position = (np.array(positions, np.uint64) + np.uint64(1)) * np.uint64(GAMMA)
    return _mixed(_mixed(seed) ^ _mixed(position)).view(np.int64)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`mix64` of each element."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(MIX_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(MIX_2)
    return values ^ (values >> np.uint64(31))


def signed_32(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value


def token_counters(vocab_size: int, device: torch.device) -> Tensor:
    """Counters [vocab_size] int32 of the token ids."""
    return torch.arange(1, 1 + vocab_size, dtype=torch.int32, device=device) * signed_32(GAMMA_32)


def _mixed_32(values: Tensor) -> Tensor:
    """Mix int32 values in place, so that each output bit depends on all input bits."""
    for shift, factor in _MIX_32:
        values ^= (values >> shift) & ((1 << (32 - shift)) - 1)  # masked, since torch's shift is arithmetic
        if factor != 1:
            values *= signed_32(factor)
    return values


def gumbel_noise(keys: Tensor, counters: Tensor) -> Tensor:
    """Standard Gumbel noise for every token of every row.

    Args:
        keys: [num_rows] int64, from `noise_keys`.
        counters: [vocab_size] int32, from `token_counters`.

    Returns [num_rows, vocab_size] float32: -log(E) for an exponential E = -log(1 - u). The large values, which decide
    the draw, come from small u. u has 31 bits, and float32 resolves small numbers finely, so they are exact up to the
    maximum of 22.2 (with a 24-bit uniform near 1 it would be 16.6).
    """
    low, high = keys.to(torch.int32), (keys >> 32).to(torch.int32)
    bits = _mixed_32(_mixed_32(counters + low[:, None]).add_(high[:, None]))
    uniform = ((bits >> 1) & 0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()
