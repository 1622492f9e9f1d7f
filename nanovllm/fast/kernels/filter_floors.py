"""Top-k, top-p and min-p as one floor per row, found without sorting: a search over the ordered bits of the logits.

Sums are integers (counts, or fixed-point probabilities), so a row gets the same floor in every batch. The mass of a
row is exact to 2^-26, apart from rounding of the exponential function. A mass equal to top_p has reached it.

    measure_parts    largest logit, mean and standard deviation, from parts of each row
    sum_above        counts (top-k) or mass (top-p) above pivots, per part: coarse pivots over the whole range, fine
                     ones around the expected floor of normally distributed logits
    gather           logits between the pivots next to the floor (for top-k: all above the lower pivot)
    find_floors      one program per row: the exact floor among these, by quartering the interval of keys
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PART = tl.constexpr(4096)  # tokens of a row per load; the same in every batch
_COARSE, _FINE = tl.constexpr(5), tl.constexpr(8)  # pivots
_PIVOTS = tl.constexpr(13)
_SUMS = tl.constexpr(16)  # sums per part: above each pivot, then of all tokens; a power of two
_FINE_STEP = tl.constexpr(0.07)  # standard deviations
_FEW = tl.constexpr(256)  # most candidates of a part that are placed one by one
_WARPS, _SEARCH_WARPS, _SEARCH_BLOCK = 4, 8, 2048
_PROGRAMS = 2048  # programs of a kernel over parts, at most one a part
_GATHERED_SHARE = 4  # a row's candidate list holds 1/4 of the vocabulary; with more candidates the row is searched
_NEGLIGIBLE = tl.constexpr(31.0)  # exp(-31) is 2^-44.7, zero in fixed point
_FIXED_POINT = tl.constexpr(2.0**44)  # probability 1; sums of 2^18 tokens fit into 63 bits
_INFINITY = tl.constexpr(float("inf"))
_HUGE = tl.constexpr(1e38)
FILTERS = {"top_k", "top_p", "min_p"}  # filters that `find_floors` applies
# Inputs read as scalars: their alignment within packed inputs must not cause a recompilation.
_ROW_INPUTS = ["top_k", "top_p", "min_p", "is_cold", "inverse_temperatures"]
_SHIFTS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}  # number of low zero bits, as float32


@triton.jit
def key_of(values, SHIFT: tl.constexpr):
    """int32 keys with the order of the float32 values."""
    bits = values.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def value_of(key, SHIFT: tl.constexpr):
    """The float32 value of a key."""
    low: tl.constexpr = (1 << SHIFT) - 1
    bits = (key << SHIFT) | ((key >> 31) & low)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def masses_of(levels):
    """Masses, int64 fixed point: probabilities relative to the best token's."""
    return (tl.exp(levels) * _FIXED_POINT).to(tl.int64)


@triton.jit
def weights_of(levels, by_count):
    """Weights int64: by_count 1 per token (0 for -inf), else its mass."""
    return tl.where(by_count, (levels > -_INFINITY).to(tl.int64), masses_of(levels))


@triton.jit
def row_filters(top_k, top_p, row, vocab_size):
    """(k, p, whether top-k is active, whether top-k or top-p is active)."""
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    by_count = (k > 0) & (k < vocab_size)
    return k, p, by_count, by_count | (p > 0)


@triton.jit
def row_bounds(stats, row, num_parts, WIDTH: tl.constexpr):
    """(maximum, mean, standard deviation, count) of a row's finite logits."""
    parts = tl.arange(0, WIDTH)
    at, is_part = stats + (row * num_parts + parts) * 4, parts < num_parts
    top = tl.max(tl.load(at, mask=is_part, other=-_INFINITY), axis=0)
    count = tl.maximum(tl.sum(tl.load(at + 1, mask=is_part, other=0.0), axis=0), 1.0)
    mean = tl.sum(tl.load(at + 2, mask=is_part, other=0.0), axis=0) / count
    squares = tl.sum(tl.load(at + 3, mask=is_part, other=0.0), axis=0) / count
    return top, mean, tl.sqrt(tl.maximum(squares - mean * mean, 0.0)), count


@triton.jit
def mass_to_reach(top_p, total):
    return tl.maximum(tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit(do_not_specialize_on_alignment=_ROW_INPUTS)
def measure_parts(logits, top_k, top_p, min_p, is_cold, stats, counters, stride, vocab_size, num_parts):
    """Write [maximum, count, sum, sum of squares] of each part's finite logits; clear the row's counter."""
    row = tl.program_id(0).to(tl.int64)
    _, _, _, is_searched = row_filters(top_k, top_p, row, vocab_size)
    if is_searched | (tl.load(min_p + row) > 0) | (tl.load(is_cold + row) != 0):
        for part in range(tl.program_id(1), num_parts, tl.num_programs(1)):
            tokens = part * PART + tl.arange(0, PART)
            values = tl.load(logits + row * stride + tokens, mask=tokens < vocab_size, other=-_INFINITY).to(tl.float32)
            is_finite = values > -_INFINITY
            at = stats + (row * num_parts + part) * 4
            tl.store(at, tl.max(values, axis=0))
            tl.store(at + 1, tl.sum(is_finite.to(tl.float32), axis=0))
            values = tl.where(is_finite, values, 0.0)
            tl.store(at + 2, tl.sum(values, axis=0))
            tl.store(at + 3, tl.sum(values * values, axis=0))
        if tl.program_id(1) == 0:
            tl.store(counters + row, 0)


@triton.jit
def pivot_range(top, mean, deviation, count, k, p, by_count, inverse):
    """(range of the coarse pivots below the best logit, center of the fine pivots, step between fine pivots)."""
    # Most tokens are as far below the mean as the best one is above it; tokens without mass do not count.
    reach = tl.maximum(top - mean, 0.0) * tl.where(by_count & (k < count * 0.25), 1.0, 2.0)
    reach = tl.where(by_count, reach, tl.minimum(reach, _NEGLIGIBLE / inverse))
    # Logits count as normally distributed: masses then have the same distribution with a higher mean. Tukey's quantile.
    share = tl.where(by_count, k / count, p)
    quantile = 4.91 * (tl.exp2(0.14 * tl.log2(1.0 - share)) - tl.exp2(0.14 * tl.log2(share)))
    center = mean + tl.where(by_count, 0.0, deviation * deviation * inverse) + quantile * deviation
    step = deviation * _FINE_STEP
    is_usable = (center > -_HUGE) & (center < _HUGE) & (step < 1e36)  # sums may overflow
    return tl.where(reach < _HUGE, reach, _HUGE), tl.where(is_usable, center, top), tl.where(is_usable, step, 0.0)


@triton.jit(do_not_specialize_on_alignment=_ROW_INPUTS)
def sum_above(
    logits, top_k, top_p, inverse_temperatures, stats, sums, pivots, stride, vocab_size, num_parts,
    SHIFT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write each part's sums above the row's pivots, and the pivots' keys."""
    row = tl.program_id(0).to(tl.int64)
    k, p, by_count, is_searched = row_filters(top_k, top_p, row, vocab_size)
    if is_searched:
        top, mean, deviation, count = row_bounds(stats, row, num_parts, WIDTH)
        inverse = tl.load(inverse_temperatures + row)
        reach, center, step = pivot_range(top, mean, deviation, count, k, p, by_count, inverse)
        for part in range(tl.program_id(1), num_parts, tl.num_programs(1)):
            tokens = part * PART + tl.arange(0, PART)
            values = tl.load(logits + row * stride + tokens, mask=tokens < vocab_size, other=-_INFINITY).to(tl.float32)
            levels = (values - top) * inverse
            masses = masses_of(levels)
            to = sums + (row * num_parts + part) * _SUMS
            for place in range(_PIVOTS):
                fine = center + step * (place - (_COARSE + (_FINE - 1) / 2))
                key = key_of(tl.where(place < _COARSE, top - reach * ((place + 1) / _COARSE), fine), SHIFT)
                is_above = levels >= (value_of(key, SHIFT) - top) * inverse
                if by_count:
                    tl.store(to + place, tl.sum((is_above & (levels > -_INFINITY)).to(tl.int32), axis=0).to(tl.int64))
                else:
                    tl.store(to + place, tl.sum(tl.where(is_above, masses, 0), axis=0))
                if part == 0:
                    tl.store(pivots + row * _SUMS + place, key)
            tl.store(to + _PIVOTS, tl.sum(masses, axis=0))


@triton.jit
def between_pivots(sums, pivots, k, p, by_count, top, row, num_parts, SHIFT: tl.constexpr, WIDTH: tl.constexpr):
    """(lower key, upper key, sum from the upper key on, target): the sum over tokens from a key on reaches the target
    at the lower key, and not at the upper one.
    """
    parts, places = tl.arange(0, WIDTH)[:, None], tl.arange(0, _SUMS)[None, :]
    at = sums + (row * num_parts + parts) * _SUMS + places
    totals = tl.sum(tl.load(at, mask=(parts < num_parts) & (places <= _PIVOTS), other=0), axis=0)
    places = tl.arange(0, _SUMS)
    target = k.to(tl.int64)
    if not by_count:
        target = mass_to_reach(p, tl.sum(tl.where(places == _PIVOTS, totals, 0), axis=0))
    keys = tl.load(pivots + row * _SUMS + places, mask=places < _PIVOTS, other=0)
    is_reached, is_missed = (places < _PIVOTS) & (totals >= target), (places < _PIVOTS) & (totals < target)
    lowest = key_of(tl.full([], -_INFINITY, tl.float32), SHIFT)
    low = tl.max(tl.where(is_reached, keys, lowest), axis=0)
    high = tl.minimum(tl.min(tl.where(is_missed, keys, 2147483647), axis=0), key_of(top, SHIFT) + 1)
    return low, high, tl.max(tl.where(is_missed, totals, 0), axis=0), target


@triton.jit(do_not_specialize_on_alignment=_ROW_INPUTS)
def gather(
    logits, top_k, top_p, inverse_temperatures, stats, sums, pivots, counters, candidates, stride, vocab_size,
    num_parts, capacity, SHIFT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Append the logits to search to the row's candidate list, in any order."""
    row = tl.program_id(0).to(tl.int64)
    k, p, by_count, is_searched = row_filters(top_k, top_p, row, vocab_size)
    if is_searched:
        top, _, _, _ = row_bounds(stats, row, num_parts, WIDTH)
        inverse = tl.load(inverse_temperatures + row)
        low, high, _, _ = between_pivots(sums, pivots, k, p, by_count, top, row, num_parts, SHIFT, WIDTH)
        lowest = (value_of(low, SHIFT) - top) * inverse
        takes_all = by_count | (high > key_of(top, SHIFT))
        above = tl.where(takes_all, _INFINITY, (value_of(high, SHIFT) - top) * inverse)
        for part in range(tl.program_id(1), num_parts, tl.num_programs(1)):
            tokens = part * PART + tl.arange(0, PART)
            logit = tl.load(logits + row * stride + tokens, mask=tokens < vocab_size, other=-_INFINITY)
            levels = (logit.to(tl.float32) - top) * inverse
            is_chosen = (levels >= lowest) & (levels < above) & (levels > -_INFINITY)
            count = tl.sum(is_chosen.to(tl.int32), axis=0)
            if count > _FEW:
                to = tl.atomic_add(counters + row, count) + tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
                tl.store(candidates + row * capacity + to, logit, mask=is_chosen & (to < capacity))
            elif count > 0:
                ones = tl.full((PART,), 1, tl.int32)
                to = tl.atomic_add(counters + row + tl.zeros_like(ones), ones, mask=is_chosen)
                tl.store(candidates + row * capacity + to, logit, mask=is_chosen & (to < capacity))


@triton.jit
def mass_from(source, size, lowest, top, inverse, BLOCK: tl.constexpr):
    """Mass of the logits at `source` [size] with levels of at least `lowest`."""
    mass = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, size, BLOCK):
        places = start + tl.arange(0, BLOCK)
        values = tl.load(source + places, mask=places < size, other=-_INFINITY).to(tl.float32)
        levels = (values - top) * inverse
        mass += tl.where(levels >= lowest, masses_of(levels), 0)
    return tl.sum(mass, axis=0)


@triton.jit
def search(
    source, size, low, high, base, target, by_count, top, inverse, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The largest key in [low, high) such that `base` plus the sum over logits at `source` [size] from it on reaches
    the target.
    """
    low, high = low.to(tl.int64), high.to(tl.int64)
    while high - low > 1:
        width = high - low
        key_1, key_2, key_3 = low + (width + 2) // 4, low + width // 2, low + 3 * width // 4
        least_1 = (value_of(key_1.to(tl.int32), SHIFT) - top) * inverse
        least_2 = (value_of(key_2.to(tl.int32), SHIFT) - top) * inverse
        least_3 = (value_of(key_3.to(tl.int32), SHIFT) - top) * inverse
        sums_1, sums_2, sums_3 = (
            tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64),
        )  # fmt: skip
        for start in range(0, size, BLOCK):
            places = start + tl.arange(0, BLOCK)
            values = tl.load(source + places, mask=places < size, other=-_INFINITY).to(tl.float32)
            levels = (values - top) * inverse
            weights = weights_of(levels, by_count)
            sums_1 += tl.where(levels >= least_1, weights, 0)
            sums_2 += tl.where(levels >= least_2, weights, 0)
            sums_3 += tl.where(levels >= least_3, weights, 0)
        is_1 = base + tl.sum(sums_1, axis=0) >= target
        is_2 = base + tl.sum(sums_2, axis=0) >= target
        is_3 = base + tl.sum(sums_3, axis=0) >= target
        high = tl.where(is_3, high, tl.where(is_2, key_3, tl.where(is_1, key_2, key_1)))
        low = tl.where(is_3, key_3, tl.where(is_2, key_2, tl.where(is_1, key_1, low)))
    return low.to(tl.int32)


@triton.jit(do_not_specialize_on_alignment=_ROW_INPUTS)
def find_floors(
    logits, top_k, top_p, min_p, is_cold, inverse_temperatures, stats, sums, pivots, counters, candidates,
    offsets, floors, stride, vocab_size, capacity, num_parts,
    SHIFT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write each row's offset and floor: a token is kept if (logit - offset) * inverse temperature >= floor."""
    row = tl.program_id(0).to(tl.int64)
    offset, floor = tl.full([], 0.0, tl.float32), tl.full([], -_INFINITY, tl.float32)
    k, p, by_count, is_searched = row_filters(top_k, top_p, row, vocab_size)
    share = tl.load(min_p + row)
    if is_searched | (share > 0) | (tl.load(is_cold + row) != 0):
        top, _mean, _deviation, _count = row_bounds(stats, row, num_parts, WIDTH)
        inverse = tl.load(inverse_temperatures + row)
        if (top > -_INFINITY) & (top < _INFINITY):  # rows without a finite maximum have no token
            offset = top
            if is_searched:
                low, high, base, target = between_pivots(
                    sums, pivots, k, p, by_count, top, row, num_parts, SHIFT, WIDTH
                )
                size = tl.load(counters + row)
                source = candidates + row * capacity
                if size > capacity:
                    source, size, base = logits + row * stride, vocab_size, tl.zeros_like(base)
                base = tl.where(by_count, 0, base)
                low = search(source, size, low, high, base, target, by_count, top, inverse, SHIFT, BLOCK)
                floor = (value_of(low, SHIFT) - top) * inverse
                if by_count & (p > 0):  # top-p counts the mass that top-k has left
                    target = mass_to_reach(p, mass_from(source, size, floor, top, inverse, BLOCK))
                    high, base = key_of(top, SHIFT) + 1, tl.zeros_like(base)
                    low = search(source, size, low, high, base, target, False, top, inverse, SHIFT, BLOCK)
                    floor = (value_of(low, SHIFT) - top) * inverse
            if share > 0:
                floor = tl.maximum(floor, tl.log(share))
    tl.store(offsets + row, offset)
    tl.store(floors + row, floor)


def filter_floors(logits: Tensor, inputs: Any) -> tuple[Tensor, Tensor]:
    """Offset and floor of each row: tokens with (logit - offset) / temperature below the floor are dropped.

    Args:
        logits: [num_rows, vocab_size] float32, bfloat16 or float16, rows contiguous.
        inputs: `draw.DrawTensors`.

    Returns two [num_rows] float32: 0 and -inf for rows without filters. No synchronisation, no data-dependent shapes.
    """
    launches, floors = floor_launches(logits, inputs)
    for launch in launches:
        launch()
    return floors


def floor_launches(logits: Tensor, inputs: Any) -> tuple[list[Callable[[], Any]], tuple[Tensor, Tensor]]:
    """The launches of `filter_floors`, in order, and its results; threads may compile their kernels together."""
    num_rows, vocab_size = logits.shape
    num_parts, capacity = -(-vocab_size // PART.value), -(-vocab_size // _GATHERED_SHARE)
    stats = logits.new_empty(num_rows, num_parts, 4, dtype=torch.float32)
    sums = logits.new_empty(num_rows, num_parts, _SUMS.value, dtype=torch.int64)
    pivots = logits.new_empty(num_rows, _SUMS.value, dtype=torch.int32)
    counters = logits.new_empty(num_rows, dtype=torch.int32)
    candidates = logits.new_empty(num_rows, capacity)
    offsets, floors = (logits.new_empty(num_rows, dtype=torch.float32) for _ in range(2))
    stride, shift, width = logits.stride(0), _SHIFTS[logits.dtype], 1 << (num_parts - 1).bit_length()
    k, p, inverse = inputs.top_k, inputs.top_p, inputs.inverse_temperatures
    parts = num_rows, min(num_parts, -(-_PROGRAMS // num_rows))
    some, each = (logits, k, p), {"num_warps": _WARPS}
    launches: list[Callable[[], Any]] = [
        partial(
            measure_parts[parts], *some, inputs.min_p, inputs.is_cold, stats, counters, stride, vocab_size, num_parts,
            **each,
        ),
        partial(
            sum_above[parts], *some, inverse, stats, sums, pivots, stride, vocab_size, num_parts, shift, width, **each
        ),
        partial(
            gather[parts], *some, inverse, stats, sums, pivots, counters, candidates, stride, vocab_size, num_parts,
            capacity, shift, width, **each,
        ),
        partial(
            find_floors[num_rows,], *some, inputs.min_p, inputs.is_cold, inverse, stats, sums, pivots, counters,
            candidates, offsets, floors, stride, vocab_size, capacity, num_parts, shift, width, _SEARCH_BLOCK,
            num_warps=_SEARCH_WARPS,
        ),
    ]  # fmt: skip
    return launches, (offsets, floors)
