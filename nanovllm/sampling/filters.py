"""Filters of unlikely tokens: each keeps logits of at least a floor, and sets the others to -inf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.core import sampling_params

FILTERED_AT_ONCE = 128  # rows on a GPU without kernels: sorting a vocabulary takes 40 bytes per token

# Coefficients of e^x (polynomial of Cephes' expf, Moshier 1992), with each product and sum rounded to float32.
# `kernels/csrc/sampling/rows.h` computes the same bits, so that both keep the same tokens.
_SERIES = 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1
_ROUNDING = 1.5 * 2**18  # float64 spacing at this number is 2^-34


def masses(levels: Tensor) -> Tensor:
    """Masses: probabilities relative to the best token's, e^level in float32, rounded to multiples of 2^-34.

    So sums over up to 2^19 tokens are exact, in any order.

    Args:
        levels: float32, logits minus their row's largest.

    Returns float64 of the same shape.
    """
    levels = levels.clamp(min=-32.0)  # masses below level -25 are 0
    whole = (levels * 1.44269504).add_(12582912.0).sub_(12582912.0)  # adding 1.5 * 2^23 rounds to an integer
    rest = levels.sub_(whole * 0.693359375).add_(whole * 2.12194440e-4)
    power = rest * 1.9875691500e-4
    for coefficient in _SERIES[:-1]:
        power.add_(coefficient).mul_(rest)
    power.add_(_SERIES[-1]).mul_(rest).mul_(rest).add_(rest).add_(1.0)
    scale = whole.int().add_(127).bitwise_left_shift_(23).view(torch.float32)
    return power.mul_(scale).double().add_(_ROUNDING).sub_(_ROUNDING)


def least_levels(min_p: Tensor) -> Tensor:
    """Smallest levels (logit minus the row's largest, float32) that min_p keeps; the same in any batch."""
    return min_p.double().log().float()


class Filter(NamedTuple):
    """A sampling stage after the temperature, in torch; kernels name the filters that they implement.

    Args:
        dtype: of its inputs, one per row, 0 if the filter is off.
        encode: option values [num_rows] float64 -> inputs, any dtype.
        floor: (logits [num_rows, vocab_size] float32 after earlier filters in descending order, inputs [num_rows, 1])
            -> smallest logit to keep [num_rows, 1], without synchronising with the device.
    """

    dtype: type[np.int32] | type[np.float32]
    encode: Callable[[NDArray[np.float64]], NDArray[Any]]
    floor: Callable[[Tensor, Tensor], Tensor]


def _top_k_floor(ordered: Tensor, top_k: Tensor) -> Tensor:
    last = ordered.shape[1] - 1
    return ordered.gather(1, (top_k - 1).clamp(0, last).long()).masked_fill(top_k > last + 1, -torch.inf)


def _top_p_floor(ordered: Tensor, top_p: Tensor) -> Tensor:
    """The logit at which the cumulative mass of the most probable tokens reaches top_p."""
    total = masses(ordered - ordered[:, :1]).sum(dim=-1, keepdim=True)
    return crossing(ordered, total * top_p)[0]


def crossing(ordered: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(first ordered logit at which the cumulative mass reaches the target, else the last; whether it is reached)."""
    reached = masses(ordered - ordered[:, :1]).cumsum(dim=-1)
    num_before = (reached < target).sum(dim=-1, keepdim=True)  # tokens before the target is reached
    last = ordered.shape[1] - 1
    return ordered.gather(1, num_before.clamp(max=last)), num_before <= last


_FILTERS = {
    "top_k": Filter(np.int32, lambda k: np.where((k > 0) & (k < 2**31 - 1), k, 0), _top_k_floor),
    "top_p": Filter(
        np.float32,
        lambda p: np.where(p.astype(np.float32) < 1, np.maximum(p, np.finfo(np.float32).tiny), 0),
        _top_p_floor,
    ),
    "min_p": Filter(np.float32, lambda p: p, lambda ordered, min_p: ordered[:, :1] + least_levels(min_p)),
}
FILTERS = {name: _FILTERS[name] for name in sampling_params.FILTERS}  # in order of application


def keep_likely_by_sort(logits: Tensor, inputs: list[Tensor]) -> Tensor:
    """Set logits of unlikely tokens to -inf, filter by filter, as in `transformers`.

    Tokens as probable as the last kept one are kept too. Nothing depends on data, so a CUDA graph can capture it.

    Args:
        logits: [num_rows, vocab_size] float32, after the temperature; overwritten.
        inputs: [num_rows] of each filter, 0 where it is off.

    Returns the smallest kept logit of each row, [num_rows, 1]; -inf keeps all.
    """
    ordered = logits.sort(dim=-1, descending=True).values
    floor = torch.full_like(logits[:, :1], -torch.inf)
    for stage, values in zip(FILTERS.values(), inputs, strict=True):
        own = stage.floor(ordered, values[:, None])
        floor = floor.maximum(own.where(values[:, None] > 0, -torch.inf))
        for left in (logits, ordered):
            left.masked_fill_(left < floor, -torch.inf)
    return floor
