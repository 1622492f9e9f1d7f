"""FlexAttention on a GPU: one call for the decodes of a step, one for its chunks; the block mask is the block table.

::

    decode   batch dimension = sequences, one row a query head    partial: all KV tiles of its blocks, to the last slot
    chunk    tiles of block_size rows, longest context first      full: the blocks before  partial: its own block

A decode lists all that it sees as partial, since the kernel splits only that list among programs; the mask hides the
unused slots of the last KV tile, which are read for nothing: so KV tiles may be smaller than blocks. A chunk's row at
position q is row q % block_size of its block's tile, so it sees its own block diagonally,
`kv % block_size <= row % block_size`, and nothing is captured. All tables keep their addresses, so that a captured CUDA
graph reads those of its step. FlexAttention: Dong et al. 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from nanovllm.attention.block_mask import forward_mask, own_code
from nanovllm.attention.flex_gpu_options import MAX_SPLITS, MIN_KV_TILE, DecodeOptions, KernelOptions
from nanovllm.attention.tiles import Tiles
from nanovllm.batch_layout import BatchLayout

# The parts of a split decode are put together by one kernel, instead of three that hand small tensors on.
DECODE_COMPILER: Any = {
    "unroll_reductions_threshold": 2 * MAX_SPLITS, "realize_reads_threshold": 128, "realize_opcount_threshold": 4096,
}  # fmt: skip
# The kernels want the sparse block of queries to be a multiple of their tile; a decode has one row a head.
_DECODE_QUERY_BLOCK = 128


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
        self.block_size = block_size = options.block_size
        self.num_kv_heads = options.num_kv_heads
        self._max_blocks = max_blocks
        width = max_blocks + 1  # a kernel may read one index past the last
        chunk_width = num_blocks if uses_flash else width

        def table(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        kv_tiles = max_blocks * max(1, block_size // MIN_KV_TILE) + 1
        with torch.inference_mode(False):
            self._decode = _DecodeTables(
                table(max_decodes, 1, 1), table(max_decodes, 1, 1, kv_tiles), table(max_decodes), table(max_decodes)
            )
            self._chunk = _ChunkTables(
                table(1, 1, max_tiles), table(1, 1, max_tiles, chunk_width), table(1, 1, max_tiles),
                table(1, 1, max_tiles, chunk_width),
            )  # fmt: skip
        self._uses_flash = uses_flash
        self._decode_calls: dict[tuple[int, bool], _DecodeCall] = {}
        self._chunk_calls: dict[int, _ChunkCall] = {}
        self._fill_decodes, self._fill_tiles = (
            torch.compile(own_code(fill), fullgraph=True, dynamic=True) for fill in (_fill_decodes, _fill_tiles)
        )

    def plan(self, layout: BatchLayout) -> Tiles:
        """The host's part of the block masks; `fill` does the rest on the device."""
        return Tiles.from_layout(layout, self.block_size)

    def fill(self, step: StepTables) -> GpuFlexPlan:
        """Fill the block masks' tables on the device; they are overwritten by the next step's."""
        if len(step.decode_blocks):
            self._fill_decodes(
                self._decode.parts(),
                step.tables,
                step.decode_tables,
                step.decode_blocks,
                step.decode_positions,
                self.block_size,
                self._decode_call(len(step.decode_blocks), step.is_uneven).kv_tile,
            )
        if len(step.tile_blocks):
            self._fill_tiles(
                self._chunk.parts(),
                step.tables,
                step.tile_tables,
                step.tile_blocks,
                step.tile_is_used,
                self._max_blocks,
            )
        return GpuFlexPlan(self, len(step.decode_blocks), step.is_uneven, step.tile_rows, step.chunk_rows)

    def attend_decodes(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float, *, is_uneven: bool) -> Tensor:
        """query [num_decodes, num_heads, head_dim]."""
        num_rows = len(query)
        tables = _DecodeTables(*(table[:num_rows] for table in self._decode.parts()))
        return self._decode_call(num_rows, is_uneven)(query, keys, values, tables, scaling)

    def _decode_call(self, num_rows: int, is_uneven: bool) -> _DecodeCall:
        """The decode kernel wants a fixed batch, so each has a compiled function of its own."""
        call = self._decode_calls.get((num_rows, is_uneven))
        if call is None:
            options = self._options.for_decodes(num_rows, is_uneven=is_uneven)
            call = self._decode_calls[num_rows, is_uneven] = _DecodeCall(self.num_kv_heads, options)
        return call

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
    is_uneven: whether one decode's context is much longer than the others'; see `KernelOptions.is_uneven`.
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
    is_uneven: bool
    tile_tables: Tensor
    tile_blocks: Tensor
    tile_is_used: Tensor
    tile_rows: Tensor
    chunk_rows: Tensor


@dataclass(frozen=True, slots=True)
class GpuFlexPlan:
    """One step's attention; `attend` is called once a layer."""

    backend: GpuFlexAttention
    num_decodes: int
    is_uneven: bool
    tile_rows: Tensor
    chunk_rows: Tensor

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scaling: float) -> Tensor:
        """See `AttentionPlan`."""
        keys = key_cache.transpose(0, 1)[None]  # [1, num_kv_heads, num_slots, head_dim], a view
        values = value_cache.transpose(0, 1)[None]
        count = self.num_decodes
        if not len(self.tile_rows):
            return self.backend.attend_decodes(query, keys, values, scaling, is_uneven=self.is_uneven)
        output = torch.empty_like(query)
        if count:
            decodes = query[:count]
            output[:count] = self.backend.attend_decodes(decodes, keys, values, scaling, is_uneven=self.is_uneven)
        tiles = self.backend.attend_tiles(query.index_select(0, self.tile_rows), keys, values, scaling)
        torch.index_select(tiles, 0, self.chunk_rows, out=output[count:])
        return output


@dataclass(frozen=True, slots=True)
class _DecodeTables:
    num_kv_tiles: Tensor  # [num_decodes, 1, 1]
    kv_tiles: Tensor  # [num_decodes, 1, 1, width], each start slot // tile length
    last_kv_tiles: Tensor  # [num_decodes]
    last_offsets: Tensor  # [num_decodes], of the last slot in use within it

    def parts(self) -> tuple[Tensor, ...]:
        return self.num_kv_tiles, self.kv_tiles, self.last_kv_tiles, self.last_offsets


@dataclass(frozen=True, slots=True)
class _ChunkTables:
    num_own: Tensor  # [1, 1, num_tiles]
    own_block: Tensor  # [1, 1, num_tiles, width], of which the first column counts
    num_full: Tensor  # [1, 1, num_tiles]
    full_blocks: Tensor  # [1, 1, num_tiles, width]

    def parts(self) -> tuple[Tensor, ...]:
        return self.num_own, self.own_block, self.num_full, self.full_blocks


def _fill_decodes(
    to: tuple[Tensor, ...],
    tables: Tensor,
    starts: Tensor,
    counts: Tensor,
    positions: Tensor,
    block_size: int,
    kv_tile: int,
) -> None:
    """`to` is a `_DecodeTables`, which the compiler does not know; `kv_tile` slots make one, and divide a block."""
    num_kv_tiles, kv_tiles, last_kv_tiles, last_offsets = to
    num_rows, in_block = len(starts), block_size // kv_tile
    positions = positions.to(torch.int32)
    num_kv_tiles[:num_rows, 0, 0] = torch.where(counts > 0, positions // kv_tile + 1, 0)
    columns = torch.arange(kv_tiles.shape[3], dtype=torch.int32, device=tables.device)
    blocks = tables[(starts[:, None] + columns // in_block).clamp(max=len(tables) - 1)]
    kv_tiles[:num_rows, 0, 0] = blocks * in_block + columns % in_block
    last_blocks = tables[(starts + counts - 1).clamp(min=0)]
    last_kv_tiles[:num_rows] = last_blocks * in_block + positions // kv_tile % in_block
    last_offsets[:num_rows] = positions % kv_tile


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


class _DecodeCall(nn.Module):
    """FlexAttention for a fixed number of decodes.

    Sizes are attributes of a module because there alone the compiler takes whole numbers as constants.
    """

    def __init__(self, num_kv_heads: int, options: DecodeOptions) -> None:
        super().__init__()
        self.num_kv_heads = num_kv_heads
        self.kv_tile, self.options = options
        self._compiled = torch.compile(
            own_code(_attend_decodes), fullgraph=True, dynamic=False, options=DECODE_COMPILER
        )

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, tables: _DecodeTables, scaling: float) -> Tensor:
        # The first call comes from within the compiler's check of a layer, under a dispatch mode; later ones do not.
        # Compiled code is bound to the dispatch keys in force, so that they are made the same.
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return self._compiled(self, query, keys, values, tables.parts(), scaling)


def _attend_decodes(
    call: _DecodeCall, query: Tensor, keys: Tensor, values: Tensor, tables: tuple[Tensor, ...], scaling: float
) -> Tensor:
    num_kv_tiles, kv_tiles, last_kv_tiles, last_offsets = tables
    kv_tile = call.kv_tile

    def is_used(row, head, _, slot):
        return (slot // kv_tile != last_kv_tiles[row]) | (slot % kv_tile <= last_offsets[row])

    num_rows, num_heads, head_dim = query.shape
    # The decode kernel takes groups of a power of two of query heads; it fills them up to 16 anyway.
    num_groups = num_heads // call.num_kv_heads
    width = 1 << (num_groups - 1).bit_length()
    if width != num_groups:
        query = F.pad(query.view(num_rows, call.num_kv_heads, num_groups, head_dim), (0, 0, 0, width - num_groups))
    block_mask = forward_mask(
        (1, keys.shape[2]),
        (num_kv_tiles, kv_tiles),
        (None, None),
        (_DECODE_QUERY_BLOCK, kv_tile),
        is_used,
    )
    options: Any = call.options
    attended: Any = flex_attention(
        query.reshape(num_rows, call.num_kv_heads * width, 1, head_dim), keys, values,
        block_mask=block_mask, scale=scaling, enable_gqa=True, kernel_options=options,
    )  # fmt: skip
    if width != num_groups:
        attended = attended.view(num_rows, call.num_kv_heads, width, head_dim)[:, :, :num_groups]
    return attended.reshape(num_rows, num_heads, head_dim).contiguous()


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
