"""The host's part of a GPU's block masks: chunks cut into query tiles, and decodes that read blocks together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nanovllm.attention.shared_prefixes import SharedPrefixes
from nanovllm.core.batch_layout import BatchLayout


@dataclass(frozen=True, slots=True)
class Tiles:
    """The query tiles of a step's chunks, cut at block boundaries, those with the longest context first.

    chunks: [num_tiles] which chunk.
    blocks: [num_tiles] which of its sequence's blocks.
    rows: [num_tiles * block_size] row among the chunks' rows, -1 where the chunk has none.
    prefixes: of the decodes, None if no blocks are read together.
    """

    chunks: NDArray[np.int64]
    blocks: NDArray[np.int64]
    rows: NDArray[np.int64]
    prefixes: SharedPrefixes | None = None

    @classmethod
    def from_layout(cls, layout: BatchLayout, block_size: int, prefixes: SharedPrefixes | None = None) -> Tiles:
        entries = layout.chunks
        if not entries:
            nothing = np.zeros(0, np.int64)
            return cls(nothing, nothing, nothing, prefixes)
        first_rows = layout.row_starts[layout.num_decodes : -1] - layout.num_decodes
        starts = np.fromiter((entry.start for entry in entries), np.int64, len(entries))
        ends = starts + np.fromiter((entry.num_new_tokens for entry in entries), np.int64, len(entries))
        counts = -(-ends // block_size) - starts // block_size
        chunks = np.repeat(np.arange(len(entries)), counts)
        blocks = np.arange(len(chunks)) - np.repeat(np.cumsum(counts) - counts - starts // block_size, counts)
        order = np.argsort(-blocks, kind="stable")
        chunks, blocks = chunks[order], blocks[order]
        positions = blocks[:, None] * block_size + np.arange(block_size)
        starts, ends, first_rows = starts[chunks, None], ends[chunks, None], first_rows[chunks, None]
        rows = np.where((positions >= starts) & (positions < ends), first_rows + positions - starts, -1)
        return cls(chunks, blocks, rows.reshape(-1), prefixes)
