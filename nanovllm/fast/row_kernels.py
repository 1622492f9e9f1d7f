"""Loads the C++ sampling kernels for CPUs, and compares them with torch's operations before any step."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanovllm.device import find_kernel
from nanovllm.errors import KernelBuildError
from nanovllm.fast.fast_draws import draw_on_cpu
from nanovllm.sampler import FILTERS, DrawInputs, masses, noise_keys

if TYPE_CHECKING:
    from nanovllm.fast.kernels.cpp_sampling import RowKernels

logger = logging.getLogger("nanovllm")

_NUM_ROWS = 3 + len(FILTERS)
_VOCAB_SIZE = 333


def load_row_kernels() -> RowKernels | None:
    """The C++ sampling kernels for CPUs; None, with a log line, if they cannot be built or are wrong here.

    Raises ProcessorClassError.
    """
    load = find_kernel("cpp_sampling", "load_row_kernels")
    if load is None:
        return None
    try:
        row_kernels: RowKernels = load()
        wrong = first_wrong(row_kernels)
    except KernelBuildError as error:
        wrong = str(error)
    if wrong is None:
        return row_kernels
    logger.warning("sampling takes torch's operations: the C++ kernels are unavailable: %s", wrong)
    return None


def first_wrong(row_kernels: RowKernels) -> str | None:
    """Text that names the first difference from torch on small rows, None if there is none; takes milliseconds."""
    generator = torch.Generator("cpu").manual_seed(0)
    logits = 3 * torch.randn(_NUM_ROWS, _VOCAB_SIZE, generator=generator, dtype=torch.float32, device="cpu")
    checks = {
        "draw other tokens": _draws_the_same(row_kernels, logits),
        "measure other log-probabilities": _measures_the_same(row_kernels, logits),
        "penalise or mask otherwise": _changes_the_same(row_kernels, logits),
    }
    return next((f"they {what} on this processor" for what, is_right in checks.items() if not is_right), None)


def _draws_the_same(row_kernels: RowKernels, logits: Tensor) -> bool:
    """Whether greedy draws, draws at a temperature and draws with each filter agree."""
    rows = np.arange(_NUM_ROWS)
    ones = np.ones(_NUM_ROWS, np.float32)
    filters = [
        ((40 if stage.dtype is np.int32 else 0.3) * (rows == row)).astype(stage.dtype)
        for row, stage in enumerate(FILTERS.values(), 2)
    ]
    noise = noise_keys(rows.tolist(), [7] * _NUM_ROWS), ones, (rows > 0).astype(np.float32)
    inputs = DrawInputs(*noise, *filters, np.zeros(_NUM_ROWS, np.int32))
    return torch.equal(draw_on_cpu(logits, inputs, row_kernels), draw_on_cpu(logits, inputs))


def _measures_the_same(row_kernels: RowKernels, logits: Tensor) -> bool:
    top = logits.topk(3)
    measured = row_kernels.measure(logits, top.indices[:, 2], 3)
    beside = masses(logits - top.values[:, :1])
    if measured is None or not torch.equal(row_kernels.masses(logits[0] - top.values[0, 0]), beside[0]):
        return False
    top_ids, largest, totals, ranks = measured
    return (
        torch.equal(top_ids, top.indices)
        and torch.equal(largest, top.values[:, 0])
        and torch.equal(totals, beside.sum(dim=-1))
        and ranks.tolist() == [3] * _NUM_ROWS
    )


def _changes_the_same(row_kernels: RowKernels, logits: Tensor) -> bool:
    """Tests a repetition penalty of 2 on a row's largest and smallest logit, and a mask that allows 32 tokens."""
    own = logits.clone()
    expected = logits.clone()
    tokens = [int(logits[1].argmax()), int(logits[1].argmin())]
    entry = np.array([[1, 0, 2, 2, -1, *np.array([2, 0, 0], np.float32).view(np.int32)]], np.int32)
    given = [torch.from_numpy(array) for array in (entry, np.array(tokens, np.int32), np.zeros(1, np.int64))]
    row_kernels.penalise(own, *given)
    expected[1, tokens[0]] /= 2  # a penalty of 2 divides a positive logit
    expected[1, tokens[1]] *= 2  # the penalty multiplies a negative one
    masks = np.zeros((1, -(-_VOCAB_SIZE // 32)), np.int32)
    masks[0, 0] = -1
    row_kernels.keep_bits(own, [2], masks)
    expected[2, 32:] = -torch.inf
    return torch.equal(own, expected)
