"""In place of attention, where a step is run for the memory that it takes."""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.batch_layout import BatchLayout
from nanovllm.execution.direct import AttentionForm


class NoAttention:
    """For measuring what the rest of a step takes."""

    reads_whole_pages = False

    def plan(self, layout: BatchLayout) -> NoAttention:
        return self

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scaling: float) -> Tensor:
        return torch.zeros_like(query)


class AttendsInOneLayer(NoAttention):
    """For measuring what all of a step takes: one layer's attention tells it, and all of them may take seconds."""

    def __init__(self, form: AttentionForm) -> None:
        self._form = form
        self._attend = super().attend

    def plan(self, layout: BatchLayout) -> NoAttention:
        self._attend = self._form.plan(layout).attend
        return self

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scaling: float) -> Tensor:
        attend, self._attend = self._attend, super().attend
        return attend(query, key_cache, value_cache, scaling)
