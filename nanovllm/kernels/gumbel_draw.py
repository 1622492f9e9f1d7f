"""`draw.draw` on a GPU: the filters' floors, then two kernels; noise never touches memory.

The first finds the best score and its token in each part of each row, the second the best of the parts. Compiled code
carries values and places through every step of its reductions, which takes five times what reading the logits takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from nanovllm.kernels.bit_masks import TokenMasks, masked, with_mask
from nanovllm.kernels.filter_floors import filter_floors

_BLOCK = 2048  # tokens that a program looks at in one go
_PROGRAMS = 2048  # of the first kernel, at least: several to a multiprocessor
_MAX_PARTS = 128


@triton.jit
def mixed(bits):
    """As `noise._mixed_32`."""
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def noise_of(tokens, key, gamma):
    """Gumbel noise of token ids, as `noise.gumbel_noise` makes it."""
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    bits = mixed(mixed((tokens + 1).to(tl.uint32) * gamma.to(tl.uint32) + low) + high)
    uniform = tl.minimum(((bits >> 1).to(tl.float32) + 0.5) * (2.0**-31), 1.0 - 2.0**-24)
    # -log(1 - u), which the fast logarithm would spoil where u is small
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
    """Write the best score of each part of each row, and its token; the first logit is that of first_token.

    The token is -1 where a mask forbids all that the logits leave.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = part * part_size
    lanes = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    places = tl.full((BLOCK,), 0, tl.int32)
    key, has_noise = tl.load(noise_keys + row), tl.load(noise_scales + row) > 0
    inverse, offset, floor = tl.load(inverse_temperatures + row), tl.load(offsets + row), tl.load(floors + row)
    own_mask = tl.full([], -1, tl.int32)
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)  # of the logits as they come
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
            if is_left:  # noise takes longer than reading the logits
                score += noise_of(first_token + token, key, gamma)
        score = tl.where(score != score, float("inf"), score)  # NaN, which comparisons would pass over
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
    """Write the token of each row's best part, `non_finite` or `nothing_left`; as pairs, score bits and token."""
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
        has_filters: False where no row has any, and none is cold.
        gamma: what counters are apart, as a signed number of 32 bits.
        masks: tokens that may be drawn; of rows that have none, all.
        floors_of: logits and inputs -> offsets and floors, as `filter_floors`.

    Returns [num_rows] int64; `non_finite` where a row holds NaN or infinity, or nothing but -infinity; `nothing_left`
    where its mask forbids all tokens.
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
    """The best score of each row of a part of the vocabulary, and its token; no row has filters.

    Args:
        logits: [num_rows, width], of which the first num_tokens are those of the tokens from first_token on.

    Returns [num_rows, 2] int32: the bits of the score, a float32, and the token.
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
    """The tokens [num_rows] int64 of the best of every part's pairs [num_parts, num_rows, 2]; see `best_of_shard`."""
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
