"""The inputs of a captured step: one packed copy to the GPU, with the same layout for all steps of one shape."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.attention.flex_gpu import StepTables
from nanovllm.attention.shared_prefixes import SharedPrefixes
from nanovllm.attention.tiles import Tiles
from nanovllm.core.batch_layout import BatchLayout
from nanovllm.execution.buckets import GraphShape
from nanovllm.sampling.draw import DrawInputs, DrawTensors


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The parts of a packed step, as tensors on the device or arrays on the host; see `StepTables` and `DrawInputs`.

    sample_rows: [max_samples] int64, rows of the flat batch whose logits are wanted.
    draws: `DrawTensors` of [max_samples] each.
    token_ids: [num_rows] int64; -1 - i for the i-th token that the previous step samples.
    positions, slot_mapping: [num_rows] int64; the padding's are 0.
    Those of attention are int32. Where layers form several cache groups, slot_mapping has a row for each kind of
    layers, and what begins block tables (decode_tables, tile_tables) one for each group.
    """

    sample_rows: Any
    draws: Any
    token_ids: Any
    positions: Any
    slot_mapping: Any
    decode_tables: Any
    decode_blocks: Any
    shared_blocks: Any
    members: Any
    shared_bundles: Any
    tile_tables: Any
    tile_blocks: Any
    tile_is_used: Any
    tile_rows: Any
    chunk_rows: Any
    tables: Any


BUNDLE_NUMBERS = 4  # of a bundle of decodes that share blocks: see `StepTables`

# Each part in the order of a packed step: its name, its dtype on the host and on the device. What drawing reads comes
# first, at the same place for every shape, since the graphs that draw serve all shapes.
_INT64, _INT32, _FLOAT32 = (np.int64, torch.int64), (np.int32, torch.int32), (np.float32, torch.float32)
_DRAW_PARTS = (
    ("sample_rows", _INT64),
    ("noise_keys", _INT64),
    ("inverse_temperatures", _FLOAT32),
    ("noise_scales", _FLOAT32),
    ("top_k", _INT32),
    ("top_p", _FLOAT32),
    ("min_p", _FLOAT32),
    ("is_cold", _INT32),
)
_SHAPE_PARTS: tuple[tuple[str, Callable[[GraphShape, int], int], tuple[Any, torch.dtype]], ...] = (
    ("token_ids", lambda shape, _: shape.num_rows, _INT64),
    ("positions", lambda shape, _: shape.num_rows, _INT64),
    ("slot_mapping", lambda shape, _: shape.num_rows, _INT64),
    ("decode_tables", lambda shape, _: shape.num_decodes, _INT32),
    ("decode_blocks", lambda shape, _: shape.num_decodes, _INT32),
    ("shared_blocks", lambda shape, _: shape.num_decodes, _INT32),
    ("members", lambda shape, _: shape.num_decodes, _INT32),
    ("shared_bundles", lambda shape, _: shape.num_decodes // 2 * BUNDLE_NUMBERS, _INT32),
    ("tile_tables", lambda shape, _: shape.num_tiles, _INT32),
    ("tile_blocks", lambda shape, _: shape.num_tiles, _INT32),
    ("tile_is_used", lambda shape, _: shape.num_tiles, _INT32),
    ("tile_rows", lambda shape, block_size: shape.num_tiles * block_size, _INT32),
    ("chunk_rows", lambda shape, _: shape.num_chunk_rows, _INT32),
)


class StepPacking:
    """Where the parts of a step of one shape begin, in 32-bit words; the block tables, of any length, come last.

    Args:
        kind_groups: the cache group of each kind of layers, where there are several groups.
    """

    def __init__(self, shape: GraphShape, block_size: int, max_samples: int, kind_groups: Sequence[int] = ()) -> None:
        self.shape = shape
        self.block_size = block_size
        self.kind_groups = tuple(kind_groups)
        self.num_groups = 1 + max(kind_groups, default=0)
        self._spans: dict[str, tuple[int, int, Any, torch.dtype]] = {}
        self._num_rows = {}  # of the parts that have several
        if kind_groups:
            of_groups = dict.fromkeys(("decode_tables", "tile_tables"), self.num_groups)
            self._num_rows = {"slot_mapping": len(kind_groups), **of_groups}
        lengths = [(name, max_samples, dtypes) for name, dtypes in _DRAW_PARTS]
        lengths += [
            (name, length(shape, block_size) * self._num_rows.get(name, 1), dtypes)
            for name, length, dtypes in _SHAPE_PARTS
        ]
        end = 0
        for name, length, dtypes in lengths:
            num_words = np.dtype(dtypes[0]).itemsize // 4
            start = -(-end // num_words) * num_words  # aligned
            end = start + length * num_words
            self._spans[name] = start, end, *dtypes
        self.num_words = end  # without the tables

    def num_words_for(self, layout: BatchLayout) -> int:
        """Those of a packed step with its block tables, which are equally long in all groups."""
        return self.num_words + self.num_groups * int(layout.table_lengths.sum())

    def views(self, buffer: Any) -> StepInputs:
        """The parts of a packed step [n] int32, a tensor or an array; the tables are all of it behind the rest."""
        parts = {
            name: buffer[start:end].view(device_dtype if isinstance(buffer, Tensor) else host_dtype)
            for name, (start, end, host_dtype, device_dtype) in self._spans.items()
        }
        for name, num_rows in self._num_rows.items():
            parts[name] = parts[name].reshape(num_rows, -1)  # a view
        draws = DrawTensors(*(parts.pop(name) for name in DrawTensors._fields))
        return StepInputs(**parts, draws=draws, tables=buffer[self.num_words :])

    def pack(self, layout: BatchLayout, tiles: Tiles, draws: DrawInputs | None, buffer: NDArray[np.int32]) -> None:
        """Write a step into `buffer` [num_words + num_table_words] int32."""
        buffer[: self.num_words] = 0
        to = self.views(buffer)
        real, padded, num_tokens = layout.num_decodes, self.shape.num_decodes, layout.num_tokens
        layouts = layout, *layout.others  # of each group
        slot_mappings = [layouts[group].slot_mapping for group in self.kind_groups] or [layout.slot_mapping]
        for rows, values in zip(
            (to.token_ids, to.positions, *(to.slot_mapping if self.kind_groups else [to.slot_mapping])),
            (layout.token_ids, layout.positions, *slot_mappings),
            strict=True,
        ):
            rows[:real] = values[:real]
            rows[padded : padded + num_tokens - real] = values[real:]
        to.sample_rows[: len(layout.sample_rows)] = layout.sample_rows + (padded - real) * (layout.sample_rows >= real)
        if draws is not None:
            for part, drawn in zip(to.draws, draws, strict=True):
                part[: len(draws.noise_keys)] = drawn
        lengths = layout.table_lengths
        entries = itertools.chain.from_iterable(of_group.entries for of_group in layouts[: self.num_groups])
        to.tables[:] = np.fromiter(
            itertools.chain.from_iterable(entry.block_table for entry in entries), np.int32, len(to.tables)
        )
        starts = np.cumsum(lengths) - lengths
        # The tables of each group lie behind all of the one before.
        behind = np.arange(self.num_groups)[:, None] * lengths.sum()
        to.decode_tables[..., :real] = starts[:real] + (behind if self.kind_groups else 0)
        to.decode_blocks[:real] = layout.positions[:real] // self.block_size + 1
        if tiles.prefixes is not None:
            _pack_prefixes(to, tiles.prefixes, starts)
        count = len(tiles.blocks)
        if count:
            to.tile_tables[..., :count] = starts[real:][tiles.chunks] + (behind if self.kind_groups else 0)
            to.tile_blocks[:count] = tiles.blocks
            to.tile_is_used[:count] = 1
            to.tile_rows[: count * self.block_size] = np.where(tiles.rows < 0, 0, tiles.rows + padded)
            is_real = tiles.rows >= 0
            to.chunk_rows[tiles.rows[is_real]] = np.flatnonzero(is_real)


def tables_of(inputs: StepInputs, shape: GraphShape, group: int | None = None) -> StepTables:
    """What the attention of a packed step reads, in one of several cache groups or in the only one (None)."""
    starts = inputs.decode_tables, inputs.tile_tables
    decode_tables, tile_tables = starts if group is None else (part[group] for part in starts)
    return StepTables(
        inputs.tables, decode_tables, inputs.decode_blocks, inputs.positions[: shape.num_decodes],
        inputs.shared_blocks, inputs.members, inputs.shared_bundles.view(-1, BUNDLE_NUMBERS), tile_tables,
        inputs.tile_blocks, inputs.tile_is_used, inputs.tile_rows, inputs.chunk_rows,
    )  # fmt: skip


def _pack_prefixes(to: StepInputs, prefixes: SharedPrefixes, starts: NDArray[np.int64]) -> None:
    to.shared_blocks[: len(prefixes.shared)] = prefixes.shared
    to.members[: len(prefixes.members)] = prefixes.members
    bundles = to.shared_bundles.reshape(-1, BUNDLE_NUMBERS)[: len(prefixes.bundles)]
    bundles[:, :3] = prefixes.bundles
    bundles[:, 3] = starts[prefixes.members[prefixes.bundles[:, 0]]]  # of the first member's block table


def with_sampled(token_ids: Tensor, sampled: Tensor) -> Tensor:
    """token_ids [num_rows] with -1 - i replaced by the i-th token of `sampled`.

    A request whose logits were not finite goes on with token 0 until the step is read, and ends then.
    """
    indices = (-1 - token_ids).clamp_(0, len(sampled) - 1)
    return torch.where(token_ids < 0, sampled[indices].clamp_(min=0), token_ids)
