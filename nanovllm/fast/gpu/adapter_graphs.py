"""Steps with adapters on a GPU: the engine's own executor, with further graphs while it launches one.

Everything that a following step reads (sampled tokens, hidden states, logits, buffers of options) is the executor's,
and so are the heads' graphs. Forward passes differ: their packed steps have the slots of the rows, and their layers add
the products of `adapted_layers.py`. Steps without adapters find an unchanged executor.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.batch import ScheduledBatch
from nanovllm.device import DEVICE_LOCK
from nanovllm.fast.gpu.forward_graphs import ForwardGraphs
from nanovllm.fast.gpu.step_inputs import StepPacking
from nanovllm.fast.layers.adapted_layers import FactorSlots, RowsBySlot, adapted_calls, num_starts, sort_rows
from nanovllm.features.costs.buckets import GraphShape
from nanovllm.features.packed_steps import HostStep, StepFeature, StepInput
from nanovllm.layout import BatchLayout
from nanovllm.model import AttributePatches
from nanovllm.model_runner import ModelRunner

logger = logging.getLogger("nanovllm")


class SlotInputs(StepFeature):
    """Rows of a packed step by the slots of their adapters, see `RowsBySlot`.

    slots: [num_tokens] int32, of the step to be packed; -1 for a row without an adapter.
    """

    slots: NDArray[np.int32]

    def __init__(self, num_slots: int) -> None:
        self.inputs = (
            StepInput("adapter_order", np.int32, ("rows",)),
            StepInput("adapter_starts", np.int32, (num_starts(num_slots),)),
            StepInput("adapter_slots", np.int32, ("rows",)),
        )

    def fill(self, to: Any, step: HostStep) -> None:
        rows = np.arange(len(self.slots))
        real = step.layout.num_decodes
        rows[real:] += step.num_decodes - real  # chunks come after the padding of decodes
        sort_rows(self.slots, rows, _rows_in(to))


def _rows_in(inputs: Any) -> RowsBySlot:
    return RowsBySlot(inputs.adapter_order, inputs.adapter_starts, inputs.adapter_slots)


class AdapterGraphs:
    """Slots of adapters of an engine with a `GraphExecutor`, and launches of steps that use them.

    Graphs of decodes are captured while the engine is idle, those of other shapes once steps have had them.
    Slots grow to the largest rank that was loaded.
    """

    def __init__(self, runner: ModelRunner, max_loras: int) -> None:
        self._runner = runner
        self._launch = runner.launch_step  # also with pictures
        self._binding = binding = runner.binding
        self._executor = cast(Any, runner.executor)
        binding.uninstall()  # names of modules are those of the model
        self._factors = FactorSlots(binding.model, max_loras, binding.dtype, binding.device)
        self._slots = SlotInputs(max_loras)
        *features, last = self._executor.features  # the last array of a step takes the words that are left
        num_samples = len(self._executor._sampled)
        features += self._slots, last
        self._packing = cache(partial(StepPacking, max_samples=num_samples, features=features))
        self._patches = AttributePatches()
        self._forward_changes = AttributePatches()
        self._calls: dict[Any, Any] = {}
        self._begin_graphs()
        self._inner_ahead: Callable[[], bool] = self._executor.capture_ahead
        self._inner_drop: Callable[[], None] = self._executor._drop_graphs
        vars(self._executor).update(capture_ahead=self.capture_ahead, _drop_graphs=self._drop_all, close=self.close)

    def reserve(self, adapter: Any) -> None:
        """Make room for an adapter in every slot, and compile its kernels; steps of before may still run.

        Raises torch.OutOfMemoryError, with everything as before, if there is not enough memory.
        """
        if self._binding.device.type == "cuda":
            self._runner.follow_last_stream()
        with DEVICE_LOCK, torch.no_grad():
            if moved := self._factors.with_room(adapter.rank, adapter.factors):
                self._drop_graphs()  # they read the tensors of before
                self._factors.of_products |= moved

    def put(self, slot: int, adapter: Any) -> None:
        """Write an adapter's factors into a slot, after the steps that are launched; see `reserve` for errors."""
        self.reserve(adapter)
        with torch.no_grad():
            self._factors.put(slot, adapter.factors)

    def launch(
        self, batch: ScheduledBatch, layout: BatchLayout, masks: Any, report: Any, slots: NDArray[np.int32]
    ) -> Callable[[], Tensor]:
        """See `DeviceSlots`."""
        self._slots.slots = slots
        with self._in_force():
            draw = self._launch(batch, layout, masks, report)
        return partial(self._draw, draw)

    def _draw(self, draw: Callable[[], Tensor]) -> Tensor:
        with self._in_force():  # some steps are computed as a whole here
            return draw()

    @contextmanager
    def _in_force(self) -> Iterator[None]:
        """Let the executor run steps with adapters."""
        self._patches.undo()  # leftovers of an interrupt
        executor = self._executor
        stacked = self._binding.stacked
        self._calls = self._binding.calls if stacked is None else stacked.layered_calls
        own = {
            "_packing": self._packing, "_forwards": self._forwards, "_lacking": self._lacking, "stacked": None,
            "_forward": partial(self._compute, executor._forward),
            "_run_whole": partial(self._compute, executor._run_whole),
        }  # fmt: skip
        try:
            self._patches.apply((vars(executor), name, value) for name, value in own.items())
            self._patches.apply([(vars(self._binding), "stacked", None)])
            yield
        finally:
            self._patches.undo()

    def _compute(self, run: Callable[..., Any], shape: GraphShape, *rest: Any) -> Any:
        """Run a forward pass of the packed step with the products of its rows' adapters."""
        inputs = self._packing(shape).views(self._executor._inputs)
        self._factors.rows = _rows_in(inputs)
        binding = self._binding
        binding.uninstall()  # the modules' own calls, to which the changes add
        changes = {
            "calls": adapted_calls(self._calls, binding.layer_modules, self._factors),
            "rotary_changes": binding.rotary_changes + self._factors.changes(),
        }
        try:
            self._forward_changes.apply((vars(binding), name, value) for name, value in changes.items())
            return run(shape, *rest)
        finally:
            self._forward_changes.undo()
            binding.uninstall()

    def capture_ahead(self) -> bool:
        """Capture one shape while idle, those of steps without adapters first; False if none is left."""
        if self._inner_ahead():
            return True
        if not self._factors.of_products:
            return False
        try:
            with self._in_force():
                return self._inner_ahead()
        except torch.OutOfMemoryError:
            logger.warning("no memory is left for further CUDA graphs of steps with adapters", exc_info=True)
            self._forwards.usual.clear()
            self._forwards.missed.clear()
            return False

    def _begin_graphs(self) -> None:
        """Start with no graph; without idle time, each shape waits until steps have had it."""
        buckets = self._executor._buckets
        self._forwards = ForwardGraphs(buckets)
        self._forwards.usual = deque(shape for shape in buckets.coarse() if not shape.num_tiles)
        # Where each number of decodes is compiled, no step waits for a new one.
        is_slow = self._executor._captures and self._executor.backend.compiles_each_size
        common = [shape for shape in buckets.common() if not shape.num_tiles] if is_slow else ()
        self._lacking: deque[Any] = deque(common)

    def _drop_graphs(self) -> None:
        executor = self._executor
        had_graphs = bool(self._forwards.graphs)
        if had_graphs:
            executor._pool.synchronize()
        self._begin_graphs()
        if had_graphs and not (executor._forwards.graphs or executor._heads.graphs):
            executor._pool.reset()

    def _drop_all(self) -> None:
        self._drop_graphs()
        self._inner_drop()

    def close(self) -> None:
        """Free the slots, and the graphs of all steps."""
        self._drop_all()
        self._factors.of_products = {}
