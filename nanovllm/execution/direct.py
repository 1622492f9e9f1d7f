"""Runs a step without graphs: tensors of its own for each step, layers called one by one from the host."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention.operator import AttentionBackend, AttentionPlan, AttentionStep
from nanovllm.batch import NULL_BLOCK, ScheduledBatch
from nanovllm.batch_layout import BatchLayout
from nanovllm.execution.graph_inputs import with_sampled
from nanovllm.model.binding import ModelBinding
from nanovllm.sampling.logprobs import StepLogprobs
from nanovllm.sampling.penalties import LatestTokens
from nanovllm.sampling.sampler import Sampler


class DirectExecutor:
    """Serves every backend but a GPU's `flex` and `flash`, with compiled layers or not."""

    def __init__(self, binding: ModelBinding, backend: AttentionBackend, block_size: int, sampler: Sampler) -> None:
        self.backend = backend
        self._binding = binding
        self._block_size = block_size
        self._sampler = sampler
        self._sampled: Tensor | None = None  # [num_samples] int64, of the step before
        self._null_block_is_dirty = False

    def launch(self, batch: ScheduledBatch, layout: BatchLayout, plan: AttentionPlan, report: StepLogprobs) -> Tensor:
        """Compute a step with the masks `plan`; returns its sampled tokens [num_samples] int64, on the device."""
        binding, device, num_tokens = self._binding, self._binding.device, layout.num_tokens
        num_rows = max(binding.min_rows, num_tokens)  # padding writes to the null block
        inputs = np.zeros((3, num_rows), np.int64)
        inputs[:, :num_tokens] = layout.token_ids, layout.positions, layout.slot_mapping
        token_ids, positions, slot_mapping = torch.from_numpy(inputs).to(device)
        if self._sampled is not None and layout.token_ids.min() < 0:
            token_ids = with_sampled(token_ids, self._sampled)
        if self.backend.reads_whole_blocks:
            # The blocks that this step begins and does not fill, and the null block after padding wrote to it.
            blocks = layout.blocks_to_clear
            if self._null_block_is_dirty:
                blocks = np.append(blocks, NULL_BLOCK)
            if len(blocks):
                binding.caches.clear_blocks(torch.from_numpy(blocks).to(device), self._block_size)
            self._null_block_is_dirty = num_rows > num_tokens
        sample_rows = torch.from_numpy(layout.sample_rows).to(device)
        step = AttentionStep(plan, num_tokens)
        logits = binding.forward_step(step, token_ids, positions, slot_mapping, sample_rows, report)
        with torch.no_grad():
            latest = LatestTokens(layout.token_ids[layout.sample_rows], self._sampled)
            positions = layout.sampled_positions.tolist()
            self._sampled = self._sampler.sample(logits, batch.sampling, positions, latest, report)
        return self._sampled

    def model_changed(self, *, in_place: bool) -> None:
        """Nothing of the model is held here."""

    def close(self) -> None:
        """Nothing is held but the backend."""
