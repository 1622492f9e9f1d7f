"""The CPU's backend: C++ kernels (`csrc/paged_attention.cpp`) that read K and V straight from their blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention.sdpa import SdpaAttention, SdpaPlan
from nanovllm.batch import NULL_BLOCK, ScheduledSequence
from nanovllm.batch_layout import BatchLayout
from nanovllm.kernels.cpp import Kernels

# Decodes that begin with the same blocks read them together from so many query heads on; with fewer, most lanes of the
# kernel's vectors are empty. Estimated from the cost of a tile in both ways.
MIN_SHARING_QUERIES = 12


class CppAttention(SdpaAttention):
    """The `cpp` backend. One instance serves every layer of an engine.

    Args:
        kernels: from `load_kernels`, for the layers' dtype and sizes.
        num_blocks: of the caches.
        block_size, block_bytes: as of `SdpaAttention`.
    """

    def __init__(self, kernels: Kernels, *, num_blocks: int, block_size: int, block_bytes: int) -> None:
        super().__init__(block_size, block_bytes, kernels.dtype, torch.device("cpu"))
        self._kernels = kernels
        self._num_blocks = num_blocks
        # PyTorch's attention multiplies bfloat16 in AMX's tiles, where there are any.
        self._gathers_chunks = self.reads_whole_blocks = kernels.has_matrix_tiles

    def plan(self, layout: BatchLayout) -> CppPlan:
        """Raises ValueError for block tables outside of the caches: the kernels check nothing."""
        chunks = self._chunks(layout) if self._gathers_chunks else []
        decodes = _Rows.from_entries(layout.decodes, 0, self.block_size, self._num_blocks)
        groups = _Groups.from_rows(decodes, self.block_size, -(-MIN_SHARING_QUERIES // self._kernels.num_groups))
        own_entries = [] if self._gathers_chunks else layout.chunks
        own_chunks = _Rows.from_entries(own_entries, layout.num_decodes, self.block_size, self._num_blocks)
        return CppPlan(
            self.block_size,
            [],
            chunks,
            self._kernels,
            decodes,
            groups,
            own_chunks,
            _addresses(decodes.tables, decodes.contexts, groups.members, groups.starts, groups.shared),
            _addresses(own_chunks.tables, own_chunks.first_rows, own_chunks.starts, own_chunks.counts),
        )


def _addresses(*arrays: np.ndarray) -> tuple[int, ...]:
    return tuple(array.ctypes.data for array in arrays)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of consecutive entries as the kernels read them: int64, one item per entry."""

    first_rows: np.ndarray  # in the flat batch
    starts: np.ndarray  # position of the first row
    counts: np.ndarray  # rows
    contexts: np.ndarray  # tokens that the last row sees
    tables: np.ndarray  # [num_entries, max_blocks]

    @classmethod
    def from_entries(cls, entries: list[ScheduledSequence], first_row: int, block_size: int, num_blocks: int) -> _Rows:
        starts = np.fromiter((entry.start for entry in entries), np.int64, len(entries))
        counts = np.fromiter((entry.num_new_tokens for entry in entries), np.int64, len(entries))
        contexts = starts + counts
        num_blocks_seen = -(-contexts // block_size)
        tables = np.full((len(entries), int(num_blocks_seen.max(initial=0))), NULL_BLOCK, np.int64)
        for row, (entry, count) in enumerate(zip(entries, num_blocks_seen.tolist(), strict=True)):
            if len(entry.block_table) < count:
                raise ValueError(
                    f"the block table of {entry.sequence.request_id!r} ends at {len(entry.block_table) * block_size} "
                    f"tokens, not {contexts[row]}."
                )
            tables[row, :count] = entry.block_table[:count]
        outside = np.argwhere((tables < 0) | (tables >= num_blocks))
        if len(outside):
            row, column = outside[0].tolist()
            raise ValueError(
                f"the block table of {entries[row].sequence.request_id!r} names block {tables[row, column]}; the "
                f"caches have blocks 0 to {num_blocks - 1}."
            )
        return cls(first_row + np.cumsum(counts) - counts, starts, counts, contexts, tables)


@dataclass(frozen=True, slots=True)
class _Groups:
    """Decodes whose tables begin with the same blocks, as those of requests with one system prompt do: the kernel reads
    these blocks once for all of a group."""

    members: np.ndarray  # [num_sequences] the sequences, group by group
    starts: np.ndarray  # [num_groups + 1] the first of each group
    shared: np.ndarray  # [num_groups] tokens, whole blocks

    @classmethod
    def from_rows(cls, rows: _Rows, block_size: int, min_members: int) -> _Groups:
        tables = rows.tables
        if not len(tables):
            return cls(np.zeros(0, np.int64), np.zeros(1, np.int64), np.zeros(0, np.int64))
        members = np.argsort(tables[:, 0], kind="stable")
        first_blocks = tables[members, 0]
        starts = np.flatnonzero(np.diff(first_blocks, prepend=-1, append=-1))
        shared = np.zeros(len(starts) - 1, np.int64)
        for group in np.flatnonzero(np.diff(starts) >= max(2, min_members)).tolist():
            own = members[starts[group] : starts[group + 1]]
            blocks = tables[own, : rows.contexts[own].min() // block_size]
            differs = np.flatnonzero((blocks != blocks[0]).any(axis=0))
            shared[group] = block_size * (differs[0] if len(differs) else blocks.shape[1])
        return cls(members, starts, shared)


@dataclass(frozen=True, slots=True)
class CppPlan(SdpaPlan):
    """One step's tables; queries and caches must be contiguous."""

    kernels: Kernels
    decode_rows: _Rows
    decode_groups: _Groups
    chunk_rows: _Rows
    decode_addresses: tuple[int, ...]  # of what the kernels get from rows and groups: asking anew takes a microsecond
    chunk_addresses: tuple[int, ...]

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scaling: float) -> Tensor:
        output = torch.empty_like(query)
        self._attend_chunks(output, query, key_cache, value_cache, scaling)
        self.attend_by_kernels(output, query, key_cache, value_cache, scaling)
        return output

    def attend_by_kernels(
        self, output: Tensor, query: Tensor, key_cache: Tensor, value_cache: Tensor, scaling: float
    ) -> None:
        """Fill the rows of output that the kernels compute: all rows except chunks on a processor with AMX."""
        pointers = query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr()
        num_kv_heads, threads = key_cache.shape[1], torch.get_num_threads()
        num_decodes, width = self.decode_rows.tables.shape
        if num_decodes:
            self.kernels.decode(
                *pointers, *self.decode_addresses, output.data_ptr(), num_decodes, len(self.decode_groups.shared),
                width, self.block_size, num_kv_heads, scaling, threads,
            )  # fmt: skip
        num_chunks, width = self.chunk_rows.tables.shape
        if num_chunks:
            self.kernels.chunk(
                *pointers, *self.chunk_addresses, output.data_ptr(), num_chunks, width, self.block_size, num_kv_heads,
                scaling, threads,
            )  # fmt: skip
