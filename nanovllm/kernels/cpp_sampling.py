"""The CPU's sampling kernels (`csrc/sampling/`): rows of logits side by side, compiled once a processor."""

from __future__ import annotations

import ctypes
import os
from ctypes import c_int, c_int64, c_void_p
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.kernels.cpp import SOURCES, built_library, compiled_targets

MAX_VOCAB_SIZE = 2**19  # of more tokens, sums of masses are not exact
_TYPES = (torch.float32, torch.bfloat16)
# The functions' arguments; the sources describe them.
_SIGNATURES = {
    "draw": [c_void_p, c_int, c_int64, *[c_void_p] * 7, c_int64, c_int64, c_int],
    "penalise": [c_void_p, c_int64, *[c_void_p] * 3, c_int64, c_int64, c_int],
    "measure": [c_void_p, c_int, c_int64, c_void_p, c_int64, *[c_void_p] * 5, c_int64, c_int64, c_int],
    "keep_bits": [c_void_p] * 3 + [c_int64] * 3 + [c_int],
    "masses": [c_void_p, c_void_p, c_int64],
}


class RowKernels:
    """The functions of the compiled library. They read logits [num_rows, vocab_size] on a CPU, adjacent in a row."""

    filters: ClassVar = {"top_k", "top_p", "min_p"}  # those that `draw` applies

    def __init__(self, library: Path) -> None:
        functions = ctypes.CDLL(str(library))
        for name, arguments in _SIGNATURES.items():
            function = getattr(functions, name)
            function.argtypes, function.restype = arguments, None
        self._functions: Any = functions
        self._process_id = os.getpid()

    def can_read(self, logits: Tensor) -> bool:
        return logits.dtype in _TYPES and logits.stride(1) == 1 and logits.shape[1] <= MAX_VOCAB_SIZE

    def draw(self, logits: Tensor, inputs: Any, least_levels: Tensor) -> NDArray[np.int64]:
        """Tokens [num_rows]; -1 for a row that is not finite, -2 where torch's own rounding of the noise decides.

        Args:
            logits: float32 or bfloat16.
            inputs: `draw.DrawInputs`.
            least_levels: [num_rows] float32, the smallest level that min-p keeps; -inf for all.
        """
        tokens = np.empty(len(logits), np.int64)
        given = inputs.noise_keys, inputs.inverse_temperatures, inputs.noise_scales, inputs.top_k, inputs.top_p
        arrays = [np.ascontiguousarray(values) for values in given]  # the caller's views, kept until they are read
        self._functions.draw(
            *_as_read(logits), *(values.ctypes.data for values in arrays), least_levels.data_ptr(),
            tokens.ctypes.data, *logits.shape, self._num_threads(),
        )  # fmt: skip
        return tokens

    def penalise(self, logits: Tensor, entries: Tensor, tokens: Tensor, previous: Tensor) -> None:
        """As `kernels.penalties.penalise`."""
        if logits.stride(1) != 1:
            raise ValueError("penalise needs logits that are adjacent in a row.")
        self._functions.penalise(
            logits.data_ptr(), logits.stride(0), entries.data_ptr(), tokens.data_ptr(), previous.data_ptr(),
            len(entries), logits.shape[1], self._num_threads(),
        )  # fmt: skip

    def measure(self, logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """What log-probabilities need of each row; None if the largest logit of one is not finite.

        Args:
            logits: float32 or bfloat16.
            token_ids: [num_rows] int64, from 0; from vocab_size on for tokens without a logit.

        Returns the tokens of the num_top largest logits [num_rows, num_top] int64, of equal ones the lower first; the
        largest logit, float32, the mass of all beside it, float64, and the rank of the row's token, [num_rows] each.
        """
        num_rows, largest = len(logits), logits.new_empty(len(logits), dtype=torch.float32)
        masses, is_sound = largest.new_empty(num_rows, dtype=torch.float64), np.empty(num_rows, np.uint8)
        ranks, top_ids = token_ids.new_empty(num_rows), token_ids.new_empty(num_rows, num_top)
        token_ids = token_ids.contiguous()
        self._functions.measure(
            *_as_read(logits), token_ids.data_ptr(), num_top, largest.data_ptr(), masses.data_ptr(), ranks.data_ptr(),
            top_ids.data_ptr(), is_sound.ctypes.data, *logits.shape, self._num_threads(),
        )  # fmt: skip
        return (top_ids, largest, masses, ranks) if is_sound.all() else None

    def keep_bits(self, logits: Tensor, rows: list[int], masks: NDArray[np.int32]) -> None:
        """As `sampling.structured.keep_bits`."""
        if not logits.is_contiguous():
            raise ValueError("keep_bits needs contiguous logits.")
        indices, words = np.asarray(rows, np.int64), np.ascontiguousarray(masks)
        self._functions.keep_bits(
            logits.data_ptr(), indices.ctypes.data, words.ctypes.data, len(indices), logits.shape[1], masks.shape[1],
            self._num_threads(),
        )  # fmt: skip

    def masses(self, levels: Tensor) -> Tensor:
        """As `sampling.filters.masses`, of levels [size] float32."""
        masses = levels.new_empty(len(levels), dtype=torch.float64)
        self._functions.masses(levels.data_ptr(), masses.data_ptr(), len(levels))
        return masses

    def _num_threads(self) -> int:
        """One in a fork: the threads of its parent are not there, and OpenMP would wait for them."""
        return torch.get_num_threads() if os.getpid() == self._process_id else 1


def _as_read(logits: Tensor) -> tuple[int, int, int]:
    """Where logits are, whether they are bfloat16, and how far rows are apart."""
    return logits.data_ptr(), int(logits.dtype == torch.bfloat16), logits.stride(0)


def load_row_kernels() -> RowKernels:
    """The compiled kernels, from the cache folder if they are there already.

    Raises KernelBuildError or ProcessorClassError.
    """
    folder = SOURCES / "sampling"
    # Sums and products are rounded one by one, as torch does it.
    options, others = ["-ffp-contract=off"], [SOURCES / "lanes.h"]
    build = partial(built_library, "sampling", options, folder, others=others)
    return RowKernels(next(compiled_targets(build))[1])
