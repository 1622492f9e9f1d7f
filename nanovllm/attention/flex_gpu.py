"""Attention on a GPU: one call for the decodes of a step, one for its chunks, by FlexAttention (Dong et al. 2024).

Decodes go to `kernels/paged_decode.py` where it exists, else to `flex_decodes.py`. In both calls the block mask is the
block table::

    decode   batch dimension = sequences, one row a query head    partial: all KV tiles of its blocks, to the last slot
    chunk    tiles of block_size rows, longest context first      full: the blocks before  partial: its own block

A chunk's row at position q is row q % block_size of its block's tile, so it sees its own block diagonally,
`kv % block_size <= row % block_size`, and nothing is captured. Layers with a window, or attention in chunks, list no
more than they see. All tables keep their addresses, so that a captured CUDA graph reads those of its step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanovllm.attention.flex_chunks import FlexChunks
from nanovllm.attention.flex_decodes import FlexDecodes
from nanovllm.attention.flex_gpu_options import MIN_HEAD_DIM, KernelOptions
from nanovllm.attention.shared_prefixes import SharedPrefixes, SharingRule
from nanovllm.attention.step_tables import StepTables, TableInputs
from nanovllm.attention.tiles import Tiles
from nanovllm.cache.kinds import LayerTraits
from nanovllm.core.batch_layout import BatchLayout


class GpuFlexAttention:
    """The `flex` and `flash` backends on a GPU, for layers of one kind.

    Args:
        options: of the kernels, for the layers and the GPU.
        max_decodes, max_tiles: bounds of a step.
        max_blocks: bound of a sequence's blocks.
        num_blocks: blocks of the cache.
        uses_flash: compute chunks by the FLASH backend; see `flash.py`.
    """

    def __init__(
        self,
        *,
        options: KernelOptions,
        max_decodes: int,
        max_tiles: int,
        max_blocks: int,
        num_blocks: int,
        uses_flash: bool,
        device: torch.device,
    ) -> None:
        self.block_size = options.block_size
        self.inputs = TableInputs(options.block_size)  # of a packed step, which `fill` reads
        self._kernel: Any = options.decode_kernel(max_decodes, device)
        self._flex: FlexDecodes | None = None
        self._sharing: SharingRule | None = None
        if self._kernel is not None:
            if self._kernel.bundle_members > 1 and options.sight.is_full:
                token_bytes = 2 * options.num_kv_heads * options.head_bytes
                self._sharing = SharingRule.for_heads(self._kernel.bundle_members, token_bytes)
        else:
            self._flex = FlexDecodes(options, max_decodes=max_decodes, max_blocks=max_blocks, device=device)
        self._chunks = FlexChunks(
            options, max_tiles=max_tiles, max_blocks=max_blocks, num_blocks=num_blocks, uses_flash=uses_flash,
            device=device,
        )  # fmt: skip
        self.compiles_each_size = uses_flash or self._flex is not None  # of the tiles, or of the decodes

    @staticmethod
    def supports(traits: LayerTraits) -> str | None:
        """What of a layer this backend cannot compute, in words; None if it serves it."""
        if min(traits.head_dim, traits.value_dim) < MIN_HEAD_DIM:
            return (
                f"heads of {min(traits.head_dim, traits.value_dim)} elements, of {MIN_HEAD_DIM} that it takes at least"
            )
        return traits.first_beyond("window", "chunk", "softcap", "sinks", "widths")

    def plan(self, layout: BatchLayout) -> Tiles:
        """The host's part of the block masks; `fill` does the rest on the device."""
        prefixes = None
        if self._sharing is not None and layout.num_decodes:
            rule = self._sharing._replace(max_bundles=self._kernel.most_bundles(layout.num_decodes))
            prefixes = SharedPrefixes.from_layout(layout, self.block_size, rule)
        return Tiles.from_layout(layout, self.block_size, prefixes)

    @property
    def shares(self) -> bool:
        """Whether decodes read blocks together that their tables begin with."""
        return self._sharing is not None

    def fill(self, inputs: Any, group: int | None = None, *, shares: bool = True) -> GpuFlexPlan:
        """Fill the block masks' tables on the device; they are overwritten by the next step's.

        Args:
            inputs: of the packed step, by name, on the device.
            group: whose block tables, of several cache groups.
            shares: whether `plan` was asked which decodes read blocks together.
        """
        step = StepTables.from_inputs(inputs, group)
        if len(step.decode_blocks):
            decodes = step.tables, step.decode_tables, step.decode_blocks, step.decode_positions
            if self._flex is None:
                self._kernel.fill(*decodes, step.sharing if shares else None)
            else:
                self._flex.fill(*decodes)
        if len(step.tile_blocks):
            self._chunks.fill(step.tables, step.tile_tables, step.tile_blocks, step.tile_is_used)
        return GpuFlexPlan(self, step)

    def attend_decodes(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scaling: float,
        output: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """query [num_decodes, num_heads, head_dim]; returns [num_decodes, num_heads, value_dim], in `output` if any."""
        decodes = self._kernel if self._flex is None else self._flex
        attended: Tensor = decodes.attend(query, key_cache, value_cache, scaling, output, sinks)
        return attended

    def attend_tiles(
        self, query: Tensor, keys: Tensor, values: Tensor, scaling: float, sinks: Tensor | None = None
    ) -> Tensor:
        """query [num_tiles * block_size, num_heads, head_dim]."""
        return self._chunks.attend(query, keys, values, scaling, sinks)


@dataclass(frozen=True, slots=True)
class GpuFlexPlan:
    """One step's attention; `attend` is called once a layer."""

    backend: GpuFlexAttention
    step: StepTables

    @property
    def num_decodes(self) -> int:
        """Padding included."""
        return len(self.step.decode_blocks)

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scaling: float,
        kind: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionPlan`."""
        count, tile_rows = self.num_decodes, self.step.tile_rows
        if not len(tile_rows):
            return self.backend.attend_decodes(query, key_cache, value_cache, scaling, None, sinks)
        output = query.new_empty(*query.shape[:2], value_cache.shape[2])
        if count:
            self.backend.attend_decodes(query[:count], key_cache, value_cache, scaling, output[:count], sinks)
        keys = key_cache.transpose(0, 1)[None]  # [1, num_kv_heads, num_slots, head_dim], a view
        values = value_cache.transpose(0, 1)[None]
        tiles = self.backend.attend_tiles(query.index_select(0, tile_rows), keys, values, scaling, sinks)
        torch.index_select(tiles, 0, self.step.chunk_rows, out=output[count:])
        return output
