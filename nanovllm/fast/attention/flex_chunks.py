"""FlexAttention for the chunks of a step on a GPU: query tiles of one block each, the block mask is the block table.

A tile lists the blocks before its own as full and its own as partial, which it sees diagonally. With a window or
attention in chunks, it lists the blocks that all of its rows see as full; as partial, its own block and the blocks in
which its rows begin to see; no others::

    window of 20, blocks of 16      block 0    block 1    block 2    block 3
    tile of positions 48 to 63         -       partial    partial    partial (its own)

There the mask computes positions from the index of a block in its sequence, equal for all sequences that share it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from nanovllm.device import own_code
from nanovllm.fast.attention.flex_gpu_options import KernelOptions
from nanovllm.fast.attention.flex_sights import capped, first_seen_on_device, with_sinks
from nanovllm.flex import forward_mask
from nanovllm.layout import Sight


class FlexChunks:
    """The chunks of one engine's layers of one kind; its tables keep their addresses for captured CUDA graphs.

    Args:
        max_tiles: most tiles in a step.
        max_blocks: most blocks of a sequence.
        num_blocks: blocks of the cache.
    """

    def __init__(
        self,
        options: KernelOptions,
        *,
        max_tiles: int,
        max_blocks: int,
        num_blocks: int,
        device: torch.device,
    ) -> None:
        self._options = options
        self._max_blocks = max_blocks
        width = most_listed(options.sight, options.block_size, max_blocks) + 1  # a kernel may read one past the last
        with torch.inference_mode(False):
            self._tables = chunk_tables(options.sight, max_tiles, width, num_blocks, device)
        self._call = ChunkCall(options)
        fill = fill_tiles if options.sight.is_full else fill_tiles_in_sight
        self._fill = torch.compile(own_code(fill), fullgraph=True, dynamic=True)

    def fill(self, tables: Tensor, table_starts: Tensor, blocks: Tensor, is_used: Tensor) -> None:
        """Fill the block mask's tables for a step; see `StepTables` for the arguments."""
        sight = self._options.sight
        sizes = (self._max_blocks,) if sight.is_full else (self._options.block_size, *sight)
        self._fill(self._tables, tables, table_starts, blocks, is_used, *sizes)

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, scaling: float, sinks: Tensor | None = None
    ) -> Tensor:
        """query [num_tiles * block_size, num_heads, head_dim]; returns value_dim elements in its place.

        Args:
            keys, values: [1, num_kv_heads, num_slots, head_dim or value_dim].
        """
        return self._call(query, keys, values, self._tables, scaling, sinks)


def most_listed(sight: Sight, block_size: int, max_blocks: int) -> int:
    """Blocks that a tile lists as full, or as partial, at most."""
    spans = [size for size in sight if size is not None]
    return max_blocks if not spans else min(max_blocks, -(-min(spans) // block_size) + 2)


def chunk_tables(sight: Sight, max_tiles: int, width: int, num_blocks: int, device: torch.device) -> tuple[Tensor, ...]:
    """Counts [1, 1, max_tiles] and blocks [1, 1, max_tiles, width] seen in part, then those seen whole.

    With a window or attention in chunks, also the index of each cache block in its sequence [num_blocks], and the index
    of each tile's own block [max_tiles].
    """

    def table(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    lists = table(1, 1, max_tiles), table(1, 1, max_tiles, width), table(1, 1, max_tiles), table(1, 1, max_tiles, width)
    return lists if sight.is_full else (*lists, table(num_blocks), table(max_tiles))


def fill_tiles(
    to: tuple[Tensor, ...], tables: Tensor, starts: Tensor, blocks: Tensor, is_used: Tensor, max_blocks: int
) -> None:
    """Fill `to`, the `chunk_tables` of full attention."""
    num_own, own_block, num_full, full_blocks = to
    num_tiles = len(starts)
    num_own[0, 0, :num_tiles] = is_used
    own_block[0, 0, :num_tiles, 0] = tables[starts + blocks]
    num_full[0, 0, :num_tiles] = blocks
    width = min(max_blocks + 1, full_blocks.shape[3])
    columns = torch.arange(width, dtype=torch.int32, device=tables.device)
    full_blocks[0, 0, :num_tiles, :width] = tables[(starts[:, None] + columns).clamp(max=len(tables) - 1)]


def fill_tiles_in_sight(
    to: tuple[Tensor, ...],
    tables: Tensor,
    starts: Tensor,
    blocks: Tensor,
    is_used: Tensor,
    block_size: int,
    window: int | None,
    chunk: int | None,
) -> None:
    """Fill `to`, the `chunk_tables` of another sight. Counts all rows of a tile, also rows missing from the step."""
    num_partial, partial, num_full, full, indices, own_blocks = to
    num_tiles = len(starts)
    positions = blocks * block_size
    border = first_seen_on_device(positions, window, chunk) // block_size  # first block that the first row sees
    of_last_row = first_seen_on_device(positions + (block_size - 1), window, chunk)
    whole = torch.minimum(blocks, (of_last_row + block_size - 1) // block_size)  # the first that all rows see whole
    own_blocks[:num_tiles] = blocks
    num_partial[0, 0, :num_tiles] = is_used * (whole - border + 1)
    num_full[0, 0, :num_tiles] = is_used * (blocks - whole)
    columns = torch.arange(partial.shape[3], dtype=torch.int32, device=tables.device)
    listed = border[:, None] + columns
    listed = torch.where(listed < whole[:, None], listed, blocks[:, None])  # its own block comes last
    listed_blocks = tables[starts[:, None] + listed]
    partial[0, 0, :num_tiles] = listed_blocks
    indices[listed_blocks * is_used[:, None]] = listed  # alike for all that list a block
    full[0, 0, :num_tiles] = tables[(starts[:, None] + whole[:, None] + columns).clamp(max=len(tables) - 1)]


class ChunkCall(nn.Module):
    """FlexAttention for any number of tiles of `block_size` rows.

    Sizes are attributes of a module because there alone the compiler takes whole numbers as constants.
    """

    def __init__(self, options: KernelOptions) -> None:
        super().__init__()
        self.block_size = options.block_size
        self.softcap = options.softcap
        self.window, self.chunk = options.sight
        self.options: dict[str, Any] = options.for_chunks()
        # Nothing but the number of rows may become a symbol; see `flex_tiles.py`.
        self._compiled = torch.compile(own_code(_attend_tiles), fullgraph=True, dynamic=False)

    def forward(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: tuple[Tensor, ...],
        scaling: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        query = query.transpose(0, 1)[None]  # [1, num_heads, num_tiles * block_size, head_dim], a view
        torch._dynamo.mark_dynamic(query, 2)
        detached = None if sinks is None else sinks.detach()
        with torch._C._AutoDispatchBelowADInplaceOrView():  # see `flex_decodes.py` for why
            return self._compiled(self, query, keys, values, tables, scaling, detached)[0].transpose(0, 1)


def _attend_tiles(
    call: ChunkCall,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: tuple[Tensor, ...],
    scaling: float,
    sinks: Tensor | None,
) -> Tensor:
    block_size = call.block_size
    window = call.window
    chunk = call.chunk
    lists = tables[:4]
    indices = tables[4:]

    def is_not_later(batch, head, row, slot):
        return slot % block_size <= row % block_size

    def is_in_sight(batch, head, row, slot):
        key = indices[0][slot // block_size] * block_size + slot % block_size
        own = indices[1][row // block_size] * block_size + row % block_size
        is_seen = key <= own
        if window is not None:
            is_seen = is_seen & (key > own - window)
        if chunk is not None:
            is_seen = is_seen & (key // chunk == own // chunk)
        return is_seen

    num_partial, partial, num_full, full = (table[:, :, : query.shape[2] // block_size] for table in lists)
    block_mask = forward_mask(
        (query.shape[2], keys.shape[2]),
        (num_partial, partial),
        (num_full, full),
        (block_size, block_size),
        is_in_sight if indices else is_not_later,
    )
    options: Any = call.options
    attended: Any = flex_attention(
        query, keys, values, score_mod=None if call.softcap is None else capped(call.softcap), block_mask=block_mask,
        scale=scaling, enable_gqa=True, kernel_options=options,
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )  # fmt: skip
    if sinks is not None:
        attended = with_sinks(attended[0], attended[1].lse, sinks[:, None])
    return attended
