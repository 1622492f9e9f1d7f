"""The host's part of a GPU's block masks: chunks cut into query tiles, and decodes that read blocks together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nanovllm.fast.attention.shared_prefixes import SharedPrefixes
from nanovllm.layout import BatchLayout

SPAN_ROWS = 128
GROUP_ROWS = 2048  # two spans and heads for each multiprocessor, so that their lengths add up evenly


@dataclass(frozen=True, slots=True)
class Tiles:
    """The query tiles of a step's chunks, cut at block boundaries, those with the longest context first.

    chunks: [num_tiles] which chunk.
    blocks: [num_tiles] which of its sequence's blocks.
    rows: [num_tiles * block_size] row among the chunks' rows, -1 where the chunk has none.
    prefixes: prefixes that decodes share, None if no blocks are read together.
    spans: [num_spans, 4] up to `SPAN_ROWS` consecutive rows each: chunk, first row among the chunks' rows, position of
        that row, number of rows. There are no more than tiles.
    """

    chunks: NDArray[np.int64]
    blocks: NDArray[np.int64]
    rows: NDArray[np.int64]
    prefixes: SharedPrefixes | None = None
    spans: NDArray[np.int64] | None = None

    @property
    def has_wide_groups(self) -> bool:
        """Whether a launch with wide programs reads less."""
        return self.prefixes is not None and self.prefixes.wide is not None

    @classmethod
    def from_layout(
        cls,
        layout: BatchLayout,
        block_size: int,
        prefixes: SharedPrefixes | None = None,
        *,
        with_spans: bool = False,
    ) -> Tiles:
        """The tiles of a layout's chunks; with_spans: True if a kernel reads spans."""
        entries = layout.chunks
        if not entries:
            nothing = np.zeros(0, np.int64)
            return cls(nothing, nothing, nothing, prefixes)
        first_rows = layout.row_starts[layout.num_decodes : -1] - layout.num_decodes
        starts = np.fromiter((entry.start for entry in entries), np.int64, len(entries))
        ends = starts + np.fromiter((entry.num_new_tokens for entry in entries), np.int64, len(entries))
        spans = spans_of(first_rows, starts, ends) if with_spans else None
        counts = -(-ends // block_size) - starts // block_size
        chunks = np.repeat(np.arange(len(entries)), counts)
        blocks = np.arange(len(chunks)) - np.repeat(np.cumsum(counts) - counts - starts // block_size, counts)
        order = np.argsort(-blocks, kind="stable")
        chunks = chunks[order]
        blocks = blocks[order]
        positions = blocks[:, None] * block_size + np.arange(block_size)
        starts = starts[chunks, None]
        ends = ends[chunks, None]
        first_rows = first_rows[chunks, None]
        rows = np.where((positions >= starts) & (positions < ends), first_rows + positions - starts, -1)
        return cls(chunks, blocks, rows.reshape(-1), prefixes, spans)


def spans_of(first_rows: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """`Tiles.spans` of chunks of positions starts to ends - 1.

    Spans that run at the same time read the same keys out of the GPU's cache: chunks are grouped, the longest context
    first, and spans of a group sorted by their contexts.
    """
    counts = -(-(ends - starts) // SPAN_ROWS)
    chunks = np.repeat(np.arange(len(starts)), counts)
    offsets = SPAN_ROWS * (np.arange(len(chunks)) - np.repeat(np.cumsum(counts) - counts, counts))
    positions = starts[chunks] + offsets
    num_rows = np.minimum(ends[chunks] - positions, SPAN_ROWS)
    spans = np.stack([chunks, first_rows[chunks] + offsets, positions, num_rows], axis=1)
    order = np.argsort(-ends, kind="stable")
    groups = np.empty(len(starts), np.int64)
    rows = (ends - starts)[order]
    groups[order] = (np.cumsum(rows) - rows) // GROUP_ROWS
    return spans[np.lexsort((-positions, groups[chunks]))]
