"""The inputs of a GPU's block masks: named and filled on the host, read on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.batch import NULL_BLOCK
from nanovllm.fast.attention.block_tables import BlockTables
from nanovllm.fast.attention.shared_prefixes import PIECES_PER_DECODE, SharedPrefixes
from nanovllm.fast.attention.tiles import Tiles
from nanovllm.features.packed_steps import HostStep, StepFeature, StepInput
from nanovllm.layout import BatchLayout

BUNDLE_NUMBERS = 4  # numbers that describe a bundle of decodes that share blocks: see `StepTables`
WIDE_NUMBERS = 8  # numbers that describe a wide piece: see `StepTables`


@dataclass(frozen=True, slots=True)
class StepTables:
    """The inputs of a step's block masks, int32 on the device unless said otherwise.

    tables: the block tables of the step's sequences, concatenated; of every cache group.
    decode_tables: [num_decodes], start of each one's block table.
    decode_blocks: [num_decodes], blocks that it sees; 0 for padding.
    decode_positions: [num_decodes] int64, of its token.
    shared_blocks: [num_decodes], blocks at the start of its table that its bundle reads for it.
    members: [num_decodes], decodes of such bundles, bundle by bundle.
    shared_bundles: [num_decodes // 2, 4], of each bundle the index of its first member, number of members, number of
        blocks, start of its block table; 0 for padding.
    wide_parts: [num_decodes], pieces that wide programs compute for each one; [0] where none are launched.
    wide_pieces: [4 * num_decodes or 0, 8], index of the first member, number of members, first token, end, start of the
        block table, index among the pieces of these members, unused; 0 for padding.
    tile_tables: [num_tiles], start of the block table of each one's sequence.
    tile_blocks: [num_tiles], which of the sequence's blocks it is.
    tile_is_used: [num_tiles], 1, or 0 for padding.
    tile_rows: [num_tiles * block_size], the row of the flat batch in each row of the tiles.
    chunk_rows: [num_chunk_rows], the row of the tiles of each row of the flat batch after the decodes.
    spans: [num_tiles, 3], of each span of rows its first row in the flat batch, that row's position, number of rows; 0
        for padding. None without a kernel that reads them.
    span_tables: [num_tiles], start of the block table of each one's sequence.
    """

    tables: Tensor
    decode_tables: Tensor
    decode_blocks: Tensor
    decode_positions: Tensor
    shared_blocks: Tensor
    members: Tensor
    shared_bundles: Tensor
    wide_parts: Tensor
    wide_pieces: Tensor
    tile_tables: Tensor
    tile_blocks: Tensor
    tile_is_used: Tensor
    tile_rows: Tensor
    chunk_rows: Tensor
    spans: Tensor | None = None
    span_tables: Tensor | None = None

    @classmethod
    def from_inputs(cls, inputs: Any, group: int | None = None) -> StepTables:
        """The tables of a packed step, in one of several cache groups or in the only one (None)."""
        starts: list[Any] = [inputs.decode_tables, inputs.tile_tables, getattr(inputs, "span_tables", None)]
        if group is not None:
            starts = [None if part is None else part[group] for part in starts]
        decode_tables, tile_tables, span_tables = starts
        return cls(
            inputs.tables, decode_tables, inputs.decode_blocks, inputs.decode_positions,
            inputs.shared_blocks, inputs.members, inputs.shared_bundles, inputs.wide_parts,
            inputs.wide_pieces.reshape(-1, WIDE_NUMBERS), tile_tables, inputs.tile_blocks, inputs.tile_is_used,
            inputs.tile_rows.reshape(-1), inputs.chunk_rows,
            getattr(inputs, "spans", None), span_tables,
        )  # fmt: skip

    @property
    def sharing(self) -> tuple[Tensor, ...]:
        """The decodes that read blocks together."""
        return self.shared_blocks, self.members, self.shared_bundles, self.wide_parts, self.wide_pieces


class TableInputs(StepFeature):
    """The arrays of `StepTables`, filled from a step's `Tiles`; starts of block tables have a row for each cache group.

    Args:
        num_groups: number of cache groups; 0 where a single group holds all layers.
        has_spans: True if a kernel reads chunks by spans.
    """

    def __init__(self, block_size: int, num_groups: int = 0, *, has_spans: bool = False) -> None:
        self._block_size = block_size
        self._num_groups = num_groups
        self._tables = [BlockTables(block_size, np.int32, None) for _ in range(max(1, num_groups))]
        of_groups = (num_groups,) if num_groups else ()
        sizes: dict[str, tuple[int | str, ...] | None] = {
            "decode_tables": (*of_groups, "decodes"),
            "decode_blocks": ("decodes",),
            "shared_blocks": ("decodes",),
            "members": ("decodes",),
            "shared_bundles": ("pairs", BUNDLE_NUMBERS),
            "wide_parts": ("wide",),
            "wide_pieces": ("wide", PIECES_PER_DECODE, WIDE_NUMBERS),
            "tile_tables": (*of_groups, "tiles"),
            "tile_blocks": ("tiles",),
            "tile_is_used": ("tiles",),
            "tile_rows": ("tiles", block_size),
            "chunk_rows": ("chunk_rows",),
            **({"spans": ("tiles", 3), "span_tables": (*of_groups, "tiles")} if has_spans else {}),
        }
        self.inputs = (
            *(StepInput(name, np.int32, size) for name, size in sizes.items()),
            StepInput("decode_positions", np.int64, ("decodes",)),  # those of rows may be a rotary embedding's alone
            StepInput("tables", np.int32, None),
        )

    def num_more_words(self, layout: BatchLayout) -> int:
        """32-bit words of the block tables, which are equally long in all groups."""
        return len(self._tables) * int(self._lengths(layout).sum())

    def _lengths(self, layout: BatchLayout) -> NDArray[np.int64]:
        """[num_entries] blocks of each entry that its rows see or fill."""
        return layout.positions[layout.row_starts[1:] - 1] // self._block_size + 1

    def fill(self, to: Any, step: HostStep) -> None:
        layout = step.layout
        real = step.layout.num_decodes
        tiles = step.plan
        lengths = self._lengths(layout)
        self._fill_tables(to.tables, layout, lengths)
        starts = np.cumsum(lengths) - lengths
        # The groups' tables lie one after the other.
        offsets = np.arange(self._num_groups)[:, None] * lengths.sum() if self._num_groups else 0
        to.decode_tables[..., :real] = starts[:real] + offsets
        to.decode_positions[:real] = layout.positions[:real]
        to.decode_blocks[:real] = layout.positions[:real] // self._block_size + 1
        if tiles.prefixes is not None:
            _fill_prefixes(to, tiles.prefixes, starts, self._block_size)
        if count := len(tiles.blocks):
            to.tile_tables[..., :count] = starts[real:][tiles.chunks] + offsets
            self._fill_tiles(to, tiles, step.num_decodes)
        if tiles.spans is not None:
            count = len(tiles.spans)
            to.spans[:count] = tiles.spans[:, 1:]
            to.spans[:count, 0] += step.num_decodes
            to.span_tables[..., :count] = starts[real:][tiles.spans[:, 0]] + offsets

    def _fill_tables(self, to: NDArray[np.int32], layout: BatchLayout, lengths: NDArray[np.int64]) -> None:
        # further layouts may be of recurrent states
        rows = []
        layouts = (layout, *layout.others)
        for number, (tables, of_group) in enumerate(zip(self._tables, layouts, strict=False)):
            blocks = tables.update(of_group.entries, lengths - 1)
            for row, (entry, length) in enumerate(zip(of_group.entries, lengths.tolist(), strict=True)):
                if entry.sequence is not None and (kept := entry.sequence.group_tables) is not None:
                    # No later row sees these blocks, so they are freed.
                    blocks[row, : kept.first_held[number]] = NULL_BLOCK
                rows.append(blocks[row, :length])
        if rows:
            np.concatenate(rows, out=to)

    def _fill_tiles(self, to: Any, tiles: Tiles, first_row: int) -> None:
        count = len(tiles.blocks)
        is_real = tiles.rows >= 0
        to.tile_blocks[:count] = tiles.blocks
        to.tile_is_used[:count] = 1
        to.tile_rows[:count] = np.where(is_real, tiles.rows + first_row, 0).reshape(count, -1)
        to.chunk_rows[tiles.rows[is_real]] = np.flatnonzero(is_real)


def _fill_prefixes(to: Any, prefixes: SharedPrefixes, starts: NDArray[np.int64], block_size: int) -> None:
    if prefixes.wide is not None and len(to.wide_parts):  # the step is launched with wide programs
        prefixes = prefixes.wide
        assert prefixes.wide_parts is not None and prefixes.wide_pieces is not None
        to.wide_parts[: len(prefixes.wide_parts)] = prefixes.wide_parts
        pieces = to.wide_pieces.reshape(-1, WIDE_NUMBERS)[: len(prefixes.wide_pieces)]
        pieces[:, :2] = prefixes.wide_pieces[:, :2]
        pieces[:, 2:4] = prefixes.wide_pieces[:, 2:4] * block_size
        pieces[:, 4] = starts[prefixes.members[prefixes.wide_pieces[:, 0]]]
        pieces[:, 5] = prefixes.wide_pieces[:, 4]
    to.shared_blocks[: len(prefixes.shared)] = prefixes.shared
    to.members[: len(prefixes.members)] = prefixes.members
    bundles = to.shared_bundles[: len(prefixes.bundles)]
    bundles[:, :3] = prefixes.bundles
    bundles[:, 3] = starts[prefixes.members[prefixes.bundles[:, 0]]]  # start of the first member's block table
