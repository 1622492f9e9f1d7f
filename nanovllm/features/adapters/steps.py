"""Steps with adapters: an executor in front of an engine's own adds the low-rank products of rows that name some."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from nanovllm.batch import ScheduledBatch
from nanovllm.features.adapters.loading import Adapter
from nanovllm.features.adapters.salts import adapter_of
from nanovllm.features.adapters.slots import AdapterSlots
from nanovllm.layout import BatchLayout
from nanovllm.model import AttributePatches, ModelBinding
from nanovllm.model_runner import DirectExecutor, ModelRunner

Run = tuple[int, int, int]  # first row, end, slot


class DeviceSlots(Protocol):
    """Factors of adapters on the device, and the launch of steps that use them."""

    def put(self, slot: int, adapter: Adapter) -> None:
        """Write the adapter's factors into a slot."""

    def launch(
        self, batch: ScheduledBatch, layout: BatchLayout, masks: Any, report: Any, slots: NDArray[np.int32]
    ) -> Callable[[], Tensor]:
        """Launch a step as `Executor.launch` does.

        Args:
            slots: [layout.num_tokens] int32, the slot of each row; -1 for a row without an adapter.
        """


class AdapterSteps:
    """Launches steps: those without adapters by the engine's own launch, which they reach unchanged."""

    def __init__(self, inner: Callable[..., Callable[[], Tensor]], slots: AdapterSlots, device: DeviceSlots) -> None:
        self._inner = inner
        self._slots = slots
        self._device = device

    def launch(self, batch: ScheduledBatch, layout: BatchLayout, masks: Any, report: Any) -> Callable[[], Tensor]:
        """See `Executor`."""
        adapters = [adapter_of(entry.sequence.cache_salt) for entry in layout.entries]
        if not any(adapters):
            return self._inner(batch, layout, masks, report)
        numbers = [-1 if each is None else self._slots.slot_of(each) for each in adapters]
        slots = np.repeat(np.array(numbers, np.int32), np.diff(layout.row_starts))
        return self._device.launch(batch, layout, masks, report, slots)


def runs_of(slots: NDArray[np.int32]) -> list[Run]:
    """The runs of neighbouring rows with one adapter."""
    ends = [*(np.flatnonzero(np.diff(slots)) + 1).tolist(), len(slots)]
    starts = [0, *ends[:-1]]
    return [(start, end, slot) for start, end in zip(starts, ends, strict=True) if (slot := int(slots[start])) >= 0]


def device_slots(runner: ModelRunner, num_slots: int) -> Any:
    """The `DeviceSlots` of a runner's executor."""
    config: Any = runner.config
    if isinstance(runner.executor, DirectExecutor):
        limits = num_slots, config.max_lora_rank, config.max_num_batched_tokens
        return ModuleSlots(runner.binding, runner.launch_step, *limits)
    return runner.executor.adapter_slots(runner, num_slots)  # type: ignore[attr-defined]


class ModuleSlots:
    """Slots of a model by its modules, run one by one, or fused in C++ (`LowRankLayers`)."""

    def __init__(self, binding: ModelBinding, inner: Any, num_slots: int, max_rank: int, max_rows: int) -> None:
        self._binding = binding
        self._inner = inner
        self._factors: list[Mapping[nn.Module, tuple[Tensor, Tensor]]] = [{} for _ in range(num_slots)]
        self._fused: Any = None
        if binding.fused_layers:
            self._fused = binding.fused_layers[0].with_adapters(binding.fused_layers, num_slots, max_rank, max_rows)

    def put(self, slot: int, adapter: Adapter) -> None:
        modules: dict[str, Any] = dict(self._binding.model.named_modules())
        factors = {modules[name]: pair for name, pair in adapter.factors.items()}
        if self._fused is not None:
            factors = self._fused.put(slot, factors)
        device = self._binding.device
        self._factors[slot] = {module: (down.to(device), up.to(device)) for module, (down, up) in factors.items()}

    def launch(
        self, batch: ScheduledBatch, layout: BatchLayout, masks: Any, report: Any, slots: NDArray[np.int32]
    ) -> Callable[[], Tensor]:
        """See `DeviceSlots`."""
        with self._adapting(slots):
            draw: Callable[[], Tensor] = self._inner(batch, layout, masks, report)
        return draw

    @contextmanager
    def _adapting(self, slots: NDArray[np.int32]) -> Iterator[None]:
        """Let the model's layers add the products of these rows."""
        binding = self._binding
        calls = binding.calls
        if calls:  # changes that compiled layers would not see
            binding.uninstall()
            binding.calls = {}
        patches = AttributePatches()
        of_modules: dict[Any, list[tuple[slice, Tensor, Tensor]]] = {}
        for start, end, slot in runs_of(slots):
            for module, (down, up) in self._factors[slot].items():
                of_modules.setdefault(module, []).append((slice(start, end), down, up))
        try:
            for module, products in of_modules.items():
                forward = partial(_forward, module.forward, products)
                patches.apply([(vars(module), "forward", forward)])
            if self._fused is not None:
                self._fused.begin_step(slots)
            yield
        finally:
            if self._fused is not None:
                self._fused.end_step()
            patches.undo()
            if calls:
                binding.uninstall()
                binding.calls = calls


def _forward(
    forward: Callable[[Tensor], Tensor], products: list[tuple[slice, Tensor, Tensor]], states: Tensor
) -> Tensor:
    """A linear layer's output [..., num_rows, out_features] with low-rank products of some rows added."""
    output = forward(states)
    for rows, down, up in products:
        output[..., rows, :] += (states[..., rows, :] @ down.T) @ up
    return output
