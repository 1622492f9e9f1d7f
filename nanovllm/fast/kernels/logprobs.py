"""Log-probabilities, ranks and top tokens of rows of logits, which are read once, in their dtype.

The first kernel computes parts of a row, the second merges them. Parts do not depend on the batch, nor do results.
Equal logits are ordered by token id.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TOP = 32  # top tokens of the first compiled version; more use another version
_PART = tl.constexpr(4096)
_PROGRAMS = 2048  # programs of the first kernel
_INFINITY = tl.constexpr(float("inf"))
_NO_KEY = tl.constexpr(-(2**63))


@triton.jit(do_not_specialize=["num_top"])
def measure_parts(logits, token_ids, stats, tops, stride, vocab_size, num_parts, num_top):
    """Write [maximum, sum of exponentials relative to it, number of tokens above the chosen one], and the top keys.

    Keys of 64 bits sort by float32 value, and equal values by descending token id.
    """
    row = tl.program_id(0).to(tl.int64)
    token = tl.maximum(tl.load(token_ids + row), 0)
    chosen = tl.load(logits + row * stride + token, mask=token < vocab_size, other=-_INFINITY).to(tl.float32)
    for part in range(tl.program_id(1), num_parts, tl.num_programs(1)):
        index = row * num_parts + part
        tokens = part * _PART + tl.arange(0, _PART)
        is_there = tokens < vocab_size
        values = tl.load(logits + row * stride + tokens, mask=is_there, other=-_INFINITY).to(tl.float32)
        largest = tl.max(values, axis=0)
        total = tl.sum(tl.exp(values - tl.where(largest > -_INFINITY, largest, 0.0)), axis=0)
        tl.store(stats + index * 4, largest)
        tl.store(stats + index * 4 + 1, total)
        tl.store(stats + index * 4 + 2, tl.sum((values > chosen).to(tl.float32), axis=0))
        bits = values.to(tl.int32, bitcast=True)
        keys = tl.where(is_there, bits ^ ((bits >> 31) & 0x7FFFFFFF), -2147483648)
        for place in range(num_top):
            best = tl.max(keys, axis=0)
            first = tl.min(tl.where(keys == best, tokens, 2147483647), axis=0)
            tl.store(tops + index * num_top + place, (best.to(tl.int64) << 32) | (0xFFFFFFFF - first.to(tl.int64)))
            keys = tl.where(tokens == first, -2147483648, keys)


@triton.jit(do_not_specialize=["num_top"])
def merge_parts(
    logits, token_ids, stats, tops, top_ids, logprobs, ranks, stride, vocab_size, num_parts, num_top,
    WIDTH: tl.constexpr, NUM_KEYS: tl.constexpr,
):  # fmt: skip
    """Write each row's token ids and log-probabilities [1 + num_top], the chosen token first, and its rank."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, WIDTH)
    at, is_part = stats + (row * num_parts + parts) * 4, parts < num_parts
    largest = tl.load(at, mask=is_part, other=-_INFINITY)
    top = tl.max(largest, axis=0)
    factors = tl.exp(largest - tl.where(top > -_INFINITY, top, 0.0))
    norm = top + tl.log(tl.sum(tl.load(at + 1, mask=is_part, other=0.0) * factors, axis=0))
    tl.store(ranks + row, tl.sum(tl.load(at + 2, mask=is_part, other=0.0), axis=0).to(tl.int64) + 1)
    token = tl.maximum(tl.load(token_ids + row), 0)
    chosen = tl.load(logits + row * stride + token, mask=token < vocab_size, other=-_INFINITY).to(tl.float32)
    to = row * (1 + num_top)
    tl.store(top_ids + to, token)
    tl.store(logprobs + to, chosen - norm)
    places = tl.arange(0, NUM_KEYS)
    num_keys = num_parts * num_top
    keys = tl.load(tops + row * num_keys + places, mask=places < num_keys, other=_NO_KEY)
    for place in range(num_top):
        best = tl.max(keys, axis=0)
        bits = (best >> 32).to(tl.int32)
        value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        tl.store(top_ids + to + 1 + place, 0xFFFFFFFF - (best & 0xFFFFFFFF))
        tl.store(logprobs + to + 1 + place, value - norm)
        keys = tl.where(keys == best, _NO_KEY, keys)


def measure(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `logprobs.Measured`.

    Args:
        logits: [num_rows, vocab_size], any float dtype.
        token_ids: [num_rows] int64.
        num_top: number of top tokens; each costs a pass over a part's keys.

    Returns token ids [num_rows, 1 + num_top] int64, log-probabilities of this shape float32, ranks [num_rows] int64.
    """
    num_rows, vocab_size = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_parts = -(-vocab_size // _PART.value)
    stats = logits.new_empty(num_rows, num_parts, 4, dtype=torch.float32)
    tops = token_ids.new_empty(num_rows, num_parts, max(1, num_top))
    top_ids = token_ids.new_empty(num_rows, 1 + num_top)
    logprobs = logits.new_empty(num_rows, 1 + num_top, dtype=torch.float32)
    ranks = token_ids.new_empty(num_rows)
    width, num_keys = triton.next_power_of_2(num_parts), triton.next_power_of_2(num_parts * max(MAX_TOP, num_top))
    stride = logits.stride(0)
    with torch.cuda.device(logits.device):
        measure_parts[num_rows, min(num_parts, -(-_PROGRAMS // num_rows))](
            logits, token_ids, stats, tops, stride, vocab_size, num_parts, num_top, num_warps=4
        )
        merge_parts[num_rows,](
            logits, token_ids, stats, tops, top_ids, logprobs, ranks, stride, vocab_size, num_parts, num_top,
            width, num_keys, num_warps=4,
        )  # fmt: skip
    return top_ids, logprobs, ranks
