"""Kernels between a layer's products in plain PyTorch: the references of `fast/kernels/layer_parts.py`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def norm(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    factor = (states.double().square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (states.double() * factor * weight.double()).to(states.dtype)


def add_and_norm(product: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    return product + residual, norm(product + residual, weight, epsilon)


def gated(product: Tensor) -> Tensor:
    gate, up = product.double().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(product.dtype)


def turns(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = positions[..., None].float() * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


PARTS: dict[str, Any] = {"norm": norm, "add_and_norm": add_and_norm, "gated": gated, "turns": turns}
