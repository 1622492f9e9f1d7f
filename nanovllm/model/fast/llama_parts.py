"""Parts of decoder layers of Llama's kind: what computes them as one checks that they are what their names say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from nanovllm.attention.operator import AttentionLayer
from nanovllm.core.errors import NotFusedError

# How far a fused layer's change of the hidden states may lie from the module's own, in relation to its size: in the
# median of the rows, and four times as far in the worst row. Measured on SmolLM2: median 2e-6 and 0.013, worst 2e-5 and
# 0.037, where a row's hidden states are a thousand times as large as their change. So wide, it finds kernels that are
# wrong, no layers of another kind: those are found between their parts, where there is less rounding.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.025}
# The same between parts, of rows in relation to their size: up to three roundings, each by 2^-8 or 2^-11 at most.
ROW_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.015, torch.float16: 0.002}
# How far the mean ratio of elements may be from 1. Rounding moves each by 0.2 % in bfloat16, up and down alike, so that
# the mean of 64 elements is within 0.1 %; a factor of 0.995 moves it by 0.5 %.
SCALE_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.0025, torch.float16: 5e-4}
_MOST_COUNTED = 4  # roundings by which an element counts, where terms of opposite signs left little of it


def check_attention(layers: Sequence[AttentionLayer], *served: str) -> None:
    """Raise NotFusedError unless all layers have heads of one size and K and V of their own, and nothing beyond plain
    causal attention but what is in `served`, as of `LayerTraits.first_beyond`.
    """
    sizes = {(traits.num_heads, traits.num_kv_heads, traits.head_dim) for traits in (layer.traits for layer in layers)}
    if len(sizes) > 1:
        raise NotFusedError(f"the layers have heads of different sizes: {sorted(sizes)}")
    for index, layer in enumerate(layers):
        beyond = layer.traits.first_beyond(*served)
        if beyond is None and layer.traits.shares is not None:
            beyond = f"the K and V of layer {layer.traits.shares}"
        if beyond is not None:
            raise NotFusedError(f"layer {index} has {beyond}")


def check_knows_all(module: nn.Module, weights: list[Any]) -> None:
    """Raises NotFusedError for a module with other parameters than these."""
    known = {id(weight) for weight in weights}
    others = [name for name, parameter in module.named_parameters() if id(parameter) not in known]
    if others:
        raise NotFusedError(f"{type(module).__name__} has more parameters: {', '.join(others)}")


def worst_distance(before: Tensor, expected: Tensor, own: Tensor) -> float | None:
    """How far an answer is off in its worst row, in relation to the expected change; None if within TOLERANCE.

    One rounding of each element is no distance: where hidden states are a hundred times as large as their change, as
    those of a first token often are, it is a tenth of it.
    """
    change = (expected.float() - before.float()).norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    rounding = torch.finfo(expected.dtype).eps * expected.float().abs()
    distances = ((own.float() - expected.float()).abs() - rounding).clamp(min=0).norm(dim=-1) / change
    median, worst = distances.median().item(), distances.max().item()
    tolerance = TOLERANCE[expected.dtype]
    return None if median <= tolerance and worst <= 4 * tolerance else worst


def row_distances(own: Tensor, expected: Tensor) -> Tensor:
    """How far rows [..., size] are from those expected, in relation to their size."""
    tiny = torch.finfo(torch.float32).tiny
    return (own.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1).clamp(min=tiny)


def scale_error(own: Tensor, expected: Tensor) -> float:
    """By how much elements are larger than those expected, in the mean of their ratios; what is 0 does not count."""
    ratios = own.float() / expected.float() - 1
    most = _MOST_COUNTED * torch.finfo(own.dtype).eps
    counted = ratios[expected != 0].clamp(-most, most)
    return counted.mean().item() if len(counted) else 0.0


def is_rms_norm(norm: nn.Module, size: int, epsilon: float, dtype: torch.dtype) -> bool:
    """By its answer in float32 to rows that a layer norm, which subtracts the mean, would answer otherwise.

    One row is so small that its answer depends on the epsilon.
    """
    weight = getattr(norm, "weight", None)
    if weight is None or weight.dtype != dtype or weight.shape != (size,):
        return False
    row = torch.linspace(-1.0, 3.0, size, device="cpu").to(weight.device)
    rows = torch.stack([row, row * epsilon**0.5])
    exact = rows * (rows.square().mean(dim=-1, keepdim=True) + epsilon).rsqrt() * weight.float()
    own = functional_call(norm, {name: part.detach().float() for name, part in norm.named_parameters()}, rows[None])[0]
    return own.dtype == torch.float32 and bool((row_distances(own, exact) <= ROW_TOLERANCE[torch.float32]).all())


def is_silu(function: Any) -> bool:
    """By its answer in float32."""
    if not callable(function):
        return False
    values = torch.linspace(-8.0, 8.0, 65, device="cpu")
    return bool((function(values) - F.silu(values)).abs().max() <= ROW_TOLERANCE[torch.float32])
