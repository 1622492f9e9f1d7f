"""An RMS norm and a product with its output, for few rows in one launch.

The weight's first rows are on their way while the norm is computed.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_longlong, c_void_p
from functools import cache

import torch
from torch import Tensor

from nanovllm.fast.kernels import few_rows
from nanovllm.fast.kernels.few_rows import MAX_ROWS, NUM_WARPS


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("states", "norm", "weight", "slots", "output", "next")),
        ("next_bytes", c_longlong), ("epsilon", c_float), ("num_rows", c_int), ("num_slots", c_int),
    ]  # fmt: skip


_PIECES = (512, 256)  # elements per fetch of a weight's row


def _sizes(num_outputs: int, depth: int, device: torch.device) -> tuple[int, int, int]:
    """(elements per fetch, bytes of a slot, bytes of the rows)."""
    most = -(-num_outputs // (few_rows.num_blocks(device) * NUM_WARPS))  # rows of a warp
    piece = next((size for size in _PIECES if depth % size == 0), 0)
    return piece, most * (2 * piece + 64), MAX_ROWS * (2 * depth + 64)


def suits(weight: Tensor) -> bool:
    """Whether there is a kernel for this weight [num_outputs, depth]."""
    (num_outputs, depth), device = weight.shape, weight.device
    if weight.dtype != torch.bfloat16 or depth % 256 or not few_rows.is_available(device):
        return False
    if num_outputs > 8 * NUM_WARPS * few_rows.num_blocks(device):
        return False
    return few_rows.num_slots(*_sizes(num_outputs, depth, device)[1:], device) >= 2


class NormedLinear:
    """The kernel for weights of one shape; `suits` must hold."""

    def __init__(self, num_outputs: int, depth: int, device: torch.device) -> None:
        self._num_outputs, self._device, self._num_blocks = num_outputs, device, few_rows.num_blocks(device)
        piece, slot_bytes, row_bytes = _sizes(num_outputs, depth, device)
        slots = min(depth // piece, few_rows.num_slots(slot_bytes, row_bytes, device))
        definitions = {"DEPTH": depth, "PIECE": piece, "OUTPUTS": num_outputs, "SLOTS": slots}
        self._function = few_rows.function(
            ("4_product.cu",), "normed_product", definitions, device,
            shared_bytes=NUM_WARPS * slots * slot_bytes + row_bytes,
        )  # fmt: skip

    def run(
        self, states: Tensor, norm: Tensor, epsilon: float, weight: Tensor, slots: Tensor | None,
        following: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The product of normalised rows and the weight, [num_rows, num_outputs].

        Args:
            states: [num_rows, depth], num_rows up to `MAX_ROWS`.
            norm: [depth], weight of the norm.
            slots: int64, of the rows' K and V; 0 for padding, as are further rows. None if no row is padding. Padding
                rows have zeros as results.
            following: weight of a later product, prefetched into the L2 cache.
        """
        output = states.new_empty(len(states), self._num_outputs)
        parts = states, norm, weight, slots, output, following
        call = _Call(
            *(None if part is None else part.data_ptr() for part in parts),
            0 if following is None else following.nbytes // 16 * 16, epsilon, len(states),
            0 if slots is None else len(slots),
        )  # fmt: skip
        with torch.cuda.device(self._device):
            self._function.launch_early(self._num_blocks, call)
        return output


@cache
def normed_linear(num_outputs: int, depth: int, device: torch.device) -> NormedLinear:
    """The kernel, made once; not while a graph is captured."""
    return NormedLinear(num_outputs, depth, device)
