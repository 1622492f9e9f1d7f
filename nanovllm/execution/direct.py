"""Runs a step without graphs: new tensors for each step, layers launched one by one from the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention.operator import AttentionBackend, AttentionPlan, AttentionStep
from nanovllm.core.batch import NULL_BLOCK, ScheduledBatch
from nanovllm.core.batch_layout import BatchLayout
from nanovllm.model.binding import ModelBinding
from nanovllm.sampling.sampler import Sampler, StepReport


class DirectExecutor:
    """Serves every backend but a GPU's `flex`, with compiled layers or not."""

    def __init__(
        self,
        binding: ModelBinding,
        backend: AttentionBackend,
        block_size: int,
        sampler: Sampler,
        kind_groups: Sequence[int] = (),
    ) -> None:
        self.backend = backend
        self._kind_groups = kind_groups  # the cache group of each kind of layer, where there are several groups
        self._binding = binding
        self._block_size = block_size
        self._sampler = sampler
        self._sampled: Tensor | None = None  # [num_samples] int64, of the step before
        self._null_block_is_dirty = False

    def launch(
        self, batch: ScheduledBatch, layout: BatchLayout, plan: AttentionPlan, report: StepReport | None
    ) -> Callable[[], Tensor]:
        """Compute a step with the masks `plan`; returns its draw: of tokens [num_samples] int64, on the device.

        Args:
            report: None if every sequence is plain.
        """
        binding, device, num_tokens = self._binding, self._binding.device, layout.num_tokens
        num_rows = max(binding.min_rows, num_tokens)  # padding writes to the null block
        layouts = layout, *layout.others  # of each group
        slots_of_kinds = [layouts[group].slot_mapping for group in self._kind_groups or (0,)]
        values = layout.token_ids, layout.positions, *slots_of_kinds
        inputs = np.zeros((len(values), num_rows), np.int64)
        inputs[:, :num_tokens] = values
        token_ids, positions, *_ = rows = torch.from_numpy(inputs).to(device)
        slot_mapping = rows[2:] if self._kind_groups else rows[2]
        if self._sampled is not None and layout.token_ids.min() < 0:
            token_ids = with_sampled(token_ids, self._sampled)
        if batch.copies:
            binding.caches.copy_blocks(batch.copies, self._block_size)
        if self.backend.reads_whole_blocks:
            for group, of_group in enumerate(layouts):
                # The blocks that this step begins and does not fill, and the null block after padding wrote to it.
                blocks = of_group.blocks_to_clear
                if self._null_block_is_dirty:
                    blocks = np.append(blocks, NULL_BLOCK)
                if len(blocks):
                    binding.caches.clear_blocks(torch.from_numpy(blocks).to(device), self._block_size, group=group)
            self._null_block_is_dirty = num_rows > num_tokens
        sample_rows = torch.from_numpy(layout.sample_rows).to(device)
        step = AttentionStep(plan, num_tokens)
        binding.mixers.begin_step(layouts[-1], device)
        logits = binding.forward_step(step, token_ids, positions, slot_mapping, sample_rows, report)
        return partial(self._draw, logits, batch, layout, report)

    def _draw(self, logits: Tensor, batch: ScheduledBatch, layout: BatchLayout, report: StepReport | None) -> Tensor:
        with torch.no_grad():
            sampler, sequences = self._sampler, batch.sampling
            if report is not None and not report.needs_logits:  # embeddings have no tokens
                self._sampled = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
                return self._sampled
            inputs = None if report is None else sampler.stage.inputs(layout, sequences, self._sampled)
            positions = layout.sampled_positions.tolist()
            self._sampled = sampler.sample(logits, sequences, positions, inputs, report)
        return self._sampled

    def model_changed(self, *, in_place: bool) -> None:
        """Nothing to drop: no state of the model is kept."""

    def close(self) -> None:
        """Nothing to free."""


def with_sampled(token_ids: Tensor, sampled: Tensor) -> Tensor:
    """token_ids [num_rows] with -1 - i replaced by the i-th token of `sampled`.

    A request with non-finite logits continues with token 0 until the step is read, and then ends.
    """
    indices = (-1 - token_ids).clamp_(0, len(sampled) - 1)
    return torch.where(token_ids < 0, sampled[indices].clamp_(min=0), token_ids)
