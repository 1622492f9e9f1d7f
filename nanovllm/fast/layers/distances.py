"""Tolerances between a fused layer and its modules, per row and in scale."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from nanovllm.errors import NotFusedError

# Relative error of a fused layer's change of the hidden states: of the median row; the worst row may have four times as
# much. Measured on SmolLM2 (float32, bfloat16): median 2e-6 and 0.013, worst 2e-5 and 0.037, where hidden states are a
# thousand times as large as their change. This finds wrong kernels, but not layers of another kind: `LayerEquations`
# compares the inputs of their parts, where there is less rounding.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.025, torch.float16: 0.005}
# The same where activations become bytes for quantised weights: on SmolLM2 median up to 0.026, worst 0.04; 0.05 with
# outliers.
BYTE_TOLERANCE = 0.06
# Relative error of a row between a layer's parts: up to three roundings, of 2^-8 or 2^-11 each.
ROW_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.015, torch.float16: 0.002}
# Distance of the elements' mean ratio from 1. In bfloat16 rounding changes an element by up to 0.2 % in both
# directions, the mean of 64 elements by up to 0.1 %; a factor of 0.995 changes it by 0.5 %.
SCALE_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.0025, torch.float16: 5e-4}
_LEAST_SCALED = 2048  # elements; the mean ratio of a row of 128 may be 0.0026 by rounding alone
_MOST_COUNTED = 4  # clamp of an element's error, in roundings: cancellation makes single ratios large


def check_change(kind: str, before: Tensor, expected: Tensor, own: Tensor, *, has_byte_rows: bool = False) -> None:
    """Compare a layer's output rows [num_rows, hidden_size] with its module's; raises NotFusedError.

    One rounding per element is not counted: where hidden states are a hundred times as large as their change, often
    for a first token, it is a tenth of the change.
    """
    change = (expected.float() - before.float()).norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    rounding = torch.finfo(expected.dtype).eps * expected.float().abs()
    distances = ((own.float() - expected.float()).abs() - rounding).clamp(min=0).norm(dim=-1) / change
    median = distances.median().item()
    worst = distances.max().item()
    tolerance = BYTE_TOLERANCE if has_byte_rows else TOLERANCE[expected.dtype]
    if not (median <= tolerance and worst <= 4 * tolerance):  # NaN differs too
        raise NotFusedError(f"{kind} computes something else: the change differs by up to {worst:.1e} of its size")


@contextmanager
def in_another_way(call: str, *more: type[Exception]) -> Iterator[None]:
    """Raise NotFusedError for errors of a call with other arguments or results than expected.

    Args:
        call: first words of the error, such as "LlamaAttention is called".
        more: Further types of such errors.
    """
    errors: tuple[type[Exception], ...] = (TypeError, KeyError, AttributeError, IndexError, *more)
    try:
        yield
    except errors as error:
        raise NotFusedError(f"{call} in another way: {error!r}") from error


def difference_of_rows(own: Tensor, expected: Tensor, *, least_scaled: int = 0) -> str | None:
    """Text that describes a difference of rows [..., size] beyond the tolerances; None if they agree.

    Args:
        least_scaled: Number of elements from which on the scale counts.
    """
    worst = row_distances(own, expected).max().item()
    scale = _scale_error(own, expected) if own.numel() >= least_scaled else 0.0
    if worst <= ROW_TOLERANCE[own.dtype] and abs(scale) <= SCALE_TOLERANCE[own.dtype]:
        return None
    return f"by up to {worst:.1e} a row, by {scale:.1e} in scale"


@contextmanager
def rewriting(kind: str, cache: Tensor, slots: Tensor) -> Iterator[None]:
    """Compare K and V that the block writes at these slots with the former ones; raises NotFusedError.

    They are negated when it begins, since old ones would hide that a kernel writes none; NaN could spread.
    """
    expected = cache[:, slots]
    cache[:, slots] = -expected
    try:
        yield
        own = cache[:, slots]
    finally:
        cache[:, slots] = expected
    for name, *pair in zip(("keys", "values"), own.flatten(2), expected.flatten(2), strict=True):
        if (differs := difference_of_rows(*pair, least_scaled=_LEAST_SCALED)) is not None:
            raise NotFusedError(f"{kind} computes something else: its {name} differ {differs}")


def row_distances(own: Tensor, expected: Tensor) -> Tensor:
    """Relative errors [...] of rows [..., size], by norm."""
    tiny = torch.finfo(torch.float32).tiny
    return (own.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1).clamp(min=tiny)


def _scale_error(own: Tensor, expected: Tensor) -> float:
    """Mean ratio of elements to the expected ones, minus 1; expected zeros do not count."""
    ratios = own.float() / expected.float() - 1
    most = _MOST_COUNTED * torch.finfo(own.dtype).eps
    counted = ratios[expected != 0].clamp(-most, most)
    return counted.mean().item() if len(counted) else 0.0
