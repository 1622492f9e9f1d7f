"""The CPU's own form: C++ kernels (`csrc/paged_attention.cpp`) that read K and V straight from their pages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention.layout import BatchLayout
from nanovllm.attention.sdpa import SdpaAttention, SdpaPlan
from nanovllm.batch import ScheduledSequence
from nanovllm.block_manager import NULL_BLOCK
from nanovllm.kernels import Kernels, has_matrix_tiles

# Tokens of a work item: small enough that few long sequences keep all threads busy, large enough that merging is free.
SPLIT_TOKENS = 512


class CppAttention(SdpaAttention):
    """The `cpp` form. One instance serves every layer of an engine.

    Args:
        kernels: from `load_kernels`, for the layers' dtype and sizes.
        block_size, page_bytes, dtype: as of `SdpaAttention`.
    """

    def __init__(self, kernels: Kernels, *, block_size: int, page_bytes: int, dtype: torch.dtype) -> None:
        super().__init__(block_size, page_bytes, dtype, torch.device("cpu"))
        self._kernels = kernels
        # PyTorch's attention multiplies bfloat16 in AMX's tiles, where there are any.
        self._gathers_chunks = self.reads_whole_pages = has_matrix_tiles(dtype)

    def plan(self, layout: BatchLayout) -> CppPlan:
        chunks = self._chunks(layout) if self._gathers_chunks else []
        own_chunks = [] if self._gathers_chunks else layout.chunks
        return CppPlan(
            self.block_size,
            [],
            chunks,
            self._kernels,
            _Rows.of(layout.decodes, 0, self.block_size),
            _Rows.of(own_chunks, layout.num_decodes, self.block_size),
        )


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of consecutive entries, as the kernels want them: all int64, one item an entry."""

    first_rows: np.ndarray  # in the flat batch
    starts: np.ndarray  # position of the first row
    counts: np.ndarray  # rows
    contexts: np.ndarray  # tokens that the last row sees
    tables: np.ndarray  # [num_entries, max_pages]

    @classmethod
    def of(cls, entries: list[ScheduledSequence], first_row: int, block_size: int) -> _Rows:
        starts = np.fromiter((entry.start for entry in entries), np.int64, len(entries))
        counts = np.fromiter((entry.num_new_tokens for entry in entries), np.int64, len(entries))
        contexts = starts + counts
        num_pages = -(-contexts // block_size)
        tables = np.full((len(entries), int(num_pages.max(initial=0))), NULL_BLOCK, np.int64)
        for row, (entry, count) in enumerate(zip(entries, num_pages.tolist(), strict=True)):
            tables[row, :count] = entry.block_table[:count]
        return cls(first_row + np.cumsum(counts) - counts, starts, counts, contexts, tables)


@dataclass(frozen=True, slots=True)
class CppPlan(SdpaPlan):
    """One step's tables; queries and caches must be contiguous."""

    kernels: Kernels
    decode_rows: _Rows
    chunk_rows: _Rows

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, scaling: float
    ) -> Tensor:
        output = torch.empty_like(query)
        self._attend_chunks(output, query, key, value, key_cache, value_cache, scaling)
        self.attend_by_kernels(output, query, key_cache, value_cache, scaling)
        return output

    def attend_by_kernels(
        self, output: Tensor, query: Tensor, key_cache: Tensor, value_cache: Tensor, scaling: float
    ) -> None:
        """Fill the rows of output that are the kernels' own: all of them, but for chunks on a processor with AMX."""
        pointers = query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr()
        num_kv_heads, threads = key_cache.shape[1], torch.get_num_threads()
        rows = self.decode_rows
        if len(rows.tables):
            self.kernels.decode(
                *pointers, rows.tables.ctypes.data, rows.contexts.ctypes.data, output.data_ptr(),
                *rows.tables.shape, self.block_size, num_kv_heads, SPLIT_TOKENS, scaling, threads,
            )  # fmt: skip
        rows = self.chunk_rows
        if len(rows.tables):
            self.kernels.chunk(
                *pointers, rows.tables.ctypes.data, rows.first_rows.ctypes.data, rows.starts.ctypes.data,
                rows.counts.ctypes.data, output.data_ptr(),
                *rows.tables.shape, self.block_size, num_kv_heads, scaling, threads,
            )  # fmt: skip
