"""Heads on a GPU: their inputs of a packed step, and their own steps in CUDA graphs, one for each draft.

The graphs read the packed inputs and the tokens drawn before, and write both tokens and states to fixed addresses, so
the draws of one draft are the inputs of the next and never leave the device in between.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence as SequenceABC
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.fast.gpu.step_inputs import draw_tensors
from nanovllm.features.costs.buckets import GraphShape
from nanovllm.features.packed_steps import HostStep, StepFeature, StepInput
from nanovllm.layout import BatchLayout
from nanovllm.sampler import DrawInputs
from nanovllm.sequence import Sequence

logger = logging.getLogger("nanovllm")

STEPS_TO_CAPTURE = 8  # steps of a shape without a graph; the last one waits for the capture


class HeadInputs(StepFeature):
    """See `HeadLayer.places`."""

    inputs = StepInput("head_sources", np.int64, ("rows",)), StepInput("head_targets", np.int64, ("rows",))

    def __init__(self, head: Any, block_size: int, pools: Any) -> None:
        head.allocate(block_size)
        self._head = head
        self._block_size = block_size
        self._group = head.group_in(pools)

    def fill(self, to: Any, step: HostStep) -> None:
        layout = (step.layout, *step.layout.others)[self._group]
        sources, targets = self._head.places(layout, self._block_size)
        real = layout.num_decodes
        padded = step.num_decodes
        rows_of_step = sources[real:] < -1
        sources[real:] -= (padded - real) * rows_of_step  # chunks come after the padding of decodes
        end = padded + len(sources) - real
        for rows, values in ((to.head_sources, sources), (to.head_targets, targets)):
            rows[:real] = values[:real]
            rows[padded:end] = values[real:]


class DraftGraphs:
    """Steps of a head alone, by an engine's `GraphExecutor`; nothing may be in flight."""

    def __init__(self, executor: Any, head: Any) -> None:
        self._executor = executor
        self._head = head
        self._graphs: dict[tuple[GraphShape, bool], Any] = {}
        self._num_steps: Counter[tuple[GraphShape, bool]] = Counter()
        size = executor._buckets.max_decodes
        with torch.inference_mode(False):
            self._before = head.new_states(size)
            self._after = head.new_states(size)
        self._inner_drop = executor._drop_graphs
        vars(executor).update(_drop_graphs=self._drop_graphs, close=self._drop_graphs)

    def step(
        self, layout: BatchLayout, sequences: SequenceABC[Sequence], drawn: Tensor | None, before: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `HeadDrafter`; both results are valid until the next call.

        Args:
            drawn: draws that the last call returned, or None.
        """
        executor = self._executor
        count = len(sequences)
        draws = DrawInputs.from_sequences(sequences, layout.sampled_positions.tolist())
        tiles = executor.backend.plan(layout)
        shape = executor._buckets.shape(layout, len(tiles.blocks), is_wide=tiles.has_wide_groups)
        key = shape, draws.has_filters()
        run = partial(self._compute, *key)
        if executor._captures and self._is_due(key):
            self._graphs[key] = executor._capture(shape, run)
        before = before.clone()  # states of the last call, which this one overwrites
        executor._upload(shape, layout, tiles, draws)
        with torch.no_grad():
            self._before[executor._draw_inputs.sample_rows[:count]] = before
            executor._run(self._graphs.get(key), run)
        return executor._sampled[:count], self._after[:count]

    def _is_due(self, key: tuple[GraphShape, bool]) -> bool:
        self._num_steps[key] += 1
        return self._num_steps[key] == STEPS_TO_CAPTURE

    def _compute(self, shape: GraphShape, has_filters: bool) -> None:
        executor = self._executor
        step, token_ids, positions, slot_mapping = executor._attention_step(shape)
        self._head.sources = self._head.targets = None
        count = shape.num_decodes
        before = self._before[: shape.num_rows]
        with torch.no_grad():
            logits, states = executor._binding.compute_step(
                self._head.draft, step, token_ids, positions, slot_mapping, before
            )
            rows = executor._draw_inputs.sample_rows[:count]
            self._after[:count].copy_(states.index_select(0, rows))
            inputs = draw_tensors(executor._draw_inputs, count)
            drawn = executor._sampler.draw(logits.index_select(0, rows), inputs, has_filters=has_filters)
            executor._sampled[:count].copy_(drawn)

    def _drop_graphs(self) -> None:
        if self._graphs:
            self._executor._pool.synchronize()
            self._graphs.clear()
        self._num_steps.clear()
        self._inner_drop()
