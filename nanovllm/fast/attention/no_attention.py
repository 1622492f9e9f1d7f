"""Attention of models that have none."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nanovllm.attention import row_values
from nanovllm.layout import BatchLayout


class NoAttention:
    """The backend of a model without attention, and of measurements of the rest of a step."""

    reads_whole_blocks = False

    def plan(self, layout: BatchLayout) -> NoAttention:
        return self

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, *_: Any) -> Tensor:
        return query.new_zeros(*query.shape[:2], row_values(value_cache))
