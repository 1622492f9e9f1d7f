"""Routed experts of few rows in one launch.

Between the two products there is a barrier over the grid, while weights of the second arrive::

    norm, router's scores | top-k, gate, up, activation | down, weighted sum over experts, residual sum |
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_void_p
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.fast.kernels import few_rows
from nanovllm.fast.kernels.few_rows import MAX_ROWS, NUM_WARPS, SLOTS

_LEAST_BYTES = 128 * 2**10  # more than half of shared memory: two launches at once would meet at one barrier


class Sizes(NamedTuple):
    """Sizes of one kind of experts."""

    hidden: int
    inner: int
    num_experts: int
    top_k: int

    def slot_bytes(self, device: torch.device) -> int:
        """Bytes of a row of the first product's weight, or of all rows of a warp's outputs in the second."""
        return 2 * max(self.hidden, self.inner * -(-self.hidden // (few_rows.num_blocks(device) * NUM_WARPS)))

    def slots(self, device: torch.device) -> int:
        """Slots of a warp's ring that fit into shared memory."""
        return few_rows.num_slots(self.slot_bytes(device), 2 * MAX_ROWS * self.hidden, device)

    def shared_bytes(self, device: torch.device) -> int:
        """Shared memory of a block."""
        return max(_LEAST_BYTES, NUM_WARPS * self.slots(device) * self.slot_bytes(device) + 2 * MAX_ROWS * self.hidden)


class Router(NamedTuple):
    """The choice of each row's experts.

    weight: [num_experts, hidden]; the highest scores are chosen, their softmax is their weight.
    normalises: True if the weights of a row add up to 1.
    rounds: True if the weights are rounded to bfloat16.
    norm: [hidden], weight of an RMS norm before the router; the norm's input is added to the output.
    """

    weight: Tensor
    normalises: bool
    rounds: bool
    norm: Tensor | None = None
    epsilon: float = 0.0


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in (
            "states", "norm", "router", "ids", "weights", "gate_up", "down", "slots", "output", "inner", "logits",
            "counter",
        )),
        ("epsilon", c_float),
        *((name, c_int) for name in ("num_rows", "num_slots", "normalises", "rounds")),
    ]  # fmt: skip


def suits(sizes: Sizes, device: torch.device) -> bool:
    """Whether there is a kernel for experts of these sizes in bfloat16."""
    has_pieces = sizes.hidden % 256 == sizes.inner % 256 == 0 and MAX_ROWS * sizes.hidden >= sizes.inner
    if not has_pieces or MAX_ROWS * sizes.top_k > 32 * NUM_WARPS or not few_rows.is_available(device):
        return False
    return sizes.slots(device) >= SLOTS[0] and few_rows.holds(sizes.shared_bytes(device), device)


class FewExperts:
    """The kernel for experts of some sizes on one device; `suits` must hold."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self._sizes, self._device, self._num_blocks = sizes, device, few_rows.num_blocks(device)
        definitions = {
            "HIDDEN": sizes.hidden, "INNER": sizes.inner, "EXPERTS": sizes.num_experts, "TOP_K": sizes.top_k,
            "SLOTS": sizes.slots(device),
        }  # fmt: skip
        self._function = few_rows.function(
            ("2_routes.h", "3_experts.cu"), "few_experts", definitions, device, shared_bytes=sizes.shared_bytes(device)
        )

    def run(
        self,
        states: Tensor,
        gate_up: Tensor,
        down: Tensor,
        choice: tuple[Tensor, Tensor] | Router,
        slots: Tensor | None,
    ) -> Tensor:
        """The experts' weighted sum for each row, [num_rows, hidden].

        Args:
            states: [num_rows, hidden], num_rows up to `MAX_ROWS`.
            gate_up, down: [num_experts, 2 * inner, hidden], [num_experts, hidden, inner].
            choice: the router, or experts' numbers (int64) and weights (float32), [num_rows, top_k].
            slots: int64, of the rows' K and V; 0 for padding, as are further rows. None if no row is padding.
        """
        (num_rows, _), sizes = states.shape, self._sizes
        router = choice if isinstance(choice, Router) else None
        norm, weight = (None, None) if router is None else (router.norm, router.weight)
        ids, weights = (None, None) if isinstance(choice, Router) else choice
        output = torch.empty_like(states)
        inner = states.new_empty(num_rows * sizes.top_k, sizes.inner)
        logits = states.new_empty(num_rows, sizes.num_experts, dtype=torch.float32)
        given = (states, norm, weight, ids, weights, gate_up, down, slots)
        made = (output, inner, logits)
        parts = *given, *made, _counter(self._device)
        call = _Call(
            *(None if part is None else part.data_ptr() for part in parts), 0.0 if router is None else router.epsilon,
            num_rows, 0 if slots is None else len(slots), router is not None and router.normalises,
            router is not None and router.rounds,
        )  # fmt: skip
        with torch.cuda.device(self._device):
            self._function.launch_at_once(self._num_blocks, call)
        return output


@cache
def few_experts(sizes: Sizes, device: torch.device) -> FewExperts:
    """The kernel, made once; not while a graph is captured."""
    _counter(device)
    return FewExperts(sizes, device)


@cache
def _counter(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros(1, dtype=torch.int32, device=device)
