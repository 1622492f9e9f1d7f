"""Draws the tokens of `sampler.draw` faster: row by row on a CPU, by kernels on either device.

On a CPU, rows stay within the cache, only those with noise take some, and filters sort no more than they need.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.batch import NON_FINITE, NOTHING_LEFT
from nanovllm.device import find_kernel
from nanovllm.sampler import (
    FILTERS,
    GAMMA_32,
    DrawInputs,
    DrawTensors,
    LogitsStage,
    Sampler,
    crossing,
    gumbel_noise,
    keep_likely_by_sort,
    least_levels,
    levels_of,
    masses,
    pieces,
    signed_32,
    token_counters,
)

if TYPE_CHECKING:
    from nanovllm.fast.kernels.cpp_sampling import RowKernels

_UNSURE = -2  # `RowKernels.draw` gives it to a row that torch must draw; -1 is NON_FINITE
NUCLEUS_WIDTH = 1024  # number of top tokens searched first
# Number of a row's largest logits that the floor of each filter needs; others need all in order.
_NUM_ORDERED: dict[str, Callable[[NDArray[Any], int], int]] = {
    "top_k": lambda k, vocab_size: int(k[k < vocab_size].max(initial=1)),
    "top_p": lambda p, vocab_size: NUCLEUS_WIDTH,
    "min_p": lambda p, vocab_size: 1,
}


def fast_sampler(**options: Any) -> Sampler:
    """A sampler with the parts that these options of `sampler_parts` give."""
    return Sampler(**sampler_parts(**options))


def sampler_parts(
    *,
    compiles: bool = False,
    row_kernels: RowKernels | None = None,
    build_stage: Callable[..., LogitsStage] | None = None,
) -> dict[str, Any]:
    """The arguments of a sampler that draws by these forms.

    Args:
        compiles: use our GPU kernels.
        row_kernels: C++ kernels for CPUs.
        build_stage: builder of the stage, called with `by_kernels` and `row_kernels`; None for plain requests alone.
    """
    parts: dict[str, Any] = {"draw_on_cpu": partial(draw_on_cpu, row_kernels=row_kernels)}
    if build_stage is not None:
        parts["stage"] = build_stage(by_kernels=compiles, row_kernels=row_kernels)
    kernel = find_kernel("gumbel_draw", "draw_on_gpu") if compiles else None
    if kernel is not None:
        parts["draw"] = partial(kernel, gamma=signed_32(GAMMA_32), non_finite=NON_FINITE, nothing_left=NOTHING_LEFT)
        if FILTERS.keys() - (find_kernel("filter_floors", "FILTERS") or ()):
            parts["draw"] = partial(parts["draw"], floors_of=floors_by_sort)
    return parts


def floors_by_sort(logits: Tensor, inputs: DrawTensors) -> tuple[Tensor, Tensor]:
    """`fast.kernels.filter_floors.filter_floors` in torch, for filters without a kernel."""
    offsets = []
    floors = []
    for rows, own in pieces(logits, inputs):
        levels, own_offsets = levels_of(rows, own)
        offsets.append(own_offsets)
        floors.append(keep_likely_by_sort(levels, own.filters)[:, 0])
    return torch.cat(offsets), torch.cat(floors)


def draw_on_cpu(logits: Tensor, inputs: DrawInputs, row_kernels: RowKernels | None = None) -> Tensor:
    """Tokens [num_rows] int64 of logits [num_rows, vocab_size]; NON_FINITE as in `Sampler.sample`.

    The kernels' noise differs from torch's in its last digits. Where these might decide, one row in twenty thousand,
    torch draws, so the tokens are the same with and without kernels. So it does for rows with a filter that
    they lack.
    """
    if row_kernels is None or not row_kernels.can_read(logits):
        scores, token_ids = best_on_cpu(logits, inputs)
        return token_ids.masked_fill_(~scores.isfinite(), NON_FINITE)
    least = least_levels(torch.from_numpy(inputs.min_p))  # -inf where it is off
    token_ids = torch.from_numpy(row_kernels.draw(logits, inputs, least))
    is_left = token_ids.numpy() == _UNSURE
    for name in FILTERS.keys() - row_kernels.filters:
        is_left |= getattr(inputs, name) != 0
    rows = np.flatnonzero(is_left)
    if len(rows):
        token_ids[rows] = draw_on_cpu(logits[rows], DrawInputs(*(values[rows] for values in inputs)))
    return token_ids


def best_on_cpu(
    logits: Tensor, inputs: DrawInputs, *, largest: Tensor | None = None, first_token: int = 0
) -> tuple[Tensor, Tensor]:
    """The best score of each row and its token; only rows that are not greedy take noise, row by row within the cache.

    Args:
        logits: [num_rows, num_tokens], of the tokens from first_token on; where some are missing, no row has filters.
        largest: [num_rows] of each whole row, which scores count from, where some of its tokens are missing.

    Returns scores [num_rows] float32, which compare with those of the same row's other tokens, and tokens int64. A
    score is not finite where a row holds NaN or infinity, or nothing but -infinity.
    """
    own_largest, token_ids = logits.max(dim=-1)  # max passes a NaN on
    largest = own_largest if largest is None else largest
    scores = own_largest.float()
    token_ids = token_ids.add_(first_token)
    rows = np.flatnonzero(inputs.noise_scales).tolist()
    if rows:
        is_all = len(rows) == len(logits)
        chosen, tops = (logits, largest) if is_all else (logits[rows], largest[rows])
        levels = chosen.float() - tops[:, None].float()
        levels *= torch.from_numpy(inputs.inverse_temperatures[rows])[:, None]
        levels = keep_likely(levels, [values[rows] for values in inputs.filters])
        counters = token_counters(first_token + logits.shape[1], logits.device)[first_token:]
        pairs = zip(levels.split(1), torch.from_numpy(inputs.noise_keys[rows]).split(1), strict=True)
        drawn = [(row + gumbel_noise(key, counters)).max(dim=-1) for row, key in pairs]
        scores[rows] = torch.cat([best.values for best in drawn])
        token_ids[rows] = torch.cat([best.indices for best in drawn]) + first_token
    return scores, token_ids


def total_masses(logits: Tensor, largest: Tensor) -> Tensor:
    """Sums of the masses of logits [num_rows, vocab_size] float32 relative to their largest [num_rows, 1].

    Returns [num_rows, 1] float64.
    """
    if logits.device.type != "cpu" or len(logits) <= 1:
        return masses(logits - largest).sum(dim=-1, keepdim=True)
    pairs = zip(logits.split(1), largest.split(1), strict=True)  # single rows stay in the processor's cache
    return torch.cat([total_masses(row, top) for row, top in pairs])


def keep_likely(logits: Tensor, inputs: list[NDArray[Any]]) -> Tensor:
    """Set logits of unlikely tokens to -inf, filter by filter, as in `transformers`; on a CPU.

    Tokens as probable as the last kept one are kept too. A filter costs nothing for rows that do not use it.

    Args:
        logits: [num_rows, vocab_size] float32, after the temperature; overwritten.
        inputs: [num_rows] of each filter.
    """
    for (name, stage), values in zip(FILTERS.items(), inputs, strict=True):
        rows = np.flatnonzero(values)
        if len(rows):
            is_all = len(rows) == len(logits)
            values = values[rows]
            own = logits if is_all else logits[rows]
            vocab_size = own.shape[1]
            options = torch.from_numpy(values)[:, None]
            num_ordered = _NUM_ORDERED[name](values, vocab_size) if name in _NUM_ORDERED else vocab_size
            ordered = own.topk(min(num_ordered, vocab_size)).values
            floor = _nucleus_floor(own, ordered, options) if name == "top_p" else stage.floor(ordered, options)
            own.masked_fill_(own < floor, -torch.inf)
            if not is_all:
                logits[rows] = own
    return logits


def _nucleus_floor(logits: Tensor, ordered: Tensor, top_p: Tensor) -> Tensor:
    """The floor of top_p, by some of the largest logits where these are enough: a nucleus is nearly always small."""
    top = ordered[:, :1]
    target = total_masses(logits, top) * top_p
    floor, is_reached = crossing(ordered, target)
    # On a CPU top-k costs a tenth of a sort.
    if ordered.shape[1] < logits.shape[1] and not is_reached.all():
        rows = (~is_reached[:, 0]).nonzero()[:, 0]
        floor[rows] = crossing(logits[rows].sort(dim=-1, descending=True).values, target[rows])[0]
    return floor
