"""Compiled FlexAttention over hand-built block masks: the block mask is the block table.

The query heads that share a KV head (a group of G) are folded into the query's rows, so that K and V are read once
for all of them. Rows come in tiles, one row of the block mask each::

    decode tile   G rows, all at the sequence's last position          full: its earlier pages   partial: its last page
    chunk tile    G x block_size rows, the positions of one block      full: the blocks before   partial: its own block

With a query at position q in row q % block_size of its block's tile, the partial page of a chunk tile is seen
diagonally, `kv % block_size <= row % block_size`, and nothing needs to be captured. FlexAttention: Dong et al. 2024.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from nanovllm.attention.layout import BatchLayout
from nanovllm.config import EngineConfig

_engine_numbers = itertools.count()


def own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function around a code object of its own.

    Compiled versions are kept by code object and their number is limited, so that engines which shared one would use
    up each other's share and fall back to uncompiled attention.
    """
    assert isinstance(function, FunctionType)
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_engine_numbers)}")
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class FlexAttention:
    """The `flex` form. One instance serves every layer of an engine; each of its two calls compiles once.

    Args:
        num_blocks: physical blocks of the cache.
        num_groups: query heads per KV head.
        head_bytes: bytes of one head's K of one token.
        max_num_seqs, max_num_batched_tokens, max_model_len: bounds of a step, which size the index buffers.
    """

    reads_whole_pages = True  # masked slots too

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_groups: int,
        head_bytes: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.num_groups = num_groups
        self.device = device
        on_gpu = device.type == "cuda"
        # The GPU kernels multiply tiles of at least 16 rows; the CPU's take any number.
        self.decode_tile = -(-num_groups // 16) * 16 if on_gpu else num_groups
        self.chunk_tile = num_groups * block_size
        # The CPU lowering wants one index column for each physical page; the GPU's a fixed width.
        self.index_width = num_blocks if not on_gpu else -(-max_model_len // block_size) + 1
        # One tile would be compiled as a special case. Under 128 rows the GPU would take another kernel, which splits
        # the physical cache and not the sequence's pages.
        min_rows = 128 if on_gpu else 0
        self.min_decode_tiles = max(2, -(-min_rows // self.decode_tile))
        self.min_chunk_tiles = max(2, -(-min_rows // self.chunk_tile))
        max_chunk_tiles = max(self.min_chunk_tiles, _max_chunk_tiles(max_num_batched_tokens, max_num_seqs, block_size))
        max_decode_tiles = max(self.min_decode_tiles, max_num_seqs)
        self.decode_index = _IndexBuffers(max_decode_tiles, self.index_width, device)
        self.chunk_index = _IndexBuffers(max_chunk_tiles, self.index_width, device)
        self.tail_offsets = torch.zeros(max_decode_tiles, dtype=torch.int32, device=device)
        self.decode, self.chunk = (
            _TileAttention(tile, block_size, _kernel_options(tile, block_size, head_bytes, device))
            for tile in (self.decode_tile, self.chunk_tile)
        )

    def plan(self, layout: BatchLayout) -> FlexPlan:
        """Fill the index buffers for one step; they are overwritten by the next plan."""
        num_chunk_tiles, chunk_rows = self._plan_chunks(layout)
        return FlexPlan(
            form=self,
            num_decodes=layout.num_decodes,
            num_decode_tiles=self._plan_decodes(layout),
            num_chunk_tiles=num_chunk_tiles,
            chunk_rows=torch.from_numpy(chunk_rows).to(self.device),
        )

    def _plan_decodes(self, layout: BatchLayout) -> int:
        if not layout.num_decodes:
            return 0
        last = layout.positions[: layout.num_decodes]
        num_full = last // self.block_size
        tables = (e.block_table[:n] for e, n in zip(layout.decodes, num_full.tolist(), strict=True))
        full = np.fromiter(itertools.chain.from_iterable(tables), np.int32, int(num_full.sum()))
        tail_pages = layout.slots[: layout.num_decodes] // self.block_size
        num_tiles = max(self.min_decode_tiles, layout.num_decodes)
        self.decode_index.fill(num_tiles, num_full, full, tail_pages)
        offsets = torch.from_numpy((last % self.block_size).astype(np.int32))
        self.tail_offsets[: layout.num_decodes].copy_(offsets)
        return num_tiles

    def _plan_chunks(self, layout: BatchLayout) -> tuple[int, np.ndarray]:
        """Returns the number of tiles and, for each chunk row, its row among the tiles' (head group aside)."""
        tile_rows, num_full, full, own_pages = [], [], [], []
        num_tiles = 0
        for entry in layout.chunks:
            first, end = entry.start // self.block_size, -(-(entry.start + entry.num_new_tokens) // self.block_size)
            first_row = num_tiles * self.block_size + entry.start % self.block_size
            tile_rows.append(np.arange(first_row, first_row + entry.num_new_tokens))
            table = np.array(entry.block_table[:end], np.int32)
            for block in range(first, end):
                num_full.append(block)
                full.append(table[:block])
            own_pages.append(table[first:end])
            num_tiles += end - first
        if not num_tiles:
            return 0, np.zeros(0, np.int64)
        padded = max(self.min_chunk_tiles, num_tiles)
        self.chunk_index.fill(padded, np.array(num_full), np.concatenate(full), np.concatenate(own_pages))
        return padded, np.concatenate(tile_rows)


@dataclass(frozen=True, slots=True)
class FlexPlan:
    """One step's tiles; `attend` is called once a layer."""

    form: FlexAttention
    num_decodes: int
    num_decode_tiles: int
    num_chunk_tiles: int
    chunk_rows: Tensor  # [num_chunk_tokens] int64

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, scaling: float
    ) -> Tensor:
        """As `SdpaPlan.attend`."""
        num_kv_heads, head_dim = key_cache.shape[1:]
        form, groups = self.form, self.form.num_groups
        keys = key_cache.transpose(0, 1)[None]  # [1, num_kv_heads, num_slots, head_dim], a view
        values = value_cache.transpose(0, 1)[None]
        grouped = query.view(-1, num_kv_heads, groups, head_dim)
        output = torch.empty_like(grouped)
        if self.num_decodes:
            n, tiles, tile = self.num_decodes, self.num_decode_tiles, form.decode_tile
            rows = query.new_zeros(1, num_kv_heads, tiles, tile, head_dim)
            rows[0, :, :n, :groups] = grouped[:n].transpose(0, 1)
            rows = rows.view(1, num_kv_heads, tiles * tile, head_dim)
            attended = form.decode.attend(rows, keys, values, form.decode_index.tables, form.tail_offsets, scaling)
            output[:n] = attended.view(num_kv_heads, tiles, tile, head_dim)[:, :n, :groups].transpose(0, 1)
        if self.num_chunk_tiles:
            tiles, size = self.num_chunk_tiles, form.block_size
            # [kv head, tile, group, position in block, head_dim]: so that row % block_size is the position
            rows = query.new_zeros(tiles * size, num_kv_heads, groups, head_dim)
            rows[self.chunk_rows] = grouped[self.num_decodes :]
            rows = rows.view(tiles, size, num_kv_heads, groups, head_dim).permute(2, 0, 3, 1, 4)
            rows = rows.reshape(1, num_kv_heads, tiles * form.chunk_tile, head_dim)
            attended = form.chunk.attend(rows, keys, values, form.chunk_index.tables, None, scaling)
            attended = attended.view(num_kv_heads, tiles, groups, size, head_dim).permute(1, 3, 0, 2, 4)
            output[self.num_decodes :] = attended.reshape(tiles * size, num_kv_heads, groups, head_dim)[self.chunk_rows]
        return output.view(query.shape)


class _IndexBuffers:
    """The block mask's tables: for each tile, the pages seen whole and the one page seen in part.

    Columns behind a tile's count keep old page numbers: a kernel may read one of them ahead, so they must be valid.
    """

    def __init__(self, max_tiles: int, width: int, device: torch.device) -> None:
        self.full_pages = torch.zeros(1, 1, max_tiles, width, dtype=torch.int32, device=device)
        self.num_full = torch.zeros(1, 1, max_tiles, dtype=torch.int32, device=device)
        self.own_page = torch.zeros(1, 1, max_tiles, width, dtype=torch.int32, device=device)
        self.num_own = torch.zeros(1, 1, max_tiles, dtype=torch.int32, device=device)

    def fill(self, num_tiles: int, num_full: np.ndarray, full_pages: np.ndarray, own_pages: np.ndarray) -> None:
        """Set the first tiles from their counts and concatenated pages; further ones up to num_tiles see nothing."""
        used = len(num_full)
        device = self.num_full.device
        tiles = np.repeat(np.arange(used), num_full)
        columns = np.arange(len(full_pages)) - np.repeat(np.cumsum(num_full) - num_full, num_full)
        at = torch.from_numpy(np.stack([tiles, columns])).to(device)
        self.full_pages[0, 0].index_put_((at[0], at[1]), torch.from_numpy(full_pages).to(device))
        self.num_full[0, 0, :num_tiles] = 0
        self.num_full[0, 0, :used] = torch.from_numpy(num_full.astype(np.int32)).to(device)
        self.own_page[0, 0, :used, 0] = torch.from_numpy(own_pages.astype(np.int32)).to(device)
        self.num_own[0, 0, :num_tiles] = 0
        self.num_own[0, 0, :used] = 1

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.num_own, self.own_page, self.num_full, self.full_pages


class _TileAttention(nn.Module):
    """FlexAttention over tiles of `tile` query rows and pages of `block_size` slots.

    The sizes are attributes of a module because there alone the compiler takes whole numbers as constants; as
    arguments they may become symbols, which the GPU kernel's generated mask cannot hold.
    """

    def __init__(self, tile: int, block_size: int, kernel_options: dict[str, Any]) -> None:
        super().__init__()
        self.tile = tile
        self.block_size = block_size
        self.kernel_options = kernel_options
        # Nothing but the number of rows, which is marked at each call, may become a symbol: with the cache's size as
        # another, or with what an earlier process saw change, the CPU's generated code does not compile.
        self._compiled = torch.compile(own_code(_attend_tiles), fullgraph=True, dynamic=False)

    def attend(self, query: Tensor, *arguments: Any) -> Tensor:
        torch._dynamo.mark_dynamic(query, 2)
        # The first call comes from within the compiler's check of a layer, under a dispatch mode; later ones do not.
        # Compiled code is bound to the dispatch keys in force, so that they are made the same.
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return self._compiled(self, query, *arguments)


def _attend_tiles(
    sizes: _TileAttention,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: tuple[Tensor, Tensor, Tensor, Tensor],
    tail_offsets: Tensor | None,
    scaling: float,
) -> Tensor:
    """Attention of query [1, num_kv_heads, num_tiles * tile, head_dim] over all slots, as the tables say.

    Of its own page a decode tile sees the slots up to `tail_offsets` [max_tiles]; a chunk tile (None) the diagonal.
    """
    tile, block_size = sizes.tile, sizes.block_size

    def up_to_last_position(batch, head, row, slot):
        assert tail_offsets is not None
        return slot % block_size <= tail_offsets[row // tile]

    def diagonal(batch, head, row, slot):
        return slot % block_size <= row % block_size

    num_tiles = query.shape[2] // tile
    num_own, own_page, num_full, full_pages = (table[:, :, :num_tiles] for table in tables)
    block_mask = BlockMask(
        seq_lengths=(query.shape[2], keys.shape[2]),
        kv_num_blocks=num_own,
        kv_indices=own_page,
        full_kv_num_blocks=num_full,
        full_kv_indices=full_pages,
        q_num_blocks=None,
        q_indices=None,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(tile, block_size),
        mask_mod=diagonal if tail_offsets is None else up_to_last_position,
    )
    options: Any = sizes.kernel_options
    attended: Any = flex_attention(query, keys, values, block_mask=block_mask, scale=scaling, kernel_options=options)
    return attended


def _kernel_options(tile: int, block_size: int, head_bytes: int, device: torch.device) -> dict[str, Any]:
    """Tile sizes of the GPU kernel: BLOCK_M must divide the tile, BLOCK_N the page.

    64 x 64 with three stages is what was measured best on sm_90 with heads of 128 in bfloat16; wider heads get what
    fits into the shared memory of a block: the query's tile, and K and V once for each stage.
    """
    if device.type != "cuda":
        return {}
    row_bytes = 1 << (head_bytes - 1).bit_length()  # heads are padded to a power of two
    properties: Any = torch.cuda.get_device_properties(device)
    available = properties.shared_memory_per_block_optin
    block_m = next(size for size in (64, 32, 16) if tile % size == 0)
    sizes = [(n, stages) for n in (64, 32, 16) if n <= block_size for stages in (3, 2, 1)]
    block_n, num_stages = next(
        ((n, stages) for n, stages in sizes if (block_m + 2 * stages * n) * row_bytes <= 0.9 * available), sizes[-1]
    )
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": 4, "num_stages": num_stages}


def _max_chunk_tiles(max_num_batched_tokens: int, max_num_seqs: int, block_size: int) -> int:
    # A chunk of n tokens has at most n / block_size + 2 tiles, and there are at most max_num_seqs chunks.
    return max_num_batched_tokens // block_size + 2 * max_num_seqs


def flex_workspace_bytes(config: EngineConfig, row_bytes: int) -> int:
    """Bytes that a step of many short chunks takes for its tiles, of which most rows are padding.

    Args:
        row_bytes: one token's query, over all heads.
    """
    tiles = _max_chunk_tiles(config.max_num_batched_tokens, config.max_num_seqs, config.block_size)
    return 4 * tiles * config.block_size * row_bytes  # queries and outputs, each in tiles and in the batch's order
