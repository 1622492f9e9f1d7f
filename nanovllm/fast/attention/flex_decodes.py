"""FlexAttention for the decodes of a step on a GPU: used without `fast/kernels/`, and the kernel's reference.

The batch dimension is the sequences, with one row a query head. All KV tiles of a decode are listed as partial, since
the kernel splits only that list among programs. The mask hides unused slots of the last KV tile; KV tiles may be
smaller than blocks, so that fewer unused slots are read. With a window or attention in chunks, the list begins with the
KV tile of the first position in sight, and the mask hides earlier positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from nanovllm.device import own_code
from nanovllm.fast.attention.flex_gpu_options import MAX_SPLITS, MIN_KV_TILE, DecodeOptions, KernelOptions
from nanovllm.fast.attention.flex_sights import capped, first_seen_on_device, with_sinks
from nanovllm.flex import forward_mask
from nanovllm.layout import FULL, Sight

# The parts of a split decode are put together by one kernel, instead of three that hand small tensors on.
DECODE_COMPILER: Any = {
    "unroll_reductions_threshold": 2 * MAX_SPLITS, "realize_reads_threshold": 128, "realize_opcount_threshold": 4096,
}  # fmt: skip
# The kernels want the sparse block of queries to be a multiple of their tile; a decode has one row a head.
_DECODE_QUERY_BLOCK = 128


class FlexDecodes:
    """The decodes of one engine; the layers share its tables, which keep their addresses for captured CUDA graphs.

    Args:
        max_decodes: most decodes in a step.
        max_blocks: most blocks of a sequence.
    """

    def __init__(self, options: KernelOptions, *, max_decodes: int, max_blocks: int, device: torch.device) -> None:
        self._options = options

        def table(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        sight = options.sight
        num_kv_tiles = most_kv_tiles(sight, options.block_size, max_blocks)
        num_ends = 1 if sight.is_full else 2
        with torch.inference_mode(False):
            self._tables = DecodeTables(
                table(max_decodes, 1, 1),
                table(max_decodes, 1, 1, num_kv_tiles + 1),
                *(table(max_decodes) for _ in range(2 * num_ends)),
            )
        self._calls: dict[int, DecodeCall] = {}
        self._call: DecodeCall | None = None  # the call for this step's number of decodes
        self._fill = torch.compile(own_code(fill_decodes), fullgraph=True, dynamic=True)

    def fill(
        self, tables: Tensor, table_starts: Tensor, block_counts: Tensor, positions: Tensor, _sharing: Any = None
    ) -> None:
        """Fill the block mask's tables for a step; see `StepTables` for the arguments. No blocks are read together."""
        self._call = self._call_for(len(block_counts))
        self._fill(
            self._tables.parts(), tables, table_starts, block_counts, positions, self._options.block_size,
            self._call.kv_tile, self._options.sight,
        )  # fmt: skip

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scaling: float,
        output: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """query [num_decodes, num_heads, head_dim]; returns [num_decodes, num_heads, value_dim], in `output` if any."""
        assert self._call is not None
        tables = DecodeTables(*(table[: len(query)] for table in self._tables.parts()))
        attended = self._call(
            query, key_cache.transpose(0, 1)[None], value_cache.transpose(0, 1)[None], tables, scaling, sinks
        )
        return attended if output is None else output.copy_(attended)

    def _call_for(self, num_rows: int) -> DecodeCall:
        """The compiled function for a batch size: the decode kernel wants a fixed one."""
        call = self._calls.get(num_rows)
        if call is None:
            options = self._options.for_decodes(num_rows)
            call = self._calls[num_rows] = DecodeCall(self._options.num_kv_heads, options, self._options.softcap)
        return call


def most_kv_tiles(sight: Sight, block_size: int, max_blocks: int) -> int:
    """KV tiles that a decode sees, at most."""
    most = max_blocks * max(1, block_size // MIN_KV_TILE)
    spans = [size for size in sight if size is not None]
    # A span touches a tile more than it fills, and two where it lies across their borders.
    return most if not spans else min(most, min(spans) // min(MIN_KV_TILE, block_size) + 2)


@dataclass(frozen=True, slots=True)
class DecodeTables:
    num_kv_tiles: Tensor  # [num_decodes, 1, 1]
    kv_tiles: Tensor  # [num_decodes, 1, 1, width], each start slot // tile length
    last_kv_tiles: Tensor  # [num_decodes]
    last_offsets: Tensor  # [num_decodes], of the last slot in use within it
    first_kv_tiles: Tensor | None = None  # [num_decodes]; None where decodes see all positions
    first_offsets: Tensor | None = None  # [num_decodes], of the first slot in sight within it

    def parts(self) -> tuple[Tensor, ...]:
        parts = self.num_kv_tiles, self.kv_tiles, self.last_kv_tiles, self.last_offsets
        if self.first_kv_tiles is None or self.first_offsets is None:
            return parts
        return *parts, self.first_kv_tiles, self.first_offsets


def fill_decodes(
    to: tuple[Tensor, ...],
    tables: Tensor,
    starts: Tensor,
    counts: Tensor,
    positions: Tensor,
    block_size: int,
    kv_tile: int,
    sight: tuple[int | None, int | None] = FULL,
) -> None:
    """`to` is a `DecodeTables`, which the compiler does not know; `kv_tile` slots make one of a block."""
    num_kv_tiles, kv_tiles, last_kv_tiles, last_offsets, *firsts = to
    num_rows = len(starts)
    in_block = block_size // kv_tile
    positions = positions.to(torch.int32)
    columns = torch.arange(kv_tiles.shape[3], dtype=torch.int32, device=tables.device)
    num_before: Any = 0
    if firsts:
        first = first_seen_on_device(positions, *sight)
        num_before = first // kv_tile
        columns = columns + num_before[:, None]
        first_blocks = tables[starts + first // block_size]
        firsts[0][:num_rows] = first_blocks * in_block + num_before % in_block
        firsts[1][:num_rows] = first % kv_tile
    num_kv_tiles[:num_rows, 0, 0] = torch.where(counts > 0, positions // kv_tile + 1 - num_before, 0)
    blocks = tables[(starts[:, None] + columns // in_block).clamp(max=len(tables) - 1)]
    kv_tiles[:num_rows, 0, 0] = blocks * in_block + columns % in_block
    last_blocks = tables[(starts + counts - 1).clamp(min=0)]
    last_kv_tiles[:num_rows] = last_blocks * in_block + positions // kv_tile % in_block
    last_offsets[:num_rows] = positions % kv_tile


class DecodeCall(nn.Module):
    """FlexAttention for a fixed number of decodes.

    Sizes are attributes of a module because there alone the compiler takes whole numbers as constants.
    """

    def __init__(self, num_kv_heads: int, options: DecodeOptions, softcap: float | None = None) -> None:
        super().__init__()
        self.num_kv_heads = num_kv_heads
        self.softcap = softcap
        self.kv_tile, self.options = options
        self._compiled = torch.compile(
            own_code(_attend_decodes), fullgraph=True, dynamic=False, options=DECODE_COMPILER
        )

    def forward(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: DecodeTables,
        scaling: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        # The first call comes from within the compiler's check of a layer, under a dispatch mode; later ones do not.
        # Compiled code is bound to the dispatch keys in force, so that they are made the same.
        with torch._C._AutoDispatchBelowADInplaceOrView():
            detached = None if sinks is None else sinks.detach()
            return self._compiled(self, query, keys, values, tables.parts(), scaling, detached)


def _attend_decodes(
    call: DecodeCall,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: tuple[Tensor, ...],
    scaling: float,
    sinks: Tensor | None,
) -> Tensor:
    num_kv_tiles, kv_tiles, last_kv_tiles, last_offsets, *firsts = tables
    kv_tile = call.kv_tile
    value_dim = values.shape[3]

    def is_used(row, head, _, slot):
        return (slot // kv_tile != last_kv_tiles[row]) | (slot % kv_tile <= last_offsets[row])

    def is_in_sight(row, head, _, slot):
        is_behind = (slot // kv_tile != firsts[0][row]) | (slot % kv_tile >= firsts[1][row])
        return is_behind & is_used(row, head, _, slot)

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
        is_in_sight if firsts else is_used,
    )
    options: Any = call.options
    attended: Any = flex_attention(
        query.reshape(num_rows, call.num_kv_heads * width, 1, head_dim), keys, values,
        score_mod=None if call.softcap is None else capped(call.softcap), block_mask=block_mask, scale=scaling,
        enable_gqa=True, kernel_options=options, return_aux=None if sinks is None else AuxRequest(lse=True),
    )  # fmt: skip
    if sinks is not None:
        attended, of_scores = attended
        log_sums = of_scores.lse.view(num_rows, call.num_kv_heads, width)[:, :, :num_groups]
    if width != num_groups or sinks is not None:
        attended = attended.view(num_rows, call.num_kv_heads, width, value_dim)[:, :, :num_groups]
    if sinks is not None:
        attended = with_sinks(attended, log_sums, sinks.view(call.num_kv_heads, num_groups))
    return attended.reshape(num_rows, num_heads, value_dim).contiguous()
