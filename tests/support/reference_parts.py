"""Kernels between a layer's products in plain PyTorch: the references of `fast/kernels/layer_parts.py`."""

import torch
import torch.nn.functional as F


def norm(states, weight, epsilon):
    factor = (states.double().square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (states.double() * factor * weight.double()).to(states.dtype)


def add_and_norm(product, residual, weight, epsilon):
    return product + residual, norm(product + residual, weight, epsilon)


def gated(product):
    gate, up = product.double().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(product.dtype)


def turns(positions, frequencies, scale, dtype):
    angles = positions[..., None].float() * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


PARTS = {"norm": norm, "add_and_norm": add_and_norm, "gated": gated, "turns": turns}
