"""Decode attention on a GPU for any number of decodes, with even or uneven contexts, without recompilation.

A small kernel cuts a step's contexts into pieces of nearly equal length, once for all layers. In the second kernel a
program attends to one piece for the query heads of one KV head, through the block tables. Decodes with equal first
blocks share programs, which read these blocks once for all of their query heads. The number of programs depends only on
the number of decodes, so a captured CUDA graph serves every step with that number. Windows and chunks only move the
start of a context; soft-caps, sinks, and a value width other than the keys' are compile-time options. Prefixes of many
decodes have wide programs in a kernel that only such steps launch. The kernels are in `decode_pieces_triton`,
`paged_decode_triton` and `wide_pieces_triton`.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.attention import row_values
from nanovllm.fast.kernels.prompt_attention import AttentionSizes
from nanovllm.fast.kernels.wide_attention import WideAttention, open_kernel

_CUT_AT_ONCE, _CUT_PIECES = 32, 16  # decodes per program, pieces of each per store
_MERGED_ELEMENTS = 4096  # workspace elements per load of a merge
_MAX_HEAD_DIM = 256
_MIN_ROWS = 16  # fewest query heads per program, since tensor cores take 16


class DecodeSizes(NamedTuple):
    """Sizes of a step's pieces and of one program's loads.

    tile: most tokens per load; a smaller block is one tile.
    num_stages: pipeline stages, one more than the most tiles in flight.
    least_programs, most_programs: limits of programs per multiprocessor; between them there is one piece per decode.
    """

    tile: int = 32
    num_stages: int = 4
    num_warps: int = 2
    least_programs: int = 2
    most_programs: int = 4


# Measured on an H200 (sm_90; bfloat16, heads of 128). Other GPUs scale with their multiprocessors; shared memory limits
# tiles and stages.
MEASURED = DecodeSizes()
SCALED = DecodeSizes(tile=64)  # 8-bit K and V: tiles of as many bytes


class WideSizes(NamedTuple):
    """Sizes of the programs for wide groups.

    rows: query heads of all members of a program.
    programs: number of programs per multiprocessor.
    """

    rows: int = 128
    tile: int = 64
    num_stages: int = 3
    num_warps: int = 8
    programs: int = 1


# Measured on an H100: the fastest of eleven sizes for 256 decodes of 16,384 tokens.
MEASURED_WIDE = WideSizes()
LEAST_WIDE = 32  # decodes of a wide group


@cache
def _kernels() -> tuple[ModuleType, ModuleType, ModuleType]:
    # Triton is part of PyTorch's GPU builds.
    from nanovllm.fast.kernels import decode_pieces_triton, paged_decode_triton, wide_pieces_triton

    return decode_pieces_triton, paged_decode_triton, wide_pieces_triton


class PagedDecode:
    """Decode attention of one engine; its layers share pieces and workspace.

    Args:
        heads: number of KV heads, query heads per KV head, bytes of one token's K (or V, if wider) in one head, bytes
            of an element there (2 for wider ones, and by default).
        gpu: number of multiprocessors, bytes of shared memory per program.
        max_decodes: most decodes of a step.
        sight: (window, chunk) of the layers, or None each.
        softcap: limit of the layers' scores, by tanh; None without one.
    """

    def __init__(
        self,
        heads: tuple[int, ...],
        block_size: int,
        *,
        gpu: tuple[int, int],
        max_decodes: int,
        device: torch.device,
        sizes: DecodeSizes | None = None,
        sight: tuple[int | None, int | None] = (None, None),
        softcap: float | None = None,
    ) -> None:
        (self._window, self._chunk), self._softcap = sight, softcap or 0.0
        self._num_kv_heads, self._num_groups, head_bytes, *given = heads
        element_bytes = given[0] if given else 2
        num_multiprocessors, shared_memory = gpu
        sizes = sizes or (MEASURED if element_bytes > 1 else SCALED)
        self._block_size = block_size
        self._least_pieces, self._most_pieces = _bounds(num_multiprocessors, self._num_kv_heads, sizes)
        self._sizes = fitting(sizes, block_size, head_bytes, shared_memory)
        self._wide = fitting_wide(MEASURED_WIDE, block_size, head_bytes * max(1, 2 // element_bytes), shared_memory)
        self.wide_members, self.wide_pieces = _wide_bounds(self._wide, (heads[0], heads[1]), num_multiprocessors)
        if any(sight):  # decodes with a window or chunk share nothing
            self.wide_members = 0
        self.least_wide = LEAST_WIDE
        self.uses_wide_kernel = not any(sight)
        # On Hopper and later a kernel may start while the previous one ends.
        self._overlaps = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        self.bundle_members = _bundle_members(self._num_groups)
        slots = self.most_splits((heads[0], heads[1]), num_multiprocessors, max_decodes, sizes) * self._num_kv_heads
        entry = _kernels()[0].ENTRY
        with torch.inference_mode(False):
            num_pieces = max(self._least_pieces, min(max_decodes, self._most_pieces)) + max_decodes
            self._pieces = torch.zeros(1 + num_pieces, entry, dtype=torch.int32, device=device)
            self._splits = torch.zeros(max_decodes, 2, dtype=torch.int32, device=device)
            self._tables = self._members = self._pieces  # placeholders until the first step
            self._wide_pieces: Tensor | None = None
            self._nothing_shared = (
                torch.zeros(max_decodes, dtype=torch.int32, device=device),
                torch.zeros(1, dtype=torch.int32, device=device),
                torch.zeros(0, _kernels()[0].BUNDLE_ENTRY, dtype=torch.int32, device=device),
            )
            # The workspace: results of split decodes' pieces, and the number of finished pieces per decode.
            num_values = slots * self._num_groups * (head_bytes // element_bytes)
            self._outputs = torch.empty(num_values, dtype=torch.float32, device=device)
            self._logarithms = torch.empty(slots * self._num_groups, dtype=torch.float32, device=device)
            self._arrivals = torch.zeros(slots * self._num_groups, dtype=torch.int32, device=device)

    @staticmethod
    def suits(head_dim: int, dtype: torch.dtype) -> bool:
        return head_dim <= _MAX_HEAD_DIM and dtype in (torch.bfloat16, torch.float16, torch.float32)

    @staticmethod
    def most_splits(
        heads: tuple[int, int], num_multiprocessors: int, max_decodes: int, sizes: DecodeSizes = MEASURED
    ) -> int:
        """Upper bound of the number of pieces of a step's split decodes; a bundle's piece counts once per member."""
        num_kv_heads, num_groups = heads
        least, most = _bounds(num_multiprocessors, num_kv_heads, sizes)
        members, own = _bundle_members(num_groups), 2 * most
        if members < 2:
            return own
        of_wide, num_pieces = _wide_bounds(MEASURED_WIDE, heads, num_multiprocessors)
        # Each wide program has one piece more than its share at most.
        in_wide = of_wide * num_pieces + max_decodes
        return own + max_decodes + in_wide + members * max(least, min(max_decodes, most))

    def most_bundles(self, num_decodes: int) -> int:
        """Most bundles of a step: their pieces must fit into the programs of its decodes."""
        return min(num_decodes // 2, max(self._least_pieces, min(num_decodes, self._most_pieces)) * 3 // 4)

    def fill(
        self,
        tables: Tensor,
        table_starts: Tensor,
        block_counts: Tensor,
        positions: Tensor,
        sharing: tuple[Tensor, ...] | None = None,
    ) -> None:
        """Cut a step's contexts into pieces; see `StepTables` for the arguments.

        Args:
            sharing: tensors of shared blocks, members and bundles; wide groups add parts and pieces. None: no sharing.
        """
        shared, members, bundles, *wide = sharing or self._nothing_shared
        has_wide = bool(wide) and len(wide[0]) > 0
        self._tables, self._members, self._wide_pieces = tables, members, wide[1] if has_wide else None
        num_rows, num_bundles = len(block_counts), len(bundles)
        kernels = _kernels()[0]
        with torch.cuda.device_of(block_counts):
            kernels.cut_contexts[(-(-num_rows // _CUT_AT_ONCE),)](
                tables, table_starts, block_counts, positions, shared, wide[0] if has_wide else shared, bundles,
                self._pieces, self._splits, num_rows, num_bundles, self._least_pieces, self._most_pieces,
                TILE=self._sizes.tile, BLOCK_SIZE=self._block_size, ENTRY=kernels.ENTRY,
                BUNDLE_ENTRY=kernels.BUNDLE_ENTRY, LANES=256, OWN=_CUT_AT_ONCE, WIDTH=_CUT_PIECES,
                WINDOW=self._window or 0, CHUNK=self._chunk or 0, HAS_WIDE=has_wide,
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
        """Attention of the decodes passed to `fill`.

        Args:
            query: [num_decodes, num_heads, head_dim], contiguous.
            key_cache, value_cache: [num_slots, num_kv_heads, head_dim or value_dim], contiguous, or in 8-bit floats.
            output: [num_decodes, num_heads, value_dim]; a new tensor by default.
            sinks: [num_heads], scores that join the softmax without a value.

        Returns the output; 0 for a decode without blocks.
        """
        (num_rows, num_heads, head_dim), value_dim = query.shape, row_values(value_cache)
        if output is None:
            output = query.new_empty(num_rows, num_heads, value_dim)
        sizes, dims, merged_rows = self._sizes, _power_of_two(head_dim), _power_of_two(self._num_groups)
        rows, value_dims, has_sinks = _rows(self._num_groups), _power_of_two(value_dim), sinks is not None
        some_sinks = self._logarithms if sinks is None else sinks  # a placeholder, not read
        is_large = rows * max(dims, value_dims) > 8192 or query.dtype == torch.float32  # two warps lack registers
        num_pieces = min(max(num_rows, self._least_pieces), self._most_pieces) + num_rows
        # Merging in a decode's last program is slower than a separate kernel; with many decodes few are split.
        merges_apart = 4 * num_rows < 3 * self._least_pieces
        entry, kernels = _kernels()[0].ENTRY, _kernels()[1]
        if self._wide_pieces is not None:
            self.attend_wide(query, key_cache, value_cache, scaling, self._wide_pieces, merges=not merges_apart)
        is_scaled, *caches = _parts(key_cache, value_cache)
        with torch.cuda.device_of(query):
            kernels.attend_pieces[(num_pieces * self._num_kv_heads,)](
                query, *caches, self._tables, self._pieces, self._members, self._splits, output, self._outputs,
                self._logarithms, self._arrivals, some_sinks, scaling, SCALED=is_scaled,
                NUM_KV_HEADS=self._num_kv_heads, GROUPS=self._num_groups, HEAD_DIM=head_dim, VALUE_DIM=value_dim,
                BLOCK_SIZE=self._block_size, ENTRY=entry, TILE=sizes.tile, ROWS=rows, MERGED_ROWS=merged_rows,
                DIMS=dims, VALUE_DIMS=value_dims, MERGES=not merges_apart,
                AT_ONCE=max(1, _MERGED_ELEMENTS // (merged_rows * value_dims)),
                LIMITED=(self._window, self._chunk) != (None, None), OVERLAPS=self._overlaps, SOFTCAP=self._softcap,
                HAS_SINKS=has_sinks, launch_pdl=self._overlaps, num_warps=4 if is_large else sizes.num_warps,
                num_stages=sizes.num_stages,
            )  # fmt: skip
            if merges_apart:
                kernels.merge_pieces[(num_rows * num_heads,)](
                    self._splits, self._outputs, self._logarithms, output, some_sinks, NUM_HEADS=num_heads,
                    HEAD_DIM=value_dim, DIMS=value_dims, AT_ONCE=max(16, 2 * _MERGED_ELEMENTS // value_dims),
                    OVERLAPS=self._overlaps, HAS_SINKS=has_sinks, launch_pdl=self._overlaps, num_warps=4,
                )  # fmt: skip
        return output

    def attend_wide(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scaling: float, pieces: Tensor, *, merges: bool
    ) -> None:
        """Attend to the prefixes of wide groups; the results go to the workspace."""
        (num_rows, _, head_dim), value_dim, sizes = query.shape, row_values(value_cache), self._wide
        is_scaled, *parts = _parts(key_cache, value_cache)
        num_pieces = min(len(pieces), self.wide_pieces + most_wide_programs(num_rows, self.wide_members))
        if not is_scaled and (kernel := self._wide_kernel(query, value_dim)) is not None:
            step = self._tables, pieces, self._members, self._splits
            workspace = self._outputs, self._logarithms, self._arrivals if merges else None
            kernel.attend(query, (key_cache, value_cache), step, workspace, num_pieces, scaling)
            return
        with torch.cuda.device_of(query):
            _kernels()[2].attend_wide_pieces[(num_pieces * self._num_kv_heads,)](
                query, *parts, self._tables, pieces, self._members, self._splits, self._outputs, self._logarithms,
                self._arrivals, scaling, SCALED=is_scaled, NUM_KV_HEADS=self._num_kv_heads, GROUPS=self._num_groups,
                HEAD_DIM=head_dim, VALUE_DIM=value_dim, BLOCK_SIZE=self._block_size, ENTRY=pieces.shape[1],
                TILE=sizes.tile, ROWS=sizes.rows, DIMS=_power_of_two(head_dim), VALUE_DIMS=_power_of_two(value_dim),
                MERGES=merges, SOFTCAP=self._softcap, num_warps=sizes.num_warps, num_stages=sizes.num_stages,
            )  # fmt: skip

    def _wide_kernel(self, query: Tensor, value_dim: int) -> WideAttention | None:
        """The kernel for Hopper, where it supports these layers."""
        if not self.uses_wide_kernel:
            return None
        sizes = AttentionSizes(
            query.shape[1], self._num_kv_heads, query.shape[2], self._block_size, query.dtype,
            softcap=self._softcap or None, value_dim=value_dim,
        )  # fmt: skip
        return open_kernel(sizes, query.device)


def _parts(key_cache: Tensor, value_cache: Tensor) -> tuple[Any, ...]:
    """Whether K and V are in 8-bit floats; values of both, scales of both (the values again where there are none)."""
    if key_cache.dtype != torch.uint8:
        return False, key_cache, value_cache, key_cache, value_cache
    return True, *map(values_of, (key_cache, value_cache)), *map(scales_of, (key_cache, value_cache))


def scales_of(cache: Tensor) -> Tensor:
    """A cache in 8-bit floats as float32; see `fp8_rows`."""
    return cache.view(-1).view(torch.float32)


def values_of(cache: Tensor) -> Tensor:
    """A cache in 8-bit floats as these."""
    return cache.view(torch.float8_e4m3fn)


def _bounds(num_multiprocessors: int, num_kv_heads: int, sizes: DecodeSizes) -> tuple[int, int]:
    """(fewest, most) pieces of a step, apart from one more per decode."""
    least, most = sizes.least_programs * num_multiprocessors, sizes.most_programs * num_multiprocessors
    return max(1, least // num_kv_heads), max(1, most // num_kv_heads)


def _rows(num_groups: int) -> int:
    """Query heads per program: of one decode and KV head, or of several decodes that share blocks."""
    return max(_MIN_ROWS, _power_of_two(num_groups))


def _bundle_members(num_groups: int) -> int:
    return _rows(num_groups) // num_groups


def _wide_bounds(sizes: WideSizes, heads: tuple[int, int], num_multiprocessors: int) -> tuple[int, int]:
    """Decodes that a wide program reads for, and pieces of a step apart from one more per program."""
    num_kv_heads, num_groups = heads
    return sizes.rows // num_groups, max(1, sizes.programs * num_multiprocessors // num_kv_heads)


def most_wide_programs(num_decodes: int, members: int) -> int:
    """Most programs of a step's wide groups, each of at least `LEAST_WIDE` decodes, before their prefixes are cut."""
    return num_decodes // members + num_decodes // LEAST_WIDE


def fitting_wide(sizes: WideSizes, block_size: int, head_bytes: int, shared_memory: int) -> WideSizes:
    """The largest programs with queries, weights, and K and V of all stages within a multiprocessor's shared memory."""
    row_bytes, tile = _power_of_two(head_bytes), min(sizes.tile, block_size)
    rows, num_stages = min(sizes.rows, max(16, sizes.rows * 256 // row_bytes)), sizes.num_stages
    while (2 * num_stages * tile + rows) * row_bytes > 0.9 * shared_memory and num_stages > 1:
        num_stages -= 1
    while (2 * num_stages * tile + rows) * row_bytes > 0.9 * shared_memory and tile > 16:
        tile //= 2
    return sizes._replace(rows=rows, tile=tile, num_stages=num_stages)


def fitting(sizes: DecodeSizes, block_size: int, head_bytes: int, shared_memory: int) -> DecodeSizes:
    """The largest tiles with K and V of all stages but the last within a multiprocessor's shared memory."""
    tile, num_stages = min(sizes.tile, block_size), sizes.num_stages
    row_bytes = _power_of_two(head_bytes)
    while 2 * (num_stages - 1) * tile * row_bytes > 0.8 * shared_memory and num_stages > 2:
        num_stages -= 1
    while 2 * (num_stages - 1) * tile * row_bytes > 0.8 * shared_memory and tile > 16:
        tile //= 2
    num_warps = sizes.num_warps if tile >= 32 else 1
    return sizes._replace(tile=tile, num_stages=num_stages, num_warps=num_warps)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
