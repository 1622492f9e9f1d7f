"""Slots of adapters among tensor-parallel ranks: each keeps the factors that add to its part of a product.

A layer of column-wise parts has the rows of `up` for its outputs. One of row-wise parts has the columns of `down` for
its inputs, so that its low-rank product is a part of the sum, which the layer's all-reduce completes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.batch import ScheduledBatch
from nanovllm.features.adapters.loading import Adapter
from nanovllm.features.adapters.steps import device_slots
from nanovllm.layout import BatchLayout

Pair = tuple[Tensor, Tensor]


class RankSlots:
    """The first rank's `DeviceSlots`, which lead those of all ranks (`adapter_slots` of their runners)."""

    def __init__(self, engine: Any, num_slots: int) -> None:
        self._engine = engine
        self._runner = engine.model_runner
        self._finish_draws()
        self._runner.together(_open, num_slots)

    def _finish_draws(self) -> None:
        """Undo the steps in flight: other ranks may wait for a draw."""
        with self._engine._changing():
            self._engine._drop_in_flight(has_failed=False)

    def reserve(self, adapter: Adapter) -> None:
        """Make room for an adapter in all ranks; raises torch.OutOfMemoryError."""
        self._finish_draws()
        names: Any = dict.fromkeys(adapter.factors)
        self._runner.together(_reserve, replace(adapter, factors=names))

    def put(self, slot: int, adapter: Adapter) -> None:
        factors = {
            (name, factor): (tensor, tensor.dtype)
            for name, pair in adapter.factors.items()
            for factor, tensor in enumerate(pair)
        }
        self._runner.together(_put, slot, replace(adapter, factors={}), self._runner.share(factors))

    def launch(
        self, batch: ScheduledBatch, layout: BatchLayout, masks: Any, report: Any, slots: NDArray[np.int32]
    ) -> Callable[[], Tensor]:
        """See `DeviceSlots`; the other ranks get the slots of the rows with the step."""
        runner = self._runner
        runner.step_slots = slots
        try:
            draw: Callable[[], Tensor] = runner.adapter_slots.launch(batch, layout, masks, report, slots)
        finally:
            runner.step_slots = None
        return draw


def _open(runner: Any, num_slots: int) -> None:
    runner.adapter_slots = device_slots(runner, num_slots)


def _reserve(runner: Any, adapter: Adapter) -> None:
    if (reserve := getattr(runner.adapter_slots, "reserve", None)) is not None:
        reserve(adapter)


def _put(runner: Any, slot: int, adapter: Adapter, shared: Any) -> None:
    model = runner.binding.model
    modules = dict(model.named_modules())
    tensors = shared.open()
    factors = {
        name: _part_of(modules[name], model.rank_parts.get(f"{name}.weight"), (tensors[name, 0], tensors[name, 1]))
        for name, factor in tensors
        if factor == 0
    }
    runner.adapter_slots.put(slot, replace(adapter, factors=factors))


def _part_of(module: Any, part: Any, pair: Pair) -> Pair:
    """The factors for a rank's part of a layer (`WeightPart`), in memory of their own."""
    down, up = pair
    if part is not None and module.in_features < part.shape[1]:
        down = part.cut(down)
    elif part is not None:
        up = part.cut(up.T).T
    return down.clone(), up.contiguous().clone()
