"""Runs a step as it comes: tensors of its own for each step, layers called one after the other from the host."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention.operator import AttentionPlan, AttentionStep
from nanovllm.batch import ScheduledBatch
from nanovllm.batch_layout import BatchLayout
from nanovllm.block_manager import NULL_BLOCK
from nanovllm.execution.graph_inputs import with_sampled
from nanovllm.model.binding import ModelBinding
from nanovllm.sampling.logprobs import StepReport
from nanovllm.sampling.penalties import LatestTokens
from nanovllm.sampling.sampler import Sampler


class AttentionForm(Protocol):
    reads_whole_pages: bool  # masked slots too, which must then hold finite values

    def plan(self, layout: BatchLayout) -> AttentionPlan: ...


class DirectExecutor:
    """Every form of attention on every device, compiled layers or not.

    Args:
        form: of attention; its plans serve all layers.
    """

    def __init__(self, binding: ModelBinding, form: AttentionForm, block_size: int, sampler: Sampler) -> None:
        self.form = form
        self._binding = binding
        self._block_size = block_size
        self._sampler = sampler
        self._sampled: Tensor | None = None  # [num_samples] int64, of the step before
        self._null_block_is_dirty = False

    def launch(self, batch: ScheduledBatch, layout: BatchLayout, report: StepReport) -> Tensor:
        """Compute a step; returns its sampled tokens [num_samples] int64, on the device."""
        logits = self._forward(layout, report)
        with torch.no_grad():
            latest = LatestTokens(layout.token_ids[layout.sample_rows], self._sampled)
            self._sampled = self._sampler.sample(logits, batch.sampling, batch.sampled_positions, latest, report)
        return self._sampled

    def model_changed(self, *, in_place: bool) -> None:
        """Nothing of the model is held here."""

    def close(self) -> None:
        """Nothing is held but the form."""

    def _forward(self, layout: BatchLayout, report: StepReport) -> Tensor:
        """Logits [num_samples, vocab_size] of a laid-out step."""
        binding, device, num_tokens = self._binding, self._binding.device, layout.num_tokens
        # One row would be compiled as a special case, so compiled layers get two; the padding writes to the null block.
        num_rows = max(2 if binding.has_compiled_layers else 1, num_tokens)
        inputs = np.zeros((3, num_rows), np.int64)
        inputs[:, :num_tokens] = layout.token_ids, layout.positions, layout.slots
        token_ids, positions, slots = torch.from_numpy(inputs).to(device)
        if self._sampled is not None and layout.token_ids.min() < 0:
            token_ids = with_sampled(token_ids, self._sampled)
        self._clear(layout, is_padded=num_rows > num_tokens)
        sample_rows = torch.from_numpy(layout.sample_rows).to(device)
        step = AttentionStep(self.form.plan(layout), num_tokens)
        return binding.forward_step(step, token_ids, positions, slots, sample_rows, report)

    def _clear(self, layout: BatchLayout, *, is_padded: bool) -> None:
        """Blocks that this step begins and does not fill, and what padding left in the null block."""
        if not self.form.reads_whole_pages:
            return
        blocks = layout.blocks_to_clear
        if self._null_block_is_dirty:
            blocks = np.append(blocks, NULL_BLOCK)
        if len(blocks):
            self._binding.caches.clear_blocks(torch.from_numpy(blocks).to(self._binding.device), self._block_size)
        self._null_block_is_dirty = is_padded
