"""The draw on a CPU, in C++ or torch: row by row, so that a row's noise stays in the processor's cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanovllm.core.batch import NON_FINITE
from nanovllm.sampling.draw import DrawInputs
from nanovllm.sampling.filters import FILTERS, keep_likely, least_levels
from nanovllm.sampling.noise import gumbel_noise, token_counters

if TYPE_CHECKING:
    from nanovllm.kernels.cpp_sampling import RowKernels

_UNSURE = -2  # returned by `RowKernels.draw`; -1 is NON_FINITE


def draw_on_cpu(logits: Tensor, inputs: DrawInputs, row_kernels: RowKernels | None = None) -> Tensor:
    """Tokens [num_rows] int64 of logits [num_rows, vocab_size]; NON_FINITE as in `Sampler.sample`.

    The kernels' noise differs from torch's in the last digits. If these could decide, in one row of 20,000, torch
    draws instead, so tokens do not depend on the kernels. Torch also draws rows that use a filter without a kernel.
    """
    if row_kernels is None or not row_kernels.can_read(logits):
        scores, token_ids = best_on_cpu(logits, inputs)
        return token_ids.masked_fill_(~scores.isfinite(), NON_FINITE)
    least = least_levels(torch.from_numpy(inputs.min_p))  # -inf if min-p is off
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
    """Best score and token of each row; greedy rows skip the noise, others are computed one by one.

    Args:
        logits: [num_rows, num_tokens], of the tokens from first_token on; filters require the whole vocabulary.
        largest: [num_rows] maxima over the whole vocabulary, subtracted from scores; required for a part of it.

    Returns scores [num_rows] float32, comparable between parts of a row, and tokens int64. A score is not finite for a
    row with NaN or infinity, or with -infinity alone.
    """
    own_largest, token_ids = logits.max(dim=-1)  # max propagates NaN
    largest = own_largest if largest is None else largest
    scores, token_ids = own_largest.float(), token_ids.add_(first_token)
    rows = np.flatnonzero(inputs.noise_scales).tolist()
    if rows:
        is_all = len(rows) == len(logits)
        chosen, tops = (logits, largest) if is_all else (logits[rows], largest[rows])
        levels = chosen.float() - tops[:, None].float()
        levels *= torch.from_numpy(inputs.inverse_temperatures[rows])[:, None]
        levels = keep_likely(levels, [values[rows] for values in inputs.filters])
        counters = token_counters(logits.shape[1], logits.device, first_token)
        pairs = zip(levels.split(1), torch.from_numpy(inputs.noise_keys[rows]).split(1), strict=True)
        drawn = [(row + gumbel_noise(key, counters)).max(dim=-1) for row, key in pairs]
        scores[rows] = torch.cat([best.values for best in drawn])
        token_ids[rows] = torch.cat([best.indices for best in drawn]) + first_token
    return scores, token_ids
