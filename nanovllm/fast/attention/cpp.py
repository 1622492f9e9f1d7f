"""The CPU's backend: C++ kernels (`csrc/paged_attention.cpp`) that read K and V straight from their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from nanovllm.fast.attention.block_tables import BlockTables
from nanovllm.fast.attention.layer_traits import first_beyond
from nanovllm.fast.kernels.cpp import Kernels
from nanovllm.fast.kernels.packed_product import AttentionRowsStruct
from nanovllm.layout import BatchLayout, LayerTraits

# Decodes that begin with the same blocks read them together from so many query heads on; with fewer, most lanes of the
# kernel's vectors are empty. Estimated from the cost of a tile in both ways.
MIN_SHARING_QUERIES = 12


class CppAttention:
    """The `cpp` backend. One instance serves every layer of an engine.

    Args:
        kinds: kinds of the model's layers.
        kernels: C++ kernels of each kind, from `load_kernels`, for its dtype and sizes.
        num_blocks: blocks of each cache.
    """

    reads_whole_blocks = False

    def __init__(
        self, kinds: Sequence[LayerTraits], kernels: Sequence[Kernels], *, num_blocks: int, block_size: int
    ) -> None:
        self.block_size = block_size
        self._sees_all = [traits.sight.is_full for traits in kinds]
        self._kernels = [_KindKernels(*kind) for kind in zip(kinds, kernels, strict=True)]
        self._num_groups = min(traits.num_groups for traits in kinds)
        self._new_tables = partial(BlockTables, block_size, np.int64, num_blocks)
        self._decode_tables = self._new_tables()

    @staticmethod
    def supports(traits: LayerTraits) -> str | None:
        """The first trait of a layer that this backend cannot compute, in words; None if it serves the layer."""
        return first_beyond(traits, "window", "chunk", "softcap", "sinks", "widths")

    def plan(self, layout: BatchLayout) -> CppPlan:
        """Raises ValueError for block tables outside of the caches: the kernels check nothing."""
        decodes = self._rows(layout, slice(0, layout.num_decodes), self._decode_tables)
        chunks = self._rows(layout, slice(layout.num_decodes, None), self._new_tables())
        shared = alone = None
        if any(self._sees_all):
            min_members = -(-MIN_SHARING_QUERIES // self._num_groups)
            shared = _Decodes.from_rows(decodes, _Groups.from_rows(decodes, self.block_size, min_members))
        if not all(self._sees_all):
            alone = _Decodes.from_rows(decodes, _Groups.of_ones(layout.num_decodes))
        addresses = _addresses(chunks.tables, chunks.first_rows, chunks.starts, chunks.counts)
        return CppPlan(self.block_size, self._kernels, decodes, shared, alone, chunks, addresses)

    def _rows(self, layout: BatchLayout, part: slice, tables: BlockTables) -> _Rows:
        """Rows of all decodes or of all chunks, with their block tables."""
        entries = layout.entries[part]
        first_rows = layout.row_starts[:-1][part]
        starts = layout.positions[first_rows]
        counts = np.diff(layout.row_starts)[part]
        contexts = starts + counts
        lasts = (contexts - 1) // self.block_size
        for entry, last, context in zip(entries, lasts.tolist(), contexts.tolist(), strict=True):
            if len(entry.block_table) <= last:
                raise ValueError(
                    f"the block table of {entry.sequence.request_id!r} ends at "
                    f"{len(entry.block_table) * self.block_size} tokens, not {context}."
                )
        return _Rows(first_rows, starts, counts, contexts, tables.update(entries, lasts))


class _KindKernels:
    """The kernels of one kind of layers and their constant arguments."""

    def __init__(self, traits: LayerTraits, kernels: Kernels) -> None:
        self.kernels = kernels
        self.is_full = traits.sight.is_full
        self._traits = traits.sight.window or 0, traits.sight.chunk or 0, traits.softcap or 0.0
        self._without_sinks = (*self._traits, None)

    def arguments(self, sinks: Tensor | None) -> tuple[int | float | None, ...]:
        """Arguments of a call; sinks: [num_heads] float32, which must live until the kernels have run."""
        return self._without_sinks if sinks is None else (*self._traits, sinks.data_ptr())


def _addresses(*arrays: np.ndarray) -> tuple[int, ...]:
    return tuple(array.ctypes.data for array in arrays)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of consecutive entries as the kernels read them: int64, one item per entry."""

    first_rows: np.ndarray  # index of the first row in the flat batch
    starts: np.ndarray  # position of the first row
    counts: np.ndarray  # rows
    contexts: np.ndarray  # tokens that the last row sees
    tables: np.ndarray  # [num_entries, at least the blocks of the longest context]


@dataclass(frozen=True, slots=True)
class _Groups:
    """Decodes grouped by a common prefix of blocks, for example a system prompt: the kernel reads it once a group."""

    members: np.ndarray  # [num_sequences] the sequences, group by group
    starts: np.ndarray  # [num_groups + 1] the first of each group
    shared: np.ndarray  # [num_groups] tokens, whole blocks

    @classmethod
    def of_ones(cls, count: int) -> _Groups:
        """One group for each decode: with a window, decodes see only the ends of their contexts."""
        return cls(np.arange(count), np.arange(count + 1), np.zeros(count, np.int64))

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
class _Decodes:
    """Decodes in groups, and the addresses of all arrays: asking NumPy again takes a microsecond."""

    groups: _Groups
    addresses: tuple[int, ...]

    @classmethod
    def from_rows(cls, rows: _Rows, groups: _Groups) -> _Decodes:
        return cls(groups, _addresses(rows.tables, rows.contexts, groups.members, groups.starts, groups.shared))


@dataclass(frozen=True, slots=True)
class CppPlan:
    """One step's tables; queries and caches must be contiguous."""

    block_size: int
    kernels: list[_KindKernels]
    decode_rows: _Rows
    shared_decodes: _Decodes | None  # decodes as layers with full attention read them; None without such layers
    own_decodes: _Decodes | None  # decodes as the other layers read them
    chunk_rows: _Rows
    chunk_addresses: tuple[int, ...]

    def rows_of_sequences(self) -> list[int]:
        """The number of rows of each sequence, in the order of the batch."""
        return [*self.decode_rows.counts.tolist(), *self.chunk_rows.counts.tolist()]

    def rows_of_full_attention(self) -> AttentionRowsStruct:
        """Arguments for a stack of layers with full attention; valid as long as the plan."""
        assert self.shared_decodes is not None  # only an engine with such layers calls this
        num_decodes, decode_width = self.decode_rows.tables.shape
        return AttentionRowsStruct(
            *self.shared_decodes.addresses, num_decodes, len(self.shared_decodes.groups.shared), decode_width,
            *self.chunk_addresses, *self.chunk_rows.tables.shape, self.block_size,
        )  # fmt: skip

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scaling: float,
        kind: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        output = query.new_empty(*query.shape[:2], value_cache.shape[2])
        self.attend_into(output, query, key_cache, value_cache, scaling, kind, sinks)
        return output

    def attend_into(
        self,
        output: Tensor,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scaling: float,
        kind: int = 0,
        sinks: Tensor | None = None,
    ) -> None:
        """Fill output [num_rows, num_heads, value_dim]."""
        pointers = query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr()
        of_kind = self.kernels[kind]
        decodes = self.shared_decodes if of_kind.is_full else self.own_decodes
        sinks = None if sinks is None else sinks.float().contiguous()
        last = scaling, torch.get_num_threads(), *of_kind.arguments(sinks)
        num_kv_heads = key_cache.shape[1]
        num_decodes, width = self.decode_rows.tables.shape
        if num_decodes:
            assert decodes is not None
            of_kind.kernels.decode(
                *pointers, *decodes.addresses, output.data_ptr(), num_decodes, len(decodes.groups.shared), width,
                self.block_size, num_kv_heads, *last,
            )  # fmt: skip
        num_chunks, width = self.chunk_rows.tables.shape
        if num_chunks:
            of_kind.kernels.chunk(
                *pointers, *self.chunk_addresses, output.data_ptr(), num_chunks, width, self.block_size, num_kv_heads,
                *last,
            )  # fmt: skip
