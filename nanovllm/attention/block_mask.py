"""Compiled FlexAttention: block masks and their tables, and a code object for each engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

MIN_TILES = 2  # of a call: one would be compiled as a special case
# Tiles that tables have room for, at least: the compiler refuses a symbol that can only be MIN_TILES.
MIN_TABLE_TILES = MIN_TILES + 1

_numbers = itertools.count()


def own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function around a code object of its own.

    Compiled versions are kept by code object and their number is limited, so that engines which shared one would use
    up each other's share and fall back to uncompiled attention.
    """
    assert isinstance(function, FunctionType)
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


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


class IndexBuffers:
    """The block mask's tables: for each tile, the blocks seen whole and the one block seen in part.

    Columns behind a tile's count keep old block numbers, since a kernel may read one of them ahead.
    """

    def __init__(self, max_tiles: int, width: int, device: torch.device) -> None:
        self.full_blocks = torch.zeros(1, 1, max_tiles, width, dtype=torch.int32, device=device)
        self.num_full = torch.zeros(1, 1, max_tiles, dtype=torch.int32, device=device)
        self.own_block = torch.zeros(1, 1, max_tiles, width, dtype=torch.int32, device=device)
        self.num_own = torch.zeros(1, 1, max_tiles, dtype=torch.int32, device=device)
        self.tables = self.num_own, self.own_block, self.num_full, self.full_blocks

    def fill(self, num_full: NDArray[Any], full_blocks: NDArray[Any], own_blocks: NDArray[Any]) -> int:
        """Set a tile for each count of `num_full`, and up to MIN_TILES that see nothing; returns the number of tiles.

        Args:
            full_blocks: the tiles' blocks seen whole, concatenated.
            own_blocks: the block that each tile sees in part.
        """
        used, num_tiles = len(num_full), max(MIN_TILES, len(num_full))
        device = self.num_full.device
        tiles = np.repeat(np.arange(used), num_full)
        columns = np.arange(len(full_blocks)) - np.repeat(np.cumsum(num_full) - num_full, num_full)
        at = torch.from_numpy(np.stack([tiles, columns])).to(device)
        self.full_blocks[0, 0].index_put_((at[0], at[1]), torch.from_numpy(full_blocks).to(device))
        self.own_block[0, 0, :used, 0] = torch.from_numpy(own_blocks).to(device)
        for counts, of_used in ((self.num_full, torch.from_numpy(num_full).to(device)), (self.num_own, 1)):
            counts[0, 0, :used] = of_used
            counts[0, 0, used:num_tiles] = 0
        return num_tiles
