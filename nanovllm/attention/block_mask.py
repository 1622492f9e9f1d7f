"""Block masks of hand-built tables for compiled FlexAttention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
