"""Windows, attention in chunks, soft-caps and sinks of compiled FlexAttention on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def first_seen_on_device(positions: Tensor, window: int | None, chunk: int | None) -> Tensor:
    """`Sight.first_seen` for positions of any integer dtype, within compiled code."""
    first = torch.zeros_like(positions)
    if window is not None:
        first = torch.maximum(first, positions - (window - 1))
    if chunk is not None:
        first = torch.maximum(first, positions // chunk * chunk)
    return first


def capped(softcap: float) -> Callable[..., Tensor]:
    """A `score_mod` that keeps scores within `softcap`."""

    def cap(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


def with_sinks(attended: Tensor, log_sums: Tensor, sinks: Tensor) -> Tensor:
    """Let a score more a head join the softmax and add nothing to the result.

    Args:
        attended: [..., dim].
        log_sums: [...] float32, logarithms of the sums of exponentials.
        sinks: these scores, of a shape that expands to [...].
    """
    share = torch.sigmoid(log_sums - sinks.float())
    return (attended.float() * share[..., None]).to(attended.dtype)
