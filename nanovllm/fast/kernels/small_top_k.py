"""The largest scores of short rows, such as a router's over its experts. PyTorch sorts each row, in two kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_SCORES, MAX_CHOSEN = 512, 16


@triton.jit
def _choose(scores, values, indices, num_scores: tl.constexpr, COUNT: tl.constexpr, SCORES: tl.constexpr):
    """The COUNT largest scores of this program's row, in order; the first of equal ones."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, SCORES)
    left = tl.load(scores + row * num_scores + places, mask=places < num_scores, other=-float("inf")).to(tl.float32)
    left = tl.where(left == left, left, float("inf"))  # NaN is the largest, as in PyTorch
    is_left = places < num_scores
    for at in tl.static_range(COUNT):
        best = tl.max(tl.where(is_left, left, -float("inf")), 0)
        place = tl.min(tl.where(is_left & (left == best), places, SCORES), 0)
        tl.store(values + row * COUNT + at, tl.load(scores + row * num_scores + place))
        tl.store(indices + row * COUNT + at, place.to(tl.int64))
        is_left &= places != place


@torch.library.custom_op("nanovllm::small_top_k", mutates_args=())
def small_top_k(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row of scores [..., num_scores], in order, and their places (int64).

    Of equal scores the first come first; NaN is the largest.
    """
    num_scores = scores.shape[-1]
    scores = scores.contiguous()
    values = scores.new_empty(*scores.shape[:-1], count)
    indices = torch.empty_like(values, dtype=torch.int64)
    with torch.cuda.device(scores.device):
        _choose[(scores.numel() // num_scores,)](
            scores, values, indices, num_scores, count, triton.next_power_of_2(num_scores), num_warps=1
        )
    return values, indices


@small_top_k.register_fake
def _(scores, count):
    values = scores.new_empty(*scores.shape[:-1], count)
    return values, torch.empty_like(values, dtype=torch.int64)
