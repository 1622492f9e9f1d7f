"""Attention of wide groups on Hopper GPUs, in place of `wide_pieces_triton`: `prompt_attention_cuda/5_wide.cu`.

A thread block replaces a Triton program, with the same results in the same places: the query heads of one KV head and
the decodes that share a prefix fill a tile of 128 rows, multiplied as prompts are.
"""

from __future__ import annotations

import math
from ctypes import c_float, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from nanovllm.fast.kernels.prompt_attention import TILE_ROWS, AttentionSizes, HopperAttention


@cache
def open_kernel(sizes: AttentionSizes, device: torch.device) -> WideAttention | None:
    """See `HopperAttention.open`."""
    return WideAttention.open(sizes, device)


class WideAttention(HopperAttention):
    """The kernel of wide groups."""

    name = "wide_attention"
    failure = "attention of wide groups by Triton, since the kernel for Hopper does not run: %s"
    difference = "attention of wide groups by Triton, since the kernel for Hopper differs by %.1e"
    most_buffers = 1

    def attend(
        self,
        query: Tensor,
        caches: tuple[Tensor, Tensor],
        step: tuple[Tensor, Tensor, Tensor, Tensor],
        workspace: tuple[Tensor, Tensor, Tensor | None],
        num_pieces: int,
        scaling: float,
    ) -> None:
        """Write the attention of pieces to the workspace.

        Args:
            query: [num_decodes, num_heads, head_dim], contiguous.
            step: block tables, pieces, members, splits; see `wide_pieces_triton`.
            workspace: outputs, logarithms, arrivals; None if none are counted.
        """
        with torch.cuda.device(self._device):
            self._function.launch(
                num_pieces * self._sizes.num_kv_heads,
                *(self._map(cache, min(self._sizes.block_size, self._sizes.tile_keys)) for cache in caches),
                c_void_p(query.data_ptr()),
                *(c_void_p(part.data_ptr()) for part in step),
                *(c_void_p(None if part is None else part.data_ptr()) for part in workspace),
                c_float(scaling * math.log2(math.e)),
            )

    @torch.inference_mode()
    def error_at_start(self) -> float:
        """See the base class: of outputs, and of logarithms.

        The second piece of a prefix, of two whole tiles and a part of one, for all decodes but one.
        """
        sizes, block = self._sizes, self._sizes.block_size
        groups, generator = sizes.num_heads // sizes.num_kv_heads, torch.Generator(self._device).manual_seed(0)
        num_members, num_blocks = max(1, TILE_ROWS // groups - 1), 2 * TILE_ROWS // block + 1

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=self._device).to(sizes.dtype)

        def integers(values: Any) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self._device)

        tables = torch.arange(num_blocks + 1, 0, -1, dtype=torch.int32, device=self._device)
        caches = [random((num_blocks + 2) * block, sizes.num_kv_heads, width) for width in sizes.widths]
        query = random(num_members + 1, sizes.num_heads, sizes.head_dim) * (sizes.softcap or 1)
        members = torch.arange(num_members, 0, -1, dtype=torch.int32, device=self._device)
        splits = integers([[2 * decode, 2] for decode in range(num_members + 1)])
        pieces = integers([[0, num_members, block, (num_blocks + 1) * block, 0, 1, 0, 0], [0] * 8])
        outputs = query.new_zeros(2 * len(query), sizes.num_heads, sizes.widths[1], dtype=torch.float32)
        logarithms = outputs.new_zeros(outputs.shape[:2])
        step = tables, pieces, members, splits
        scaling = sizes.head_dim**-0.5
        self.attend(query, (caches[0], caches[1]), step, (outputs, logarithms, None), 2, scaling)
        slots = (tables[1:, None] * block + torch.arange(block, device=self._device)).flatten()
        keys, values = (part[slots].float() for part in caches)
        grouped = query[1:].float().unflatten(1, (sizes.num_kv_heads, groups))
        scores = torch.einsum("qkgd,skd->qkgs", grouped, keys) * scaling
        if sizes.softcap is not None:
            scores = sizes.softcap * torch.tanh(scores / sizes.softcap)
        attended = torch.einsum("qkgs,skd->qkgd", scores.softmax(3), values).flatten(1, 2)
        sums = scores.logsumexp(3).flatten(1, 2) * math.log2(math.e)
        pairs = (outputs[3::2], attended), (logarithms[3::2], sums)
        errors = [float((found - right).abs().max() / right.abs().max()) for found, right in pairs]
        return max(errors) if all(error >= 0.0 for error in errors) else math.nan
