"""`draw.draw` on a GPU: the filters' floors, then two kernels; noise stays in registers.

The first finds the best score and its token in each part of a row, the second the best part. torch.compile carries
values and indices through every reduction step, which takes five times as long as reading the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from nanovllm.fast.kernels.bit_masks import TokenMasks, masked, with_mask
from nanovllm.fast.kernels.filter_floors import filter_floors

_BLOCK = 2048  # tokens per load of a program
_PROGRAMS = 2048  # fewest of the first kernel: several per multiprocessor
_MAX_PARTS = 128


@triton.jit
def mixed(bits):
    """Same as `noise._mixed_32`."""
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def noise_of(tokens, key, gamma):
    """Gumbel noise of token ids, as `noise.gumbel_noise`."""
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    bits = mixed(mixed((tokens + 1).to(tl.uint32) * gamma.to(tl.uint32) + low) + high)
    uniform = tl.minimum(((bits >> 1).to(tl.float32) + 0.5) * (2.0**-31), 1.0 - 2.0**-24)
    # -log(1 - u) as a series, since the fast logarithm is inexact for small u
    small = uniform * (1.0 + uniform * (0.5 + uniform * (1.0 / 3 + uniform * 0.25)))
    exponential = tl.where(uniform < 2.0**-6, small, -libdevice.fast_logf(1.0 - uniform))
    return -libdevice.fast_logf(exponential)


@triton.jit(
    do_not_specialize=["num_words"],
    do_not_specialize_on_alignment=["noise_keys", "inverse_temperatures", "noise_scales", "mask_rows", "masks"],
)
def best_of_parts(
    logits, noise_keys, inverse_temperatures, noise_scales, offsets, floors, mask_rows, masks, scores, tokens,
    stride, num_words, vocab_size, part_size, first_token, gamma,
    HAS_MASKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the best score of each part of each row, and its token; first_token is the token of the first logit.

    The token is -1 where the mask forbids all remaining tokens.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = part * part_size
    lanes = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    places = tl.full((BLOCK,), 0, tl.int32)
    key, has_noise = tl.load(noise_keys + row), tl.load(noise_scales + row) > 0
    inverse, offset, floor = tl.load(inverse_temperatures + row), tl.load(offsets + row), tl.load(floors + row)
    own_mask = tl.full([], -1, tl.int32)
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)  # maximum of the raw logits
    if HAS_MASKS:
        own_mask = tl.load(mask_rows + row)
    for first in range(start, tl.minimum(start + part_size, vocab_size), BLOCK):
        token = first + lanes
        score = tl.load(logits + row * stride + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        if HAS_MASKS:  # noqa: SIM102 (decided when compiled)
            if own_mask >= 0:
                highest = tl.maximum(highest, score)
                score = with_mask(score, masks + own_mask.to(tl.int64) * num_words, token, vocab_size)
        if has_noise:
            score = (score - offset) * inverse
            score = tl.where(score < floor, float("-inf"), score)
            is_left = (floor == float("-inf")) & (own_mask < 0)
            if (floor > float("-inf")) | (own_mask >= 0):
                is_left = tl.max(score, axis=0) > float("-inf")
            if is_left:  # skips the noise, which takes longer than reading the logits
                score += noise_of(first_token + token, key, gamma)
        score = tl.where(score != score, float("inf"), score)  # comparisons would ignore NaN
        is_better = score > best
        best = tl.where(is_better, score, best)
        places = tl.where(is_better, token, places)
    top = tl.max(best, axis=0)
    tl.store(scores + row * tl.num_programs(1) + part, top)
    place = tl.min(tl.where(best == top, places, vocab_size), axis=0)
    if HAS_MASKS:
        is_emptied = (top == float("-inf")) & (tl.max(highest, axis=0) > float("-inf"))
        place = tl.where(is_emptied, -1 - first_token, place)
    tl.store(tokens + row * tl.num_programs(1) + part, first_token + place)


@triton.jit(do_not_specialize=["num_parts", "row_stride", "part_stride"])
def best_of_rows(
    scores, tokens, output, num_parts, row_stride, part_stride, non_finite, nothing_left,
    AS_PAIRS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the token of each row's best part, `non_finite` or `nothing_left`; AS_PAIRS: (score bits, token)."""
    row = tl.program_id(0)
    parts = tl.arange(0, WIDTH)
    places = row * row_stride + parts * part_stride
    score = tl.load(scores + places, mask=parts < num_parts, other=float("-inf"))
    token = tl.load(tokens + places, mask=parts < num_parts, other=0)
    top = tl.max(score, axis=0)
    place = tl.min(tl.where((score == top) & (parts < num_parts), token, 2147483647), axis=0)
    if AS_PAIRS:
        tl.store(output + 2 * row, top.to(tl.int32, bitcast=True))
        tl.store(output + 2 * row + 1, place)
    else:
        is_finite = (top > float("-inf")) & (top < float("inf"))
        none = tl.where(place < 0, nothing_left, non_finite)
        tl.store(output + row, tl.where(is_finite, place, none).to(tl.int64))


def draw_on_gpu(
    logits: Tensor, inputs: Any, *, gamma: int, non_finite: int, nothing_left: int, has_filters: bool = True,
    masks: TokenMasks | None = None, floors_of: Callable[[Tensor, Any], tuple[Tensor, Tensor]] = filter_floors,
) -> Tensor:  # fmt: skip
    """See `draw.draw`.

    Args:
        logits: [num_rows, vocab_size], any float dtype.
        inputs: `draw.DrawTensors`.
        has_filters: False if no row has filters, and none is cold.
        gamma: increment between counters of the noise, as a signed 32-bit number.
        masks: bitmasks of allowed tokens; rows without a mask allow all.
        floors_of: logits and inputs -> offsets and floors, as `filter_floors`.

    Returns [num_rows] int64; `non_finite` for a row with NaN or infinity, or only -infinity; `nothing_left` if its mask
    forbids all tokens.
    """
    output = logits.new_empty(len(logits), dtype=torch.int64)
    with torch.cuda.device(logits.device):
        if has_filters:
            offsets, floors = floors_of(logits if masks is None else masked(logits, masks), inputs)
        else:
            offsets, floors = _no_filters(inputs)
        scores, tokens = _best_of_parts(logits, inputs, offsets, floors, gamma=gamma, masks=masks)
        num_parts = scores.shape[1]
        best_of_rows[len(logits),](
            scores, tokens, output, num_parts, num_parts, 1, non_finite, nothing_left,
            AS_PAIRS=False, WIDTH=_MAX_PARTS, num_warps=1,
        )  # fmt: skip
    return output


def best_of_shard(logits: Tensor, inputs: Any, *, gamma: int, first_token: int, num_tokens: int) -> Tensor:
    """Best score and token of each row over a shard of the vocabulary; without filters.

    Args:
        logits: [num_rows, width]; the first num_tokens belong to the tokens from first_token on.

    Returns [num_rows, 2] int32: bits of the float32 score, token.
    """
    pairs = logits.new_empty(len(logits), 2, dtype=torch.int32)
    with torch.cuda.device(logits.device):
        scores, tokens = _best_of_parts(
            logits, inputs, *_no_filters(inputs), gamma=gamma, first_token=first_token, num_tokens=num_tokens
        )
        num_parts = scores.shape[1]
        best_of_rows[len(logits),](
            scores, tokens, pairs, num_parts, num_parts, 1, 0, 0, AS_PAIRS=True, WIDTH=_MAX_PARTS, num_warps=1
        )
    return pairs


def best_of_pairs(pairs: Tensor, *, non_finite: int) -> Tensor:
    """Tokens [num_rows] int64 of the best pairs among all shards' [num_parts, num_rows, 2]; see `best_of_shard`."""
    num_parts, num_rows, _ = pairs.shape
    output = pairs.new_empty(num_rows, dtype=torch.int64)
    flat = pairs.view(-1)
    with torch.cuda.device(pairs.device):
        best_of_rows[num_rows,](
            flat.view(torch.float32), flat[1:], output, num_parts, 2, 2 * num_rows, non_finite, non_finite,
            AS_PAIRS=False, WIDTH=_MAX_PARTS, num_warps=1,
        )  # fmt: skip
    return output


def _no_filters(inputs: Any) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(inputs.noise_scales), torch.full_like(inputs.noise_scales, -torch.inf)


def _best_of_parts(
    logits: Tensor, inputs: Any, offsets: Tensor, floors: Tensor, *, gamma: int, first_token: int = 0,
    num_tokens: int | None = None, masks: TokenMasks | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Scores [num_rows, num_parts] float32 and tokens int32."""
    num_rows, vocab_size = len(logits), logits.shape[1] if num_tokens is None else num_tokens
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    blocks = max(1, -(-vocab_size // _BLOCK))
    num_parts = min(blocks, _MAX_PARTS, -(-_PROGRAMS // num_rows))
    part_size = -(-blocks // num_parts) * _BLOCK
    num_parts = max(1, -(-vocab_size // part_size))
    scores = logits.new_empty(num_rows, num_parts, dtype=torch.float32)
    tokens = logits.new_empty(num_rows, num_parts, dtype=torch.int32)
    rows, words, num_words = (tokens, tokens, 0) if masks is None else (*masks, masks.words.stride(0))
    best_of_parts[num_rows, num_parts](
        logits, inputs.noise_keys, inputs.inverse_temperatures, inputs.noise_scales, offsets, floors, rows, words,
        scores, tokens, logits.stride(0), num_words, vocab_size, part_size, first_token, gamma,
        HAS_MASKS=masks is not None, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    return scores, tokens
