"""For compiled FlexAttention: block masks of hand-built tables, score caps, attention sinks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask


def forward_mask(
    seq_lengths: tuple[int, int],
    partial: tuple[Tensor, Tensor],
    full: tuple[Tensor, Tensor] | tuple[None, None],
    block_size: tuple[int, int],
    mask_mod: Callable[..., Any],
) -> BlockMask:
    """A block mask of hand-built tables, for forward passes alone.

    Args:
        partial, full: counts [batch, heads, num_tiles] int32 and blocks [batch, heads, num_tiles, width] int32 of the
            blocks seen in part and whole.
        block_size: rows of a tile, slots of a block.
    """
    return BlockMask(
        seq_lengths=seq_lengths,
        kv_num_blocks=partial[0],
        kv_indices=partial[1],
        full_kv_num_blocks=full[0],
        full_kv_indices=full[1],
        q_num_blocks=None,
        q_indices=None,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=block_size,
        mask_mod=mask_mod,
    )


def first_seen_on_device(positions: Tensor, window: int | None, chunk: int | None) -> Tensor:
    """`StateKind.first_seen` for positions of any integer dtype, within compiled code."""
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
