"""Linear layers with low-rank products of adapters: each row of a step has the slot of its adapter, or none.

Layers that share an input share a product (`merged_linears.py`), and so do their factors. Decoder layers run by kernels
and in the launches of dense layers where they do without adapters, but neither as a stack nor in the launches of packed
layers; others run uncompiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nanovllm.device import find_kernel, to_device
from nanovllm.fast.layers.dense_layers import DenseLayer, with_adapters
from nanovllm.fast.layers.kernel_layers import KernelLayer
from nanovllm.fast.layers.merged_linears import FirstPart, MergedPart
from nanovllm.model import Change

_RANKS = 16  # ranks are multiples of it, as the kernels' products are

Pair = tuple[Tensor, Tensor]  # down [rank, in_features] and up [rank, out_features] of a layer


class Factors(NamedTuple):
    """Factors of one product in all slots, zeros where an adapter has none; the dtype is the model's.

    down: [max_loras, num_parts, rank, in_features].
    up: [max_loras, rank, num_outputs].
    spans: first output and end of each part.
    """

    down: Tensor
    up: Tensor
    spans: tuple[tuple[int, int], ...]


class RowsBySlot(NamedTuple):
    """Rows of a step, those of each slot together.

    order: [num_rows] int32, rows of slot 0, of slot 1 and so on; the rest may be anything.
    starts: [a power of 2, at least the number of slots, + 1] int32, the first place of each slot, and the last's end.
    slots: [num_rows] int32, the slot of each row, -1 for none.
    """

    order: Tensor
    starts: Tensor
    slots: Tensor


def num_starts(num_slots: int) -> int:
    """Length of `RowsBySlot.starts`."""
    return 1 + (1 << (num_slots - 1).bit_length())


def sort_rows(slots: NDArray[np.int32], rows: NDArray[np.int64], to: RowsBySlot) -> None:
    """Fill the arrays of `to` with the slots [n] of rows [n]; -1 for a row without an adapter."""
    order, starts, of_rows = cast(Any, to)
    of_rows[:] = -1
    of_rows[rows] = slots
    by_slot = np.argsort(slots, kind="stable")
    counts = np.bincount(slots + 1, minlength=len(starts))[: len(starts)]
    starts[:] = np.cumsum(counts) - counts[0]
    order[: starts[-1]] = rows[by_slot][counts[0] :]


class _Place(NamedTuple):
    """Outputs of a linear layer in the product of a module."""

    module: Any
    span: tuple[int, int]


class FactorSlots:
    """Factors of the adapters in an engine's slots, for the products that one has changed so far.

    Args:
        max_loras: number of slots.

    Attributes:
        rows: rows of the coming step by slot.
    """

    rows: RowsBySlot

    def __init__(self, model: nn.Module, max_loras: int, dtype: torch.dtype, device: torch.device) -> None:
        self._places = _places_of(model)
        self._max_loras = max_loras
        self._options: dict[str, Any] = {"dtype": dtype, "device": device}
        self._add: Callable[..., Tensor] = find_kernel("low_rank", "add_low_rank") or add_low_rank
        self._compiled_rows: Sequence[int] = find_kernel("low_rank", "COMPILED_ROWS") or ()
        self.of_products: dict[nn.Module, Factors] = {}

    def with_room(self, rank: int, names: Iterable[str]) -> dict[nn.Module, Factors]:
        """New factors of the products that have no room for an adapter of this rank in layers of these names.

        They hold the old ones' numbers. Raises torch.OutOfMemoryError.
        """
        before = self.of_products
        rank = max([-(-rank // _RANKS) * _RANKS, *(factors.up.shape[1] for factors in before.values())])
        lacking = [
            module
            for module in dict.fromkeys((*before, *(self._places[name].module for name in names)))
            if module not in before or before[module].up.shape[1] < rank
        ]
        try:
            found = {module: self._allocated(module, rank, before.get(module)) for module in lacking}
            for factors in {(each.spans, each.down.shape): each for each in found.values()}.values():
                self._compile(factors)
        except torch.OutOfMemoryError as error:
            widths = sum(len(spans) * m.in_features + max(spans)[1] for m in lacking for spans in [self._spans(m)])
            num_bytes = self._max_loras * rank * widths * self._options["dtype"].itemsize
            raise torch.OutOfMemoryError(
                f"adapters of rank {rank} in {self._max_loras} slots need {num_bytes / 2**20:.0f} MiB more on the "
                "device than it has. Lower max_loras, or max_lora_rank to refuse such adapters."
            ) from error
        return found

    def put(self, slot: int, pairs: Mapping[str, Pair]) -> None:
        """Write an adapter into a slot; there is room for it."""
        for factors in self.of_products.values():
            factors.down[slot].zero_()
            factors.up[slot].zero_()
        for name, (down, up) in pairs.items():
            module, span = self._places[name]
            factors = self.of_products[module]
            device = factors.up.device
            factors.down[slot, factors.spans.index(span), : len(down)].copy_(to_device(down, device))
            factors.up[slot, : len(up), slice(*span)].copy_(to_device(up, device))

    def changes(self) -> list[Change]:
        """Changes of the modules, which are without such changes now: their products get those of `rows`."""
        found = []
        for module, factors in self.of_products.items():
            name = "product" if isinstance(module, FirstPart) else "forward"
            found.append((vars(module), name, partial(self._run, getattr(module, name), factors)))
        return found

    def _run(self, inner: Callable[..., Tensor], factors: Factors, states: Tensor) -> Tensor:
        return self._add(inner(states), states, factors, self.rows)

    def _spans(self, module: nn.Module) -> tuple[tuple[int, int], ...]:
        return tuple(sorted(place.span for place in self._places.values() if place.module is module))

    def _allocated(self, module: Any, rank: int, old: Factors | None) -> Factors:
        spans = self._spans(module)
        with torch.inference_mode(False):
            down = torch.zeros(self._max_loras, len(spans), rank, module.in_features, **self._options)
            up = torch.zeros(self._max_loras, rank, max(spans)[1], **self._options)
        if old is not None:
            down[:, :, : old.down.shape[2]] = old.down
            up[:, : old.up.shape[1]] = old.up
        return Factors(down, up, spans)

    def _compile(self, factors: Factors) -> None:
        """Compile and load the kernels, which a capture must not do; no row has a slot."""
        for num_rows in self._compiled_rows:
            numbers = factors.up.new_zeros(num_rows + num_starts(self._max_loras), dtype=torch.int32)
            slots = RowsBySlot(numbers[:num_rows], numbers[num_rows:], numbers[:num_rows] - 1)
            product, states = (
                factors.up.new_zeros(num_rows, size) for size in (factors.up.shape[2], factors.down.shape[3])
            )
            self._add(product, states, factors, slots)


def add_low_rank(product: Tensor, states: Tensor, factors: Factors, slots: RowsBySlot) -> Tensor:
    """The same as `fast/kernels/low_rank.py`, by torch."""
    down, up, spans = factors
    starts = slots.starts.tolist()
    for slot, (first, end) in enumerate(pairwise(starts[: len(up) + 1])):
        rows = slots.order[first:end].long()
        for part, (begin, stop) in enumerate(spans):
            shrunk = states[..., rows, :].float() @ down[slot, part].float().T
            added = shrunk.to(up.dtype).float() @ up[slot, :, begin:stop].float()
            product[..., rows, begin:stop] = (product[..., rows, begin:stop] + added).to(product.dtype)
    return product


def adapted_calls(
    calls: Mapping[nn.Module, Any], layers: Sequence[nn.Module], factors: FactorSlots
) -> dict[nn.Module, Callable[..., Any]]:
    """Replacements of modules' calls in steps with adapters, from those in steps without.

    Args:
        calls: replacements of a model without a stack.
        layers: decoder layers; one that does not run by kernels runs uncompiled, since compiled code sees no change.
    """
    within = set(layers)
    of_layers: list[Any] = [calls.get(module) for module in layers]
    if all(isinstance(call, DenseLayer) for call in of_layers):
        return {**calls, **dict(zip(layers, with_adapters(of_layers, factors), strict=True))}
    return {
        module: _by_kernels(call) if isinstance(call, KernelLayer) else call
        for module, call in calls.items()
        if module not in within or isinstance(call, KernelLayer)
    }


def _by_kernels(layer: KernelLayer) -> Callable[..., Tensor]:
    """The layer's call, in the trial before a capture too: adapters change layers differently, so no layer is alike."""
    own = copy(layer)
    own.is_first = True
    return own.by_kernels


def _places_of(model: nn.Module) -> dict[str, _Place]:
    """The place of each linear layer by its name."""
    named: dict[str, Any] = dict(model.named_modules())
    firsts = [module for module in named.values() if isinstance(module, FirstPart)]
    found = {}
    for name, module in named.items():
        if isinstance(module, (FirstPart, MergedPart)):
            first = next(first for first in firsts if module.shares_with(first))
            found[name] = _Place(first, (module.start, module.end))
        elif hasattr(module, "in_features") and hasattr(module, "out_features"):
            found[name] = _Place(module, (0, module.out_features))
    return found
