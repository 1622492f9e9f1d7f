"""Token bit masks on a GPU: applied within the draw, or added to the logits before other stages read them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_PART = tl.constexpr(4096)  # logits


class TokenMasks(NamedTuple):
    """Allowed tokens of rows of logits.

    rows: [at least num_rows] int32, index of each row's mask; -1 for no mask, at no cost.
    words: [num_masks, num_words] int32; bit i % 32 of word i // 32 is 1 if token i is allowed.
    """

    rows: Tensor
    words: Tensor


@triton.jit
def with_mask(values, mask, tokens, vocab_size):
    """Logits with -inf added to forbidden tokens: NaN stays NaN, and infinity becomes NaN."""
    words = tl.load(mask + (tokens >> 5), mask=tokens < vocab_size, other=-1)
    return values + tl.where(((words >> (tokens & 31)) & 1) != 0, 0.0, float("-inf"))


@triton.jit(do_not_specialize=["num_words"], do_not_specialize_on_alignment=["mask_rows", "masks"])
def add_masks(logits, output, mask_rows, masks, stride, output_stride, num_words, vocab_size, IN_PLACE: tl.constexpr):
    """Write masked logits; in place, rows without a mask are skipped."""
    row = tl.program_id(0).to(tl.int64)
    own_mask = tl.load(mask_rows + row)
    if (own_mask >= 0) | (IN_PLACE == 0):
        tokens = tl.program_id(1) * _PART + tl.arange(0, _PART)
        is_there = tokens < vocab_size
        values = tl.load(logits + row * stride + tokens, mask=is_there, other=0.0).to(tl.float32)
        if own_mask >= 0:
            values = with_mask(values, masks + own_mask.to(tl.int64) * num_words, tokens, vocab_size)
        tl.store(output + row * output_stride + tokens, values, mask=is_there)


def masked(logits: Tensor, masks: TokenMasks) -> Tensor:
    """A copy of logits [num_rows, vocab_size], in their dtype, with -inf for forbidden tokens."""
    output = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _add(logits, output, masks)
    return output


def mask_in_place(logits: Tensor, masks: TokenMasks) -> None:
    """Add -inf to logits [num_rows, vocab_size] of forbidden tokens."""
    _add(logits, logits, masks)


def _add(logits: Tensor, output: Tensor, masks: TokenMasks) -> None:
    vocab_size = logits.shape[1]
    with torch.cuda.device(logits.device):
        add_masks[len(logits), -(-vocab_size // _PART.value)](
            logits, output, *masks, logits.stride(0), output.stride(0), masks.words.stride(0), vocab_size,
            IN_PLACE=int(output is logits), num_warps=8,
        )  # fmt: skip
