"""Kernels between the products of a Llama-style layer and around the layers: norms, sums, gates, angles, token ids.

torch.compile makes the same kernels, after ten seconds of a start with empty caches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 1024  # elements per program of the elementwise kernels


@triton.jit
def _norm_rows(
    states, residual, weight, total, output, epsilon, SIZE: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * SIZE
    at = tl.arange(0, BLOCK)
    is_there = at < SIZE
    # The weight's load overlaps the row's, which the sum waits for.
    scale = tl.load(weight + at, mask=is_there, other=0.0).to(tl.float32)
    values = tl.load(states + row + at, mask=is_there, other=0.0).to(tl.float32)
    if ADDS:
        rounded = (values + tl.load(residual + row + at, mask=is_there, other=0.0).to(tl.float32)).to(
            total.dtype.element_ty
        )
        tl.store(total + row + at, rounded, mask=is_there)
        values = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, 0) / SIZE + epsilon)
    tl.store(output + row + at, (values * factor * scale).to(output.dtype.element_ty), mask=is_there)


@triton.jit
def _gate_rows(product, output, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = at < SIZE
    gate = tl.load(product + row * (2 * SIZE) + at, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(product + row * (2 * SIZE) + SIZE + at, mask=is_there, other=0.0).to(tl.float32)
    gated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(output + row * SIZE + at, gated.to(output.dtype.element_ty), mask=is_there)


@triton.jit(do_not_specialize_on_alignment=["positions"])  # a part of a packed step
def _turn_rows(positions, frequencies, cosines, sines, scale, HALF: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    is_there = at < HALF
    angles = tl.load(positions + row).to(tl.float32) * tl.load(frequencies + at, mask=is_there, other=0.0)
    to = row * (2 * HALF) + at
    cos, sin = (
        (tl.cos(angles) * scale).to(cosines.dtype.element_ty),
        (tl.sin(angles) * scale).to(sines.dtype.element_ty),
    )
    tl.store(cosines + to, cos, mask=is_there)
    tl.store(cosines + to + HALF, cos, mask=is_there)
    tl.store(sines + to, sin, mask=is_there)
    tl.store(sines + to + HALF, sin, mask=is_there)


@triton.jit(do_not_specialize=["num_rows", "num_sampled"], do_not_specialize_on_alignment=["token_ids"])
def _replace_sampled(token_ids, sampled, output, num_rows, num_sampled, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_there = at < num_rows
    given = tl.load(token_ids + at, mask=is_there, other=0)
    place = tl.minimum(tl.maximum(-1 - given, 0), num_sampled - 1)
    drawn = tl.maximum(tl.load(sampled + place, mask=is_there & (given < 0), other=0), 0)
    tl.store(output + at, tl.where(given < 0, drawn, given), mask=is_there)


def norm(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMS norm of rows [..., size]."""
    states, output = states.contiguous(), torch.empty_like(states, memory_format=torch.contiguous_format)
    _launch_norm(states, states, weight, output, output, epsilon, adds=False)
    return output


def add_and_norm(product: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The sum of two tensors [..., size], and its RMS norm."""
    product, residual = product.contiguous(), residual.contiguous()
    total, output = torch.empty_like(residual), torch.empty_like(residual)
    _launch_norm(product, residual, weight, total, output, epsilon, adds=True)
    return total, output


def _launch_norm(
    states: Tensor, residual: Tensor, weight: Tensor, total: Tensor, output: Tensor, epsilon: float, *, adds: bool
) -> None:
    size = states.shape[-1]
    block = 1 << (size - 1).bit_length()
    with torch.cuda.device(states.device):
        _norm_rows[(states.numel() // size,)](
            states, residual, weight, total, output, epsilon, size, block, adds,
            num_warps=min(16, max(1, block // 256)),
        )  # fmt: skip


def gated(product: Tensor) -> Tensor:
    """silu(gate) * up of a product [..., 2 * size], gate first."""
    product, size = product.contiguous(), product.shape[-1] // 2
    output = product.new_empty(*product.shape[:-1], size)
    with torch.cuda.device(product.device):
        _gate_rows[(output.numel() // size, -(-size // _ELEMENTS))](product, output, size, _ELEMENTS, num_warps=4)
    return output


def turns(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [1, num_rows, 2 * num_frequencies] of positions [1, num_rows] int64, times `scale`."""
    positions, half = positions.contiguous(), len(frequencies)
    cosines, sines = (frequencies.new_empty(*positions.shape, 2 * half, dtype=dtype) for _ in range(2))
    with torch.cuda.device(positions.device):
        _turn_rows[(positions.numel(),)](
            positions, frequencies.float(), cosines, sines, float(scale), half, 1 << (half - 1).bit_length(),
            num_warps=1,
        )  # fmt: skip
    return cosines, sines


def with_sampled(token_ids: Tensor, sampled: Tensor) -> Tensor:
    """See `model_runner.with_sampled`."""
    output = torch.empty_like(token_ids)
    with torch.cuda.device(token_ids.device):
        _replace_sampled[(-(-len(token_ids) // _ELEMENTS),)](
            token_ids, sampled, output, len(token_ids), len(sampled), _ELEMENTS, num_warps=4
        )
    return output
