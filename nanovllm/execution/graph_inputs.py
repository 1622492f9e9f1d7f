"""What a step takes to the GPU: one packed copy, whose parts stand in the same places for all steps of one shape.

A shape is a step's sizes rounded up to the next of a few, so that a few captured CUDA graphs serve all steps.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.attention.flex_gpu_options import KernelOptions
from nanovllm.batch_layout import BatchLayout
from nanovllm.config import EngineConfig
from nanovllm.execution.buckets import MIN_ROWS, RowSizes, round_up, up_to
from nanovllm.sampling.sampler import DrawInputs


class StepShape(NamedTuple):
    """Sizes of a step, padding included. The flat batch has its decodes first, padded, then its chunks, padded.

    num_rows: of the flat batch.
    draws: whether its tokens are drawn within the step; else the host's sampler takes its logits.
    is_uneven: whether one decode has much more to see than the others; see `KernelOptions`.
    """

    num_decodes: int
    num_rows: int
    num_tiles: int
    num_samples: int
    draws: bool
    is_uneven: bool = False


class Buckets:
    """Rounds a step up to a shape, its rows as `RowSizes` says.

    The first step of a shape waits for its graph, and that of a new number of decodes (with the FLASH backend also of
    tiles) for the compiler.
    """

    def __init__(self, config: EngineConfig, options: KernelOptions) -> None:
        self._block_size = config.block_size
        self._options = options
        self._budget = config.max_num_batched_tokens
        self._sizes = RowSizes(config.max_num_seqs, self._budget)
        # Whole blocks need one tile each, and a chunk may need one more, or two; decodes are sampled, and some chunks.
        self._more = up_to(max(4, 2 * config.max_num_seqs), [4 << 2 * n for n in range(8)])
        self.max_decodes = self._sizes.decodes[-1]
        self.max_rows = self._sizes.mixed_rows[-1]
        self.max_tiles = self._tiles(self.max_rows, self._more[-1])

    def shape(self, layout: BatchLayout, num_tiles: int, *, draws: bool) -> StepShape:
        """The shape of a step whose chunks are cut into `num_tiles`."""
        num_samples = len(layout.sample_rows)
        num_decodes, num_rows = self._sizes.of_step(layout.num_decodes, layout.num_tokens - layout.num_decodes)
        is_uneven = self._options.is_uneven(num_decodes, layout.positions[: layout.num_decodes] + 1)
        if not num_tiles:
            return StepShape(num_decodes, num_rows, 0, num_decodes, draws, is_uneven)
        num_tiles = self._tiles(num_rows, round_up(self._more, max(0, num_tiles - self._whole_tiles(num_rows))))
        num_samples = self._samples(num_decodes, round_up(self._more, max(0, num_samples - num_decodes)))
        return StepShape(num_decodes, num_rows, num_tiles, num_samples, draws, is_uneven)

    def _samples(self, num_decodes: int, more: int) -> int:
        return min(self.max_decodes, num_decodes + more)

    def _tiles(self, num_rows: int, more: int) -> int:
        num_tiles = self._whole_tiles(num_rows) + more
        step = min(64, max(4, 1 << max(0, num_tiles.bit_length() - 3)))  # an eighth to a quarter of most numbers
        return -(-num_tiles // step) * step

    def _whole_tiles(self, num_rows: int) -> int:
        return -(-num_rows // self._block_size)

    def common(self) -> list[StepShape]:
        """What is ready from the start: the steps of most rows, and decodes of few requests. Compiled code is laid out
        for the first of its kind; for decodes that is one of middling size."""
        most, rows = self.max_decodes, self.max_rows
        sizes = dict.fromkeys((round_up(self._sizes.decodes, min(64, most)), most, MIN_ROWS))
        largest = StepShape(most, rows, self._tiles(rows, self._more[0]), most, draws=True)
        return [largest, *(StepShape(size, size, 0, size, draws=True) for size in sizes)]

    def usual(self) -> list[StepShape]:
        """What steps of a server come to be: decodes of any number, and chunks of a few prompts beside some."""
        sizes = self._sizes
        shapes = [StepShape(size, size, 0, size, draws=True) for size in sizes.decodes]
        far = np.array([10**9])  # one token decoded behind a very long context
        few = (size for size in sizes.decodes if size <= 96 and self._options.is_uneven(size, far))
        shapes += [StepShape(size, size, 0, size, draws=True, is_uneven=True) for size in few]
        counts = [count for count in sizes.mixed_decodes if count <= 64]
        rows = sizes.mixed_rows[: sizes.mixed_rows.index(self._budget) + 2]  # a full step, with the decodes' padding
        return shapes + [
            StepShape(count, size, self._tiles(size, self._more[0]), self._samples(count, self._more[0]), draws=True)
            for count, size in itertools.product(counts, rows)
            if count < size and (count or size <= self._budget)
        ]

    def largest(self) -> StepShape:
        """What no part of a step's inputs exceeds."""
        return StepShape(self.max_decodes, self.max_rows, self.max_tiles, self.max_decodes, draws=True)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The parts of a packed step, as tensors on the device or arrays on the host; see `StepTables` and `DrawInputs`.

    token_ids: [num_rows] int64; -1 - i for the i-th token that the step before samples.
    positions, slots: [num_rows] int64; the padding's are 0.
    sample_rows: [num_samples] int64.
    noise_keys: [num_samples] int64.
    inverse_temperatures, noise_scales: [num_samples] float32.
    Those of attention are int32.
    """

    token_ids: Any
    positions: Any
    slots: Any
    sample_rows: Any
    noise_keys: Any
    inverse_temperatures: Any
    noise_scales: Any
    decode_tables: Any
    decode_pages: Any
    tile_tables: Any
    tile_blocks: Any
    tile_is_used: Any
    tile_rows: Any
    chunk_rows: Any
    tables: Any


class StepPacking:
    """Where the parts of a step of one shape stand, in 32-bit words; the block tables, of any length, come last."""

    def __init__(self, shape: StepShape, block_size: int) -> None:
        rows, samples, decodes, tiles = shape.num_rows, shape.num_samples, shape.num_decodes, shape.num_tiles
        lengths = [rows, rows, rows, samples, samples, samples, samples, decodes, decodes, tiles, tiles, tiles,
                   tiles * block_size, (rows - decodes) if tiles else 0]  # fmt: skip
        words = [2] * 5 + [1] * 9
        ends = np.cumsum(np.array(lengths) * words)
        self.shape = shape
        self.block_size = block_size
        self.num_words = int(ends[-1])  # without the tables
        self._spans = list(zip((ends - np.array(lengths) * words).tolist(), ends.tolist(), strict=True))

    def views(self, buffer: Any) -> StepInputs:
        """The parts of a packed step [n] int32, a tensor or an array; the tables are all of it behind the rest."""
        wide, real = (torch.int64, torch.float32) if isinstance(buffer, Tensor) else (np.int64, np.float32)
        parts = [buffer[start:end] for start, end in self._spans]
        parts[:5] = [part.view(wide) for part in parts[:5]]
        parts[5:7] = [part.view(real) for part in parts[5:7]]
        return StepInputs(*[*parts, buffer[self.num_words :]])

    def pack(self, layout: BatchLayout, tiles: Tiles, draws: DrawInputs | None, buffer: NDArray[np.int32]) -> None:
        """Write a step into `buffer` [num_words + num_table_words] int32."""
        buffer[: self.num_words] = 0
        to = self.views(buffer)
        real, padded, num_tokens = layout.num_decodes, self.shape.num_decodes, layout.num_tokens
        for rows, values in zip(
            (to.token_ids, to.positions, to.slots), (layout.token_ids, layout.positions, layout.slots), strict=True
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
        to.decode_pages[:real] = layout.positions[:real] // self.block_size + 1
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

    A request whose logits were not finite has no token to go on with; it ends when that is read, and goes on with token
    0 until then.
    """
    places = (-1 - token_ids).clamp_(0, len(sampled) - 1)
    return torch.where(token_ids < 0, sampled[places].clamp_(min=0), token_ids)


@dataclass(frozen=True, slots=True)
class Tiles:
    """The chunks of a step, cut at the borders of blocks; those that see most come first.

    chunks: [num_tiles] which chunk.
    blocks: [num_tiles] which of its sequence's blocks.
    rows: [num_tiles * block_size] row among the chunks' rows, -1 where the chunk has none.
    """

    chunks: NDArray[np.int64]
    blocks: NDArray[np.int64]
    rows: NDArray[np.int64]

    @classmethod
    def of(cls, layout: BatchLayout, block_size: int) -> Tiles:
        entries = layout.chunks
        if not entries:
            nothing = np.zeros(0, np.int64)
            return cls(nothing, nothing, nothing)
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
        return cls(chunks, blocks, rows.reshape(-1))
