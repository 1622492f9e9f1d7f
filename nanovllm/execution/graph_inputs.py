"""The inputs of a captured step: one packed copy to the GPU, with the same layout for all steps of one shape."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.attention.tiles import Tiles
from nanovllm.batch_layout import BatchLayout
from nanovllm.execution.buckets import GraphShape
from nanovllm.sampling.sampler import DrawInputs


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The parts of a packed step, as tensors on the device or arrays on the host; see `StepTables` and `DrawInputs`.

    token_ids: [num_rows] int64; -1 - i for the i-th token that the previous step samples.
    positions, slot_mapping: [num_rows] int64; the padding's are 0.
    sample_rows: [num_samples] int64.
    noise_keys: [num_samples] int64.
    inverse_temperatures, noise_scales: [num_samples] float32.
    Those of attention are int32.
    """

    token_ids: Any
    positions: Any
    slot_mapping: Any
    sample_rows: Any
    noise_keys: Any
    inverse_temperatures: Any
    noise_scales: Any
    decode_tables: Any
    decode_blocks: Any
    tile_tables: Any
    tile_blocks: Any
    tile_is_used: Any
    tile_rows: Any
    chunk_rows: Any
    tables: Any


# Each part in the order of a packed step: its name, its length for a shape, its dtype on the host and on the device.
# The 64-bit ones come first, so that they are aligned.
_PARTS: tuple[tuple[str, Callable[[GraphShape, int], int], Any, torch.dtype], ...] = (
    ("token_ids", lambda shape, _: shape.num_rows, np.int64, torch.int64),
    ("positions", lambda shape, _: shape.num_rows, np.int64, torch.int64),
    ("slot_mapping", lambda shape, _: shape.num_rows, np.int64, torch.int64),
    ("sample_rows", lambda shape, _: shape.num_samples, np.int64, torch.int64),
    ("noise_keys", lambda shape, _: shape.num_samples, np.int64, torch.int64),
    ("inverse_temperatures", lambda shape, _: shape.num_samples, np.float32, torch.float32),
    ("noise_scales", lambda shape, _: shape.num_samples, np.float32, torch.float32),
    ("decode_tables", lambda shape, _: shape.num_decodes, np.int32, torch.int32),
    ("decode_blocks", lambda shape, _: shape.num_decodes, np.int32, torch.int32),
    ("tile_tables", lambda shape, _: shape.num_tiles, np.int32, torch.int32),
    ("tile_blocks", lambda shape, _: shape.num_tiles, np.int32, torch.int32),
    ("tile_is_used", lambda shape, _: shape.num_tiles, np.int32, torch.int32),
    ("tile_rows", lambda shape, block_size: shape.num_tiles * block_size, np.int32, torch.int32),
    ("chunk_rows", lambda shape, _: shape.num_chunk_rows, np.int32, torch.int32),
)


class StepPacking:
    """Where the parts of a step of one shape begin, in 32-bit words; the block tables, of any length, come last."""

    def __init__(self, shape: GraphShape, block_size: int) -> None:
        self.shape = shape
        self.block_size = block_size
        self._spans: dict[str, tuple[int, int]] = {}
        end = 0
        for name, length, dtype, _ in _PARTS:
            start, end = end, end + length(shape, block_size) * np.dtype(dtype).itemsize // 4
            self._spans[name] = start, end
        self.num_words = end  # without the tables

    def views(self, buffer: Any) -> StepInputs:
        """The parts of a packed step [n] int32, a tensor or an array; the tables are all of it behind the rest."""
        parts = {}
        for name, _, host_dtype, device_dtype in _PARTS:
            start, end = self._spans[name]
            parts[name] = buffer[start:end].view(device_dtype if isinstance(buffer, Tensor) else host_dtype)
        return StepInputs(**parts, tables=buffer[self.num_words :])

    def pack(self, layout: BatchLayout, tiles: Tiles, draws: DrawInputs | None, buffer: NDArray[np.int32]) -> None:
        """Write a step into `buffer` [num_words + num_table_words] int32."""
        buffer[: self.num_words] = 0
        to = self.views(buffer)
        real, padded, num_tokens = layout.num_decodes, self.shape.num_decodes, layout.num_tokens
        for rows, values in zip(
            (to.token_ids, to.positions, to.slot_mapping),
            (layout.token_ids, layout.positions, layout.slot_mapping),
            strict=True,
        ):
            rows[:real] = values[:real]
            rows[padded : padded + num_tokens - real] = values[real:]
        shift = padded - real
        to.sample_rows[: len(layout.sample_rows)] = np.where(
            layout.sample_rows < real, layout.sample_rows, layout.sample_rows + shift
        )
        if draws is not None:
            count = len(draws.noise_keys)
            to.noise_keys[:count] = draws.noise_keys
            to.inverse_temperatures[:count] = draws.inverse_temperatures
            to.noise_scales[:count] = draws.noise_scales
        lengths = layout.table_lengths
        to.tables[:] = np.fromiter(
            itertools.chain.from_iterable(entry.block_table for entry in layout.entries), np.int32, len(to.tables)
        )
        starts = np.cumsum(lengths) - lengths
        to.decode_tables[:real] = starts[:real]
        to.decode_blocks[:real] = layout.positions[:real] // self.block_size + 1
        count = len(tiles.blocks)
        if count:
            to.tile_tables[:count] = starts[real:][tiles.chunks]
            to.tile_blocks[:count] = tiles.blocks
            to.tile_is_used[:count] = 1
            to.tile_rows[: count * self.block_size] = np.where(tiles.rows < 0, 0, tiles.rows + padded)
            is_real = tiles.rows >= 0
            to.chunk_rows[tiles.rows[is_real]] = np.flatnonzero(is_real)


def with_sampled(token_ids: Tensor, sampled: Tensor) -> Tensor:
    """token_ids [num_rows] with -1 - i replaced by the i-th token of `sampled`.

    A request whose logits were not finite goes on with token 0 until the step is read, and ends then.
    """
    indices = (-1 - token_ids).clamp_(0, len(sampled) - 1)
    return torch.where(token_ids < 0, sampled[indices].clamp_(min=0), token_ids)
