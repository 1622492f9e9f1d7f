"""Attention by explicit products in float32, for layers that change scores: soft-caps (Gemma 2), sinks (gpt-oss)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.attention import Scores
from nanovllm.layout import LayerTraits


def scores_of(kinds: Sequence[LayerTraits]) -> list[Scores | None]:
    """`Scores` of each kind of layers; None for a kind that PyTorch's own attention serves."""
    return [
        ChangedScores(traits.softcap) if traits.softcap is not None or traits.has_sinks else None for traits in kinds
    ]


@dataclass(frozen=True, slots=True)
class ChangedScores:
    """See `Scores`."""

    softcap: float | None

    def __call__(
        self, rows: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float, sinks: Tensor | None
    ) -> Tensor:
        scores = torch.matmul(rows.float(), keys.float().transpose(2, 3)[:, :, None]) * scaling
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if mask is not None:
            scores = scores + mask[:, None]
        elif rows.shape[3] > 1:
            scores = scores + rows.new_full(scores.shape[-2:], float("-inf")).triu_(1)
        if sinks is not None:
            column = sinks.float().view(scores.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
            weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return torch.matmul(weights, values.float()[:, :, None]).to(rows.dtype)
