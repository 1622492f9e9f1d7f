"""Slots of adapters in fused decoder layers: their kernels add low-rank products to sums before they round them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

if TYPE_CHECKING:
    from nanovllm.fast.layers.fused_layers import FusedLayer

PRODUCTS = ("q", "k", "v"), ("o",), ("gate", "up"), ("down",)  # linear layers of each product of a decoder layer
_MOST_PARTS = max(map(len, PRODUCTS))
Factors = Mapping[nn.Module, tuple[Tensor, Tensor]]


class LowRankLayers:
    """Factors of all fused layers, by slot.

    Args:
        max_rows: most rows of a step.
        max_rank: largest rank of an adapter.
    """

    def __init__(self, layers: Sequence[FusedLayer], num_slots: int, max_rank: int, max_rows: int) -> None:
        from nanovllm.fast.kernels.packed_product import AdapterRowsStruct, LowRankStruct

        max_rank += max_rank % 2  # whole steps of bfloat16
        table = LowRankStruct * num_slots
        self._struct = LowRankStruct
        self._tables = [[table() for _ in PRODUCTS] for _ in layers]
        self._places: dict[nn.Module, tuple[Any, int]] = {}  # (table of its product, part) of each linear layer
        self._kept: list[Factors] = [{} for _ in range(num_slots)]
        with torch.inference_mode(False):
            self._shrunk = torch.empty(max_rows, _MOST_PARTS, max_rank, dtype=layers[0].dtype, device="cpu")
        self._rows = AdapterRowsStruct(None, self._shrunk.data_ptr(), max_rank)
        for layer, tables in zip(layers, self._tables, strict=True):
            for of_product, names in zip(tables, PRODUCTS, strict=True):
                self._places |= {layer.block.linears[name]: (of_product, part) for part, name in enumerate(names)}
            layer.use_adapters(ctypes.addressof(self._rows), [ctypes.addressof(each) for each in tables])

    def put(self, slot: int, factors: Factors) -> Factors:
        """Write an adapter into a slot; returns the factors of modules that are not in these layers."""
        own = {module: pair for module, pair in factors.items() if module in self._places}
        self._kept[slot] = {module: _packed(*pair) for module, pair in own.items()}
        for tables in self._tables:
            for table in tables:
                table[slot] = self._struct()
        for module, (down, up) in self._kept[slot].items():
            table, part = self._places[module]
            struct = table[slot]
            struct.down[part], struct.up[part] = down.data_ptr(), up.data_ptr()
            struct.ranks[part] = len(down)
        return {module: pair for module, pair in factors.items() if module not in self._places}

    def begin_step(self, slots: NDArray[np.int32]) -> None:
        """Set the slots [num_rows] int32 of the next step's rows; they must live until `end_step`."""
        self._rows.slots = slots.ctypes.data

    def end_step(self) -> None:
        self._rows.slots = None


def _packed(down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Factors for the kernels (`csrc/low_rank.h`): down [rank, depth], and up [outputs / 16, rank / step, 16, step]."""
    step = 4 // up.element_size()
    lanes = 16
    padding = -len(down) % step
    down = F.pad(down, (0, 0, 0, padding)).contiguous()
    steps = F.pad(up, (0, 0, 0, padding)).unflatten(0, (-1, step)).unflatten(2, (-1, lanes))
    return down, steps.permute(2, 0, 3, 1).contiguous()
