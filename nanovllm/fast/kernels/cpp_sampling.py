"""Sampling kernels for CPUs (`csrc/sampling/`): rows in parallel, compiled once per processor."""

from __future__ import annotations

import os
from ctypes import c_int, c_int64, c_void_p
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.fast.kernels.cpp import SOURCES, built_library, compiled_targets, open_library

MAX_VOCAB_SIZE = 2**19  # sums of masses are exact up to this size
_TYPES = (torch.float32, torch.bfloat16)
# Argument types of the functions, which the sources describe.
_SIGNATURES = {
    "draw": [c_void_p, c_int, c_int64, *[c_void_p] * 7, c_int64, c_int64, c_int],
    "penalise": [c_void_p, c_int64, *[c_void_p] * 3, c_int64, c_int64, c_int],
    "measure": [c_void_p, c_int, c_int64, c_void_p, c_int64, *[c_void_p] * 5, c_int64, c_int64, c_int],
    "keep_bits": [c_void_p] * 3 + [c_int64] * 3 + [c_int],
    "masses": [c_void_p, c_void_p, c_int64],
}


class RowKernels:
    """Functions of the compiled library. They read CPU logits [num_rows, vocab_size] with contiguous rows."""

    filters: ClassVar = {"top_k", "top_p", "min_p"}  # filters that `draw` applies

    def __init__(self, library: Path) -> None:
        self._functions = open_library(library, _SIGNATURES)
        self._process_id = os.getpid()

    def can_read(self, logits: Tensor) -> bool:
        return logits.dtype in _TYPES and logits.stride(1) == 1 and logits.shape[1] <= MAX_VOCAB_SIZE

    def draw(self, logits: Tensor, inputs: Any, least_levels: Tensor) -> NDArray[np.int64]:
        """Tokens [num_rows]; -1: the row is not finite, -2: the result depends on torch's rounding of the noise.

        Args:
            logits: float32 or bfloat16.
            inputs: `draw.DrawInputs`.
            least_levels: [num_rows] float32, the smallest level that min-p keeps; -inf keeps all.
        """
        tokens = np.empty(len(logits), np.int64)
        given = inputs.noise_keys, inputs.inverse_temperatures, inputs.noise_scales, inputs.top_k, inputs.top_p
        arrays = [np.ascontiguousarray(values) for values in given]  # keeps the memory alive during the call
        self._functions.draw(
            *_as_read(logits), *(values.ctypes.data for values in arrays), least_levels.data_ptr(),
            tokens.ctypes.data, *logits.shape, self._num_threads(),
        )  # fmt: skip
        return tokens

    def penalise(self, logits: Tensor, entries: Tensor, tokens: Tensor, previous: Tensor) -> None:
        """Same as `fast.kernels.penalties.penalise`."""
        if logits.stride(1) != 1:
            raise ValueError("penalise needs logits that are adjacent in a row.")
        self._functions.penalise(
            logits.data_ptr(), logits.stride(0), entries.data_ptr(), tokens.data_ptr(), previous.data_ptr(),
            len(entries), logits.shape[1], self._num_threads(),
        )  # fmt: skip

    def measure(self, logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """Statistics of each row for logprobs; None if a row's largest logit is not finite.

        Args:
            logits: float32 or bfloat16.
            token_ids: [num_rows] int64, at least 0; vocab_size and above for tokens without a logit.

        Returns token ids of the num_top largest logits [num_rows, num_top] int64, lower ids first among equal logits;
        and per row [num_rows]: the largest logit (float32), the mass of all tokens relative to it (float64), and the
        rank of the row's token.
        """
        num_rows = len(logits)
        largest = logits.new_empty(len(logits), dtype=torch.float32)
        masses = largest.new_empty(num_rows, dtype=torch.float64)
        is_sound = np.empty(num_rows, np.uint8)
        ranks = token_ids.new_empty(num_rows)
        top_ids = token_ids.new_empty(num_rows, num_top)
        token_ids = token_ids.contiguous()
        self._functions.measure(
            *_as_read(logits), token_ids.data_ptr(), num_top, largest.data_ptr(), masses.data_ptr(), ranks.data_ptr(),
            top_ids.data_ptr(), is_sound.ctypes.data, *logits.shape, self._num_threads(),
        )  # fmt: skip
        return (top_ids, largest, masses, ranks) if is_sound.all() else None

    def keep_bits(self, logits: Tensor, rows: list[int], masks: NDArray[np.int32]) -> None:
        """Same as `features.grammar.structured.keep_bits`."""
        if not logits.is_contiguous():
            raise ValueError("keep_bits needs contiguous logits.")
        indices = np.asarray(rows, np.int64)
        words = np.ascontiguousarray(masks)
        self._functions.keep_bits(
            logits.data_ptr(), indices.ctypes.data, words.ctypes.data, len(indices), logits.shape[1], masks.shape[1],
            self._num_threads(),
        )  # fmt: skip

    def masses(self, levels: Tensor) -> Tensor:
        """Same as `sampler.masses`, of levels [size] float32."""
        masses = levels.new_empty(len(levels), dtype=torch.float64)
        self._functions.masses(levels.data_ptr(), masses.data_ptr(), len(levels))
        return masses

    def _num_threads(self) -> int:
        """1 in a forked process: it lacks its parent's threads, and OpenMP would wait for them."""
        return torch.get_num_threads() if os.getpid() == self._process_id else 1


def _as_read(logits: Tensor) -> tuple[int, int, int]:
    """(address, whether bfloat16, row stride) of logits."""
    return logits.data_ptr(), int(logits.dtype == torch.bfloat16), logits.stride(0)


def load_row_kernels() -> RowKernels:
    """The compiled kernels, cached on disk.

    Raises KernelBuildError or ProcessorClassError.
    """
    folder = SOURCES / "sampling"
    # torch rounds sums and products separately, so no fused multiply-add.
    options = ["-ffp-contract=off"]
    headers = [SOURCES / "lanes.h"]
    build = partial(built_library, "sampling", options, folder, headers=headers)
    return RowKernels(next(compiled_targets(build))[1])
