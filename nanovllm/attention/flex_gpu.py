"""Attention on a GPU: one call for the decodes of a step, one for its chunks, by FlexAttention (Dong et al. 2024).

Decodes go to `kernels/paged_decode.py` where it exists, else to `flex_decodes.py`. In both calls the block mask is the
block table::

    decode   batch dimension = sequences, one row a query head    partial: all KV tiles of its blocks, to the last slot
    chunk    tiles of block_size rows, longest context first      full: the blocks before  partial: its own block

A chunk's row at position q is row q % block_size of its block's tile, so it sees its own block diagonally,
`kv % block_size <= row % block_size`, and nothing is captured. All tables keep their addresses, so that a captured CUDA
graph reads those of its step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from nanovllm.attention.block_mask import forward_mask, own_code
from nanovllm.attention.flex_decodes import FlexDecodes
from nanovllm.attention.flex_gpu_options import KernelOptions
from nanovllm.attention.shared_prefixes import SharedPrefixes, SharingRule
from nanovllm.attention.tiles import Tiles
from nanovllm.batch_layout import BatchLayout
from nanovllm.layer_traits import LayerTraits


class GpuFlexAttention:
    """The `flex` and `flash` backends on a GPU. One instance serves every layer of an engine.

    Args:
        options: of the kernels, for the model and the GPU.
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
        self._options = options
        self.block_size = options.block_size
        self._max_blocks = max_blocks
        width = max_blocks + 1  # a kernel may read one index past the last
        chunk_width = num_blocks if uses_flash else width

        def table(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._kernel: Any = options.decode_kernel(max_decodes, device)
        self._flex: FlexDecodes | None = None
        self._sharing: SharingRule | None = None
        if self._kernel is not None:
            if self._kernel.bundle_members > 1:
                token_bytes = 2 * options.num_kv_heads * options.head_bytes
                self._sharing = SharingRule.for_heads(self._kernel.bundle_members, token_bytes)
        else:
            self._flex = FlexDecodes(options, max_decodes=max_decodes, max_blocks=max_blocks, device=device)
        with torch.inference_mode(False):
            self._chunk = _ChunkTables(
                table(1, 1, max_tiles), table(1, 1, max_tiles, chunk_width), table(1, 1, max_tiles),
                table(1, 1, max_tiles, chunk_width),
            )  # fmt: skip
        self._uses_flash = uses_flash
        self.compiles_each_size = uses_flash or self._flex is not None  # of the tiles, or of the decodes
        self._chunk_calls: dict[int, _ChunkCall] = {}
        self._fill_tiles = torch.compile(own_code(_fill_tiles), fullgraph=True, dynamic=True)

    @staticmethod
    def supports(traits: LayerTraits) -> str | None:
        """What of a layer this backend cannot compute, in words; None if it serves it."""
        return traits.first_beyond()

    def plan(self, layout: BatchLayout) -> Tiles:
        """The host's part of the block masks; `fill` does the rest on the device."""
        prefixes = None
        if self._sharing is not None and layout.num_decodes:
            rule = self._sharing._replace(max_bundles=self._kernel.most_bundles(layout.num_decodes))
            prefixes = SharedPrefixes.from_layout(layout, self.block_size, rule)
        return Tiles.from_layout(layout, self.block_size, prefixes)

    def fill(self, step: StepTables) -> GpuFlexPlan:
        """Fill the block masks' tables on the device; they are overwritten by the next step's."""
        if len(step.decode_blocks):
            decodes = step.tables, step.decode_tables, step.decode_blocks, step.decode_positions
            if self._flex is None:
                self._kernel.fill(*decodes, (step.shared_blocks, step.members, step.shared_bundles))
            else:
                self._flex.fill(*decodes)
        if len(step.tile_blocks):
            self._fill_tiles(
                self._chunk.parts(),
                step.tables,
                step.tile_tables,
                step.tile_blocks,
                step.tile_is_used,
                self._max_blocks,
            )
        return GpuFlexPlan(self, step)

    def attend_decodes(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scaling: float, output: Tensor | None = None
    ) -> Tensor:
        """query [num_decodes, num_heads, head_dim]; returns the same shape, in `output` if there is one."""
        decodes = self._kernel if self._flex is None else self._flex
        attended: Tensor = decodes.attend(query, key_cache, value_cache, scaling, output)
        return attended

    def attend_tiles(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """query [num_tiles * block_size, num_heads, head_dim]."""
        fixed_rows = len(query) if self._uses_flash else 0
        call = self._chunk_calls.get(fixed_rows)
        if call is None:
            options: dict[str, Any] = {"BACKEND": "FLASH"}
            if not self._uses_flash:
                options = self._options.for_chunks()
            call = self._chunk_calls[fixed_rows] = _ChunkCall(self.block_size, options, fixed_rows=fixed_rows > 0)
        return call(query, keys, values, self._chunk, scaling)


@dataclass(frozen=True, slots=True)
class StepTables:
    """The inputs of a step's block masks, int32 on the device unless said otherwise.

    tables: the block tables of the step's sequences, concatenated.
    decode_tables: [num_decodes], start of each one's block table.
    decode_blocks: [num_decodes], blocks that it sees; 0 for padding.
    decode_positions: [num_decodes] int64, of its token.
    shared_blocks: [num_decodes], blocks at the head of its table that its bundle reads for it.
    members: [num_decodes], decodes of such bundles, bundle by bundle.
    shared_bundles: [num_decodes // 2, 4], of each bundle the index of its first member, number of members, number of
        blocks, start of its block table; 0 for padding.
    tile_tables: [num_tiles], start of the block table of each one's sequence.
    tile_blocks: [num_tiles], which of the sequence's blocks it is.
    tile_is_used: [num_tiles], 1, or 0 for padding.
    tile_rows: [num_tiles * block_size], the row of the flat batch in each row of the tiles.
    chunk_rows: [num_chunk_rows], the row of the tiles of each row of the flat batch behind the decodes.
    """

    tables: Tensor
    decode_tables: Tensor
    decode_blocks: Tensor
    decode_positions: Tensor
    shared_blocks: Tensor
    members: Tensor
    shared_bundles: Tensor
    tile_tables: Tensor
    tile_blocks: Tensor
    tile_is_used: Tensor
    tile_rows: Tensor
    chunk_rows: Tensor


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
            return self.backend.attend_decodes(query, key_cache, value_cache, scaling)
        output = torch.empty_like(query)
        if count:
            self.backend.attend_decodes(query[:count], key_cache, value_cache, scaling, output[:count])
        keys = key_cache.transpose(0, 1)[None]  # [1, num_kv_heads, num_slots, head_dim], a view
        values = value_cache.transpose(0, 1)[None]
        tiles = self.backend.attend_tiles(query.index_select(0, tile_rows), keys, values, scaling)
        torch.index_select(tiles, 0, self.step.chunk_rows, out=output[count:])
        return output


@dataclass(frozen=True, slots=True)
class _ChunkTables:
    num_own: Tensor  # [1, 1, num_tiles]
    own_block: Tensor  # [1, 1, num_tiles, width], of which the first column counts
    num_full: Tensor  # [1, 1, num_tiles]
    full_blocks: Tensor  # [1, 1, num_tiles, width]

    def parts(self) -> tuple[Tensor, ...]:
        return self.num_own, self.own_block, self.num_full, self.full_blocks


def _fill_tiles(
    to: tuple[Tensor, ...], tables: Tensor, starts: Tensor, blocks: Tensor, is_used: Tensor, max_blocks: int
) -> None:
    """`to` is a `_ChunkTables`."""
    num_own, own_block, num_full, full_blocks = to
    num_tiles = len(starts)
    num_own[0, 0, :num_tiles] = is_used
    own_block[0, 0, :num_tiles, 0] = tables[starts + blocks]
    num_full[0, 0, :num_tiles] = blocks
    width = min(max_blocks + 1, full_blocks.shape[3])
    columns = torch.arange(width, dtype=torch.int32, device=tables.device)
    full_blocks[0, 0, :num_tiles, :width] = tables[(starts[:, None] + columns).clamp(max=len(tables) - 1)]


class _ChunkCall(nn.Module):
    """FlexAttention for any number of tiles of `block_size` rows, or for a fixed one."""

    def __init__(self, block_size: int, options: dict[str, Any], *, fixed_rows: bool) -> None:
        super().__init__()
        self.block_size = block_size
        self.options = options
        self.fixed_rows = fixed_rows
        # Nothing but the number of rows may become a symbol; see `flex_cpu.py`.
        self._compiled = torch.compile(own_code(_attend_tiles), fullgraph=True, dynamic=False)

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, tables: _ChunkTables, scaling: float) -> Tensor:
        query = query.transpose(0, 1)[None]  # [1, num_heads, num_tiles * block_size, head_dim], a view
        if not self.fixed_rows:
            torch._dynamo.mark_dynamic(query, 2)
        with torch._C._AutoDispatchBelowADInplaceOrView():  # as above
            return self._compiled(self, query, keys, values, tables.parts(), scaling)[0].transpose(0, 1)


def _attend_tiles(
    call: _ChunkCall, query: Tensor, keys: Tensor, values: Tensor, tables: tuple[Tensor, ...], scaling: float
) -> Tensor:
    block_size = call.block_size

    def is_not_later(batch, head, row, slot):
        return slot % block_size <= row % block_size

    num_own, own_block, num_full, full_blocks = (table[:, :, : query.shape[2] // block_size] for table in tables)
    block_mask = forward_mask(
        (query.shape[2], keys.shape[2]),
        (num_own, own_block),
        (num_full, full_blocks),
        (block_size, block_size),
        is_not_later,
    )
    options: Any = call.options
    attended: Any = flex_attention(
        query, keys, values, block_mask=block_mask, scale=scaling, enable_gqa=True, kernel_options=options
    )
    return attended
