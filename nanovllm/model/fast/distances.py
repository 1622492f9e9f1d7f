"""How far a faster form of a layer may be from its modules, in rows and in scale."""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.core.errors import NotFusedError

# How far a fused layer's change of the hidden states may lie from the module's own, in relation to its size: in the
# median of the rows, and four times as far in the worst row. Measured on SmolLM2: median 2e-6 and 0.013, worst 2e-5 and
# 0.037, where a row's hidden states are a thousand times as large as their change. So wide, it finds kernels that are
# wrong, no layers of another kind: `LayerEquations` finds those between their parts, where there is less rounding.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.025}
# The same between parts, of rows in relation to their size: up to three roundings, each by 2^-8 or 2^-11 at most.
ROW_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.015, torch.float16: 0.002}
# How far the mean ratio of elements may be from 1. Rounding moves each by 0.2 % in bfloat16, up and down alike, so that
# the mean of 64 elements is within 0.1 %; a factor of 0.995 moves it by 0.5 %.
SCALE_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.0025, torch.float16: 5e-4}
_MOST_COUNTED = 4  # roundings by which an element counts, where terms of opposite signs left little of it


def check_change(kind: str, before: Tensor, expected: Tensor, own: Tensor) -> None:
    """Compare a layer's answer, rows [num_rows, hidden_size], with its module's; raises NotFusedError.

    One rounding of each element is no distance: where hidden states are a hundred times as large as their change, as
    those of a first token often are, it is a tenth of it.
    """
    change = (expected.float() - before.float()).norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    rounding = torch.finfo(expected.dtype).eps * expected.float().abs()
    distances = ((own.float() - expected.float()).abs() - rounding).clamp(min=0).norm(dim=-1) / change
    median, worst = distances.median().item(), distances.max().item()
    tolerance = TOLERANCE[expected.dtype]
    if not (median <= tolerance and worst <= 4 * tolerance):  # NaN differs too
        raise NotFusedError(f"{kind} computes something else: the change differs by up to {worst:.1e} of its size")


def difference_of_rows(own: Tensor, expected: Tensor) -> str | None:
    """How rows [..., size] differ beyond a part's roundings, in words."""
    worst, scale = row_distances(own, expected).max().item(), _scale_error(own, expected)
    if worst <= ROW_TOLERANCE[own.dtype] and abs(scale) <= SCALE_TOLERANCE[own.dtype]:
        return None
    return f"by up to {worst:.1e} a row, by {scale:.1e} in scale"


def row_distances(own: Tensor, expected: Tensor) -> Tensor:
    """Distance of rows [..., size] from those expected, in relation to their size."""
    tiny = torch.finfo(torch.float32).tiny
    return (own.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1).clamp(min=tiny)


def _scale_error(own: Tensor, expected: Tensor) -> float:
    """Mean ratio of elements to those expected, less 1; elements of 0 do not count."""
    ratios = own.float() / expected.float() - 1
    most = _MOST_COUNTED * torch.finfo(own.dtype).eps
    counted = ratios[expected != 0].clamp(-most, most)
    return counted.mean().item() if len(counted) else 0.0
