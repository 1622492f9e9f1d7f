"""A packed step: one copy to the device, with the same layout for all steps of one shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.features.costs.buckets import GraphShape
from nanovllm.features.packed_steps import HostStep, StepFeature, StepInput
from nanovllm.layout import BatchLayout
from nanovllm.sampler import DRAW_DTYPES, DrawInputs, DrawTensors

DRAW_INPUTS = tuple(StepInput(name, dtype, ("samples",)) for name, dtype in DRAW_DTYPES.items())
_ON_DEVICE: dict[Any, torch.dtype] = {np.int64: torch.int64, np.int32: torch.int32, np.float32: torch.float32}


class Packing:
    """Offsets of arrays in a buffer of 32-bit words; see `StepInput.sizes` for the names in `sizes`."""

    def __init__(self, inputs: Sequence[StepInput], sizes: Mapping[str, int]) -> None:
        self.num_words = 0  # words of all arrays but one that takes the rest
        self._spans: list[tuple[StepInput, slice, tuple[int, ...]]] = []
        for each in inputs:
            if each.sizes is None:
                self._spans.append((each, slice(self.num_words, None), (-1,)))
                continue
            shape = tuple(sizes[size] if isinstance(size, str) else size for size in each.sizes)
            item_words = np.dtype(each.dtype).itemsize // 4
            start = -(-self.num_words // item_words) * item_words  # views need an aligned start
            self.num_words = start + prod(shape) * item_words
            self._spans.append((each, slice(start, self.num_words), shape))

    def views(self, buffer: Any) -> Any:
        """The arrays of a buffer [n] int32 by name: tensors of a tensor, NumPy arrays of an array."""
        is_tensor = isinstance(buffer, Tensor)
        return SimpleNamespace(**{
            each.name: buffer[span].view(_ON_DEVICE[each.dtype] if is_tensor else each.dtype).reshape(shape)
            for each, span, shape in self._spans
        })  # fmt: skip


class StepPacking(Packing):
    """The packed steps of one shape. The draw's inputs come first, at the same place for every shape."""

    def __init__(self, shape: GraphShape, max_samples: int, features: Sequence[StepFeature]) -> None:
        self._num_decodes = shape.num_decodes
        self._features = features
        sizes = {
            "samples": max_samples, "rows": shape.num_rows, "decodes": shape.num_decodes,
            "pairs": shape.num_decodes // 2, "wide": shape.num_decodes * shape.is_wide,
            "tiles": shape.num_tiles, "chunk_rows": shape.num_chunk_rows,
        }  # fmt: skip
        super().__init__([each for feature in features for each in feature.inputs], sizes)

    def num_words_for(self, layout: BatchLayout) -> int:
        """Words of a packed step."""
        return self.num_words + sum(feature.num_more_words(layout) for feature in self._features)

    def pack(self, layout: BatchLayout, plan: Any, draws: DrawInputs | None, buffer: NDArray[np.int32]) -> None:
        """Write a step into `buffer` [num_words_for(layout)] int32; `plan` is by the attention backend."""
        buffer[: self.num_words] = 0
        to = self.views(buffer)
        step = HostStep(layout, plan, draws, self._num_decodes)
        for feature in self._features:
            feature.fill(to, step)


class SampleInputs(StepFeature):
    """sample_rows: rows of the flat batch to compute logits for; then the inputs of `DrawTensors`."""

    inputs = StepInput("sample_rows", np.int64, ("samples",)), *DRAW_INPUTS

    def fill(self, to: Any, step: HostStep) -> None:
        rows = step.layout.sample_rows
        real = step.layout.num_decodes
        to.sample_rows[: len(rows)] = rows + (step.num_decodes - real) * (rows >= real)
        if step.draws is not None:
            for part, values in zip(draw_tensors(to), step.draws, strict=True):
                part[: len(values)] = values


def draw_tensors(inputs: Any, num_samples: int | None = None) -> DrawTensors:
    """Inputs of the draw in a packed step, for its first samples; arrays on the host."""
    return DrawTensors(*(getattr(inputs, name)[:num_samples] for name in DrawTensors._fields))


class RowInputs(StepFeature):
    """Token ids (-1 - i for the i-th token that the previous step samples), positions and slots of the rows.

    Args:
        kind_groups: the cache group of each kind of layers; slot_mapping has a row for each. Empty for one group.
    """

    def __init__(self, kind_groups: Sequence[int] = ()) -> None:
        self._kind_groups = kind_groups
        slots: tuple[int | str, ...] = (len(kind_groups), "rows") if kind_groups else ("rows",)
        self.inputs = (
            StepInput("token_ids", np.int64, ("rows",)),
            StepInput("positions", np.int64, ("rows",)),
            StepInput("slot_mapping", np.int64, slots),
        )

    def fill(self, to: Any, step: HostStep) -> None:
        layout = step.layout
        real = step.layout.num_decodes
        padded = step.num_decodes
        slots = to.slot_mapping if self._kind_groups else [to.slot_mapping]
        layouts = layout, *layout.others  # layouts of all groups
        slots_of_kinds = [layouts[group].slot_mapping for group in self._kind_groups or (0,)]
        values = layout.token_ids, layout.positions, *slots_of_kinds
        for rows, of_layout in zip((to.token_ids, to.positions, *slots), values, strict=True):
            rows[:real] = of_layout[:real]
            rows[padded : padded + layout.num_tokens - real] = of_layout[real:]


class StateInputs(StepFeature):
    """Slots of the decodes' recurrent states; the null block for padding, and to read where a sequence begins."""

    inputs = StepInput("state_reads", np.int64, ("decodes",)), StepInput("state_writes", np.int64, ("decodes",))

    def fill(self, to: Any, step: HostStep) -> None:
        states = step.layout.others[-1]
        real = step.layout.num_decodes
        assert states.state_reads is not None and states.state_writes is not None
        to.state_reads[:real], to.state_writes[:real] = states.state_reads[:real], states.state_writes[:real]
