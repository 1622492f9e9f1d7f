"""`sampler.draw` as two GPU kernels: the logits are read once, and noise never touches memory.

The first finds the best score and its token in each part of each row, the second the best of the parts. Compiled code
carries values and places through every step of its reductions, which takes five times what reading the logits takes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_BLOCK = 2048  # tokens that a program looks at in one go
_PROGRAMS = 2048  # of the first kernel, at least: several to a multiprocessor
_MAX_PARTS = 128


def _kernels() -> tuple[Any, Any]:
    import triton  # comes with PyTorch where it is built for GPUs
    import triton.language as tl
    from triton.language.extra import libdevice

    @triton.jit
    def mixed(bits):  # as `sampler._mixed_32`
        bits = (bits ^ (bits >> 16)) * 0x7FEB352D
        bits = (bits ^ (bits >> 15)) * 0x846CA68B
        return bits ^ (bits >> 16)

    @triton.jit
    def best_of_parts(
        logits,
        noise_keys,
        inverse_temperatures,
        noise_scales,
        scores,
        tokens,
        stride,
        vocab_size,
        part_size,
        gamma,
        BLOCK: tl.constexpr,
    ):
        row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
        start = part * part_size
        lanes = tl.arange(0, BLOCK)
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        places = tl.full((BLOCK,), 0, tl.int32)
        key = tl.load(noise_keys + row)
        low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
        inverse, has_noise = tl.load(inverse_temperatures + row), tl.load(noise_scales + row) > 0
        for first in range(start, tl.minimum(start + part_size, vocab_size), BLOCK):
            token = first + lanes
            score = tl.load(logits + row * stride + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
            score = tl.where(score != score, float("inf"), score)  # NaN, which comparisons would pass over
            if has_noise:  # it takes longer than reading the logits
                bits = mixed(mixed((token + 1).to(tl.uint32) * gamma.to(tl.uint32) + low) + high)
                uniform = tl.minimum(((bits >> 1).to(tl.float32) + 0.5) * (2.0**-31), 1.0 - 2.0**-24)
                # -log(1 - u), which the fast logarithm would spoil where u is small
                small = uniform * (1.0 + uniform * (0.5 + uniform * (1.0 / 3 + uniform * 0.25)))
                exponential = tl.where(uniform < 2.0**-6, small, -libdevice.fast_logf(1.0 - uniform))
                score = score * inverse - libdevice.fast_logf(exponential)
            is_better = score > best
            best = tl.where(is_better, score, best)
            places = tl.where(is_better, token, places)
        top = tl.max(best, axis=0)
        tl.store(scores + row * tl.num_programs(1) + part, top)
        tl.store(tokens + row * tl.num_programs(1) + part, tl.min(tl.where(best == top, places, vocab_size), axis=0))

    @triton.jit
    def best_of_rows(scores, tokens, output, num_parts, non_finite, WIDTH: tl.constexpr):
        row = tl.program_id(0)
        parts = tl.arange(0, WIDTH)
        score = tl.load(scores + row * num_parts + parts, mask=parts < num_parts, other=float("-inf"))
        token = tl.load(tokens + row * num_parts + parts, mask=parts < num_parts, other=0)
        top = tl.max(score, axis=0)
        place = tl.min(tl.where((score == top) & (parts < num_parts), token, 2147483647), axis=0).to(tl.int64)
        is_finite = (top > float("-inf")) & (top < float("inf"))
        tl.store(output + row, tl.where(is_finite, place, non_finite))

    return best_of_parts, best_of_rows


_compiled: list[Any] = []


def draw_on_gpu(
    logits: Tensor,
    noise_keys: Tensor,
    inverse_temperatures: Tensor,
    noise_scales: Tensor,
    *,
    gamma: int,
    non_finite: int,
) -> Tensor:
    """See `sampler.draw`.

    Args:
        logits: [num_rows, vocab_size], any float dtype.
        noise_keys: [num_rows] int64.
        inverse_temperatures, noise_scales: [num_rows] float32.
        gamma: what counters are apart, as a signed number of 32 bits.

    Returns [num_rows] int64; `non_finite` where a row holds NaN or infinity, or nothing but -infinity.
    """
    if not _compiled:
        _compiled.extend(_kernels())
    best_of_parts, best_of_rows = _compiled
    num_rows, vocab_size = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    blocks = -(-vocab_size // _BLOCK)
    num_parts = min(blocks, _MAX_PARTS, -(-_PROGRAMS // num_rows))
    part_size = -(-blocks // num_parts) * _BLOCK
    num_parts = -(-vocab_size // part_size)
    scores = logits.new_empty(num_rows, num_parts, dtype=torch.float32)
    tokens = logits.new_empty(num_rows, num_parts, dtype=torch.int32)
    output = logits.new_empty(num_rows, dtype=torch.int64)
    with torch.cuda.device(logits.device):
        best_of_parts[num_rows, num_parts](
            logits, noise_keys, inverse_temperatures, noise_scales, scores, tokens, logits.stride(0), vocab_size,
            part_size, gamma, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
        width = 1 << (num_parts - 1).bit_length()
        best_of_rows[num_rows,](scores, tokens, output, num_parts, non_finite, WIDTH=width, num_warps=1)
    return output
