"""Top-k, top-p and min-p: the logits of unlikely tokens set to -inf; in kernels, `filter_floors.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.process.device import to_device

NUCLEUS_WIDTH = 1024  # most probable tokens that are looked at first
FILTERED_AT_ONCE = 128  # rows on a GPU without kernels: sorting a vocabulary takes 40 bytes of memory a token

# Of e^x (the polynomial of Cephes' expf, Moshier 1992), each product and sum rounded to float32: a definition, which
# `kernels/csrc/sampling/rows.h` repeats, so that both forms keep the same tokens.
_SERIES = 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1
_ROUNDING = 1.5 * 2**18  # float64 numbers beside it are 2^-34 apart


def masses(levels: Tensor) -> Tensor:
    """Probabilities beside the best token's: e^level in float32, rounded to multiples of 2^-34.

    So their sums over up to 2^19 tokens are exact, in any order.

    Args:
        levels: float32, of logits beside their row's largest.

    Returns float64 of the same shape.
    """
    levels = levels.clamp(min=-32.0)  # below -25 all is 0
    whole = (levels * 1.44269504).add_(12582912.0).sub_(12582912.0)  # adding 1.5 * 2^23 rounds to a whole number
    rest = levels.sub_(whole * 0.693359375).add_(whole * 2.12194440e-4)
    power = rest * 1.9875691500e-4
    for coefficient in _SERIES[:-1]:
        power.add_(coefficient).mul_(rest)
    power.add_(_SERIES[-1]).mul_(rest).mul_(rest).add_(rest).add_(1.0)
    scale = whole.int().add_(127).bitwise_left_shift_(23).view(torch.float32)
    return power.mul_(scale).double().add_(_ROUNDING).sub_(_ROUNDING)


def total_masses(logits: Tensor, largest: Tensor) -> Tensor:
    """The masses of rows of logits [num_rows, vocab_size] float32 beside their largest [num_rows, 1], summed up.

    Returns [num_rows, 1] float64.
    """
    if logits.device.type != "cpu" or len(logits) <= 1:
        return masses(logits - largest).sum(dim=-1, keepdim=True)
    pairs = zip(logits.split(1), largest.split(1), strict=True)  # a row at a time stays within the cache
    return torch.cat([total_masses(row, top) for row, top in pairs])


def least_levels(min_p: Tensor) -> Tensor:
    """Float32 logits beside their row's largest from which on min_p, float32, keeps tokens; the same in any batch."""
    return min_p.double().log().float()


def keep_likely(logits: Tensor, top_k: list[int], top_p: list[float], min_p: list[float]) -> Tensor:
    """Set the logits of unlikely tokens to -inf: top-k, then top-p of what is left, then min-p (as `transformers`).

    Each filter comes down to the smallest logit that it keeps, so tokens as probable as the last one kept stay too,
    whatever their order. Rows that do not use a filter cost nothing for it.

    Args:
        logits: [num_rows, vocab_size] float32, after the temperature; overwritten.
        top_k: per row; all tokens if it is below 1.
        top_p, min_p: per row; all tokens if it is 0, or top_p is 1.
    """
    vocab_size, device = logits.shape[1], logits.device
    rows = [row for row, k in enumerate(top_k) if 0 < k < vocab_size]
    if rows:
        counts = to_device([top_k[row] for row in rows], device)
        largest = logits[to_device(rows, device)].topk(max(top_k[row] for row in rows)).values
        _drop_below(logits, rows, largest.gather(1, counts[:, None] - 1))
    rows = [row for row, p in enumerate(top_p) if 0.0 < p < 1.0]
    if rows:
        shares = to_device([top_p[row] for row in rows], device)
        _drop_below(logits, rows, _nucleus_floor(logits[to_device(rows, device)], shares))
    rows = [row for row, p in enumerate(min_p) if p > 0.0]
    if rows:
        shares = to_device([min_p[row] for row in rows], device)[:, None]
        _drop_below(logits, rows, logits[to_device(rows, device)].amax(dim=-1, keepdim=True) + least_levels(shares))
    return logits


def keep_likely_by_sort(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """`keep_likely` for all rows alike: nothing depends on values on the host, so a CUDA graph can capture it.

    Args:
        logits: as there.
        top_k: [num_rows] int32; all tokens if it is 0, or vocab_size and more.
        top_p, min_p: [num_rows] float32; all tokens if it is 0.
    """
    last = logits.shape[1] - 1
    ordered = logits.sort(dim=-1, descending=True).values
    floor = ordered.gather(1, torch.where(top_k > 0, top_k - 1, last).clamp(max=last).long()[:, None])
    reached = masses(ordered - ordered[:, :1]).masked_fill_(ordered < floor, 0.0).cumsum(dim=-1)
    num_before = (reached < reached[:, -1:] * top_p[:, None]).sum(dim=-1, keepdim=True)
    crossing = ordered.gather(1, num_before.clamp_(max=last))
    floor = torch.where(top_p[:, None] > 0, crossing.maximum(floor), floor)
    floor = floor.maximum(ordered[:, :1] + least_levels(min_p)[:, None])
    return logits.masked_fill_(logits < floor, float("-inf"))


def _drop_below(logits: Tensor, rows: list[int], floor: Tensor) -> None:
    """Set what lies below floor [len(rows), 1] to -inf, in place."""
    if len(rows) == len(logits):
        logits.masked_fill_(logits < floor, float("-inf"))
    else:
        places = to_device(rows, logits.device)
        chosen = logits[places]
        logits[places] = chosen.masked_fill_(chosen < floor, float("-inf"))


def _nucleus_floor(logits: Tensor, top_p: Tensor) -> Tensor:
    """[num_rows, 1]: the logit of the token with which the mass of the most probable ones reaches top_p [num_rows]."""
    vocab_size, top = logits.shape[1], logits.amax(dim=-1, keepdim=True)
    target = total_masses(logits, top) * top_p[:, None]
    # A nucleus is nearly always small, and finding the largest few costs a CPU a tenth of a sort. A GPU sorts fast, and
    # asking which rows need more would make the host wait for it.
    width = min(vocab_size, NUCLEUS_WIDTH) if logits.device.type == "cpu" else vocab_size
    floor, is_reached = _crossing(logits.topk(width).values, top, target)
    if width < vocab_size and not is_reached.all():
        rows = (~is_reached[:, 0]).nonzero()[:, 0]
        ordered = logits[rows].sort(dim=-1, descending=True).values
        floor[rows] = _crossing(ordered, top[rows], target[rows])[0]
    return floor


def _crossing(ordered: Tensor, top: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The first of the ordered logits whose cumulative mass reaches the target, else the last; whether one does."""
    reached = masses(ordered - top).cumsum(dim=-1)
    num_before = (reached < target).sum(dim=-1, keepdim=True)  # tokens that leave something lacking
    last = ordered.shape[1] - 1
    return ordered.gather(1, num_before.clamp(max=last)), num_before <= last
