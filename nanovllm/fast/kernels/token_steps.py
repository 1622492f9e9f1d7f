"""Arguments of a launch of `layer_stack.py`, and steps from tokens to tokens: embedding, layers, head and draw."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int, c_void_p
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

PACKED_BYTES = 3584  # bytes of a step's inputs as launch arguments; all arguments have 4,096
SPACES = "qkv", "attended", "middle", "inner", "hidden", "partial", "counter"  # workspace parts, words; see `1_grid.h`


class StepStruct(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in (
            "layers", "input", "cosines", "sines", "output", "positions", "slots", "tables", "table_starts", "counts",
            *SPACES, "embedding", "norm", "head", "token_ids", "sample_rows", "noise_keys", "inverse_temperatures",
            "noise_scales", "sampled", "host_sampled", "best", "logits",
        )),
        *((name, c_float) for name in ("scaling", "norm_epsilon")),
        *((name, c_int) for name in (
            "num_layers", "num_rows", "vocab_size", "num_sampled", "non_finite", "num_tables", "gamma", "is_packed",
        )),
    ]  # fmt: skip

    @classmethod
    def of(cls, **fields: Any) -> StepStruct:
        """Tensors become addresses."""
        return cls(**{name: part.data_ptr() if isinstance(part, Tensor) else part for name, part in fields.items()})


class PackedInputs(ctypes.Structure):
    _fields_ = (("words", ctypes.c_uint64 * (PACKED_BYTES // 8)),)


NOTHING_PACKED = PackedInputs()


class TokenStep:
    """The launch of steps from tokens to tokens.

    Attributes:
        packed: inputs as launch arguments, [PACKED_BYTES / 4] int32.
    """

    def __init__(self, launch: Callable[[StepStruct, PackedInputs], None], step: StepStruct, tensors: Any) -> None:
        self._launch = launch  # the step points to the tensors
        self._step = step
        self._tensors = tensors
        self._packed = PackedInputs()
        self.packed = np.ctypeslib.as_array(self._packed.words).view(np.int32)

    def launch(self, num_tables: int = 0, host_sampled: Tensor | None = None) -> None:
        """Launch a step on the current stream; `packed` may be written again afterwards.

        Args:
            num_tables: number of packed block numbers.
            host_sampled: [num_samples] int64, pinned, for the tokens.
        """
        self._step.num_tables = num_tables
        self._step.host_sampled = None if host_sampled is None else host_sampled.data_ptr()
        self._launch(self._step, self._packed)


class StepWeights(NamedTuple):
    """The bfloat16 weights of a step from tokens to tokens besides the layers'; it draws below vocab_size.

    embedding, head: [num_tokens, hidden]; the same tensor if they are tied.
    norm: [hidden].
    cosines, sines: [num_positions, head_dim].
    """

    embedding: Tensor
    norm: Tensor
    head: Tensor
    cosines: Tensor
    sines: Tensor
    epsilon: float
    vocab_size: int


# Inputs of a step from tokens to tokens, int64 or float32: rows, `DecodeRows`, draw.
STEP_INPUTS = {
    "token_ids": "token_ids", "positions": "positions", "slot_mapping": "slots", "tables": "tables",
    "decode_tables": "table_starts", "decode_blocks": "counts", "sample_rows": "sample_rows",
    "noise_keys": "noise_keys", "inverse_temperatures": "inverse_temperatures", "noise_scales": "noise_scales",
}  # fmt: skip
