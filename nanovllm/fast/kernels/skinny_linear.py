"""Matrix products of few rows on a GPU, where cuBLAS takes up to twice the time of reading the weight.

Each program computes some outputs of all rows over the whole depth, so there is no reduction between programs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.fast.kernels.operators import define_operator

MAX_ROWS = 16
# For larger weights cuBLAS is near the memory bandwidth.
MAX_WEIGHT_BYTES = 16 * 2**20
_BLOCK_OUTPUTS = 16


def _kernel() -> Any:
    import triton  # part of PyTorch's GPU builds
    import triton.language as tl

    @triton.jit(do_not_specialize=["num_rows"])
    def skinny(
        states,
        weight,
        residual,
        output,
        num_rows,
        stride,
        num_outputs: tl.constexpr,
        depth: tl.constexpr,
        BLOCK_OUTPUTS: tl.constexpr,
        BLOCK_DEPTH: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        NUM_STAGES: tl.constexpr,
        ADDS: tl.constexpr,
    ):
        outputs = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
        rows = tl.arange(0, BLOCK_ROWS)
        steps = tl.arange(0, BLOCK_DEPTH)
        sums = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), tl.float32)
        for start in tl.range(0, depth, BLOCK_DEPTH, num_stages=NUM_STAGES):
            weights = tl.load(weight + outputs[:, None] * depth + (start + steps)[None, :])
            inputs = tl.load(
                states + rows[None, :] * stride + (start + steps)[:, None], mask=(rows < num_rows)[None, :], other=0.0
            )
            sums = tl.dot(weights, inputs, sums)
        places, is_there = rows[None, :] * num_outputs + outputs[:, None], (rows < num_rows)[None, :]
        if ADDS:  # the product is rounded first, as before a separate sum
            before = tl.load(residual + places, mask=is_there, other=0.0).to(tl.float32)
            sums = sums.to(output.dtype.element_ty).to(tl.float32) + before
        tl.store(output + places, sums.to(output.dtype.element_ty), mask=is_there)

    return skinny


_compiled: list[Any] = []


def _linear(states: Tensor, weight: Tensor) -> Tensor:
    """`F.linear` without a bias, for any number of rows: states [..., depth], weight [num_outputs, depth]."""
    return _skinny(states, weight, None) if _num_rows(states) <= MAX_ROWS else F.linear(states, weight)


def _linear_and_add(states: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """residual [..., num_outputs] + `linear(states, weight)`, in one kernel for few rows."""
    if residual.shape != (*states.shape[:-1], weight.shape[0]) or residual.dtype != states.dtype:
        raise ValueError(f"the residual is {residual.dtype} {[*residual.shape]}, and must be as the product is.")
    if _num_rows(states) <= MAX_ROWS:
        return _skinny(states, weight, residual.contiguous())
    return F.linear(states, weight).add_(residual)


def _fake_product(states: Tensor, weight: Tensor, *_: Tensor) -> Tensor:
    return states.new_empty(*states.shape[:-1], weight.shape[0])


linear = define_operator("nanovllm::linear", _linear, _fake_product)
linear_and_add = define_operator("nanovllm::linear_and_add", _linear_and_add, _fake_product)


def _num_rows(states: Tensor) -> int:
    return states.numel() // states.shape[-1]


def _skinny(states: Tensor, weight: Tensor, residual: Tensor | None) -> Tensor:
    num_outputs, depth = weight.shape
    num_rows = _num_rows(states)
    if not _compiled:
        _compiled.append(_kernel())
    block_depth, num_stages = (512, 3) if depth % 512 == 0 and depth >= 2048 else (128, 4)
    rows = states.reshape(num_rows, depth)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    output = states.new_empty(*states.shape[:-1], num_outputs)
    with torch.cuda.device(states.device):
        _compiled[0][(num_outputs // _BLOCK_OUTPUTS,)](
            rows, weight, output if residual is None else residual, output, num_rows, rows.stride(0), num_outputs,
            depth, _BLOCK_OUTPUTS, block_depth, 16, num_stages, residual is not None, num_warps=2,
        )  # fmt: skip
    return output


def suits(weight: Tensor) -> bool:
    """Whether `linear` supports this weight and is faster for its size."""
    num_outputs, depth = weight.shape
    return (
        weight.is_cuda
        and weight.dtype in (torch.bfloat16, torch.float16)
        and weight.nbytes <= MAX_WEIGHT_BYTES
        and num_outputs % _BLOCK_OUTPUTS == 0
        and depth % 128 == 0
    )
