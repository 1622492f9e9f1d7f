"""Buckets: a step's sizes rounded up on a GPU, so that a few captured CUDA graphs serve all steps. No torch."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from nanovllm.batch import ScheduledSequence
from nanovllm.features.engine_config import EngineConfig
from nanovllm.layout import BatchLayout

MIN_ROWS = 4  # a matrix product of one row takes longer than one of four
MAX_MORE_TILES = 256  # beyond whole blocks, in a captured step; the graphs' memory holds the queries of all of them
STAND_IN_ROWS = 2048  # rows up to which a graph's replay takes less time than launching a step from the host


class RowSizes:
    """Bucket sizes in ascending order: fine for short steps of decodes alone, coarse for steps with chunks.

    decodes: numbers of decodes in a step without chunks; multiples of MIN_ROWS, so that few kernels serve any limit.
    mixed_decodes: numbers of decodes in a step with chunks.
    mixed_rows: numbers of rows in a step with chunks, the decodes' padding included.
    """

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        most = -(-max_num_seqs // MIN_ROWS) * MIN_ROWS
        budget = max_num_batched_tokens
        quarters = (n << k for k in range(5, 12) for n in (4, 5, 6, 7))
        self.decodes = up_to(most, [4, 8, 16, 24, 32, 48, 64, 96, *quarters])
        self.mixed_decodes = [0, *up_to(most, [16, 64, *(128 << n for n in range(8))])]
        sizes = [64, 128, *(n << k for k in range(7, 14) for n in (2, 3))]
        # A long prompt's chunk is often half the budget, and decodes and short prompts lie just above it.
        sizes = sorted({*sizes, *(budget // 2 + size for size in (512, 1536) if budget >= 4096)})
        # The decodes' padding may take a full step past the budget, mostly by little.
        self.mixed_rows = [*up_to(budget, sizes), *(budget + size for size in up_to(most, [64, 128, 256, 512]))]

    @classmethod
    def from_config(cls, config: EngineConfig) -> RowSizes | None:
        """The sizes of a fully resolved configuration; None without CUDA graphs' layout.

        A device that is still "auto" counts as one that rounds nothing up.
        """
        if config.device.partition(":")[0] != "cuda" or config.attention_backend != "flex":
            return None
        return cls(config.max_num_seqs, config.max_num_batched_tokens)

    def padded(self, num_decodes: int, num_chunk_rows: int) -> tuple[int, int]:
        """The numbers of decodes and of rows, rounded up."""
        if not num_chunk_rows:
            size = round_up(self.decodes, num_decodes)
            return size, size
        num_decodes = round_up(self.mixed_decodes, num_decodes)
        return num_decodes, round_up(self.mixed_rows, num_decodes + num_chunk_rows)


def up_to(limit: int, sizes: list[int]) -> list[int]:
    """The sizes below the limit, then the limit."""
    return [*(size for size in sizes if size < limit), limit]


def round_up(sizes: list[int], size: int) -> int:
    return sizes[bisect_left(sizes, size)]


def runs_as_decodes(entries: Iterable[ScheduledSequence]) -> tuple[ScheduledSequence, ...]:
    """Entries with each row of a run as a decode, in the same order.

    A step with drafts then has the shape of a step of decodes, which is captured, and a decode kernel that splits
    contexts among programs reads blocks once that a run's rows share.
    """
    placed: list[ScheduledSequence] = []
    for entry in entries:
        if 1 < entry.num_samples == entry.num_new_tokens:
            rows = range(entry.start, entry.start + entry.num_new_tokens)
            placed += [entry._replace(start=row, num_new_tokens=1, num_samples=1) for row in rows]
        else:
            placed.append(entry)
    return tuple(placed)


class HeadShape(NamedTuple):
    """A captured head: logits of `num_samples` rows and, if it draws, their tokens with filters applied.

    The last three fields are `DrawExtras`.
    """

    num_samples: int
    draws: bool
    has_filters: bool = False
    penalises: bool = False
    num_top: int | None = None
    has_masks: bool = False

    @property
    def copies_logits(self) -> bool:
        """Whether it allocates a second copy of the logits."""
        return self.penalises or self.has_masks

    @property
    def is_rare(self) -> bool:
        """Whether it is none of `Buckets.heads`."""
        return self.penalises or self.num_top is not None or self.has_masks


def spread(sizes: list[int], factor: float) -> set[int]:
    """The largest of the ascending sizes, then each that is smaller than the last chosen one by this factor."""
    chosen = [sizes[-1]]
    for size in reversed(sizes):
        if size * factor <= chosen[-1]:
            chosen.append(size)
    return set(chosen)


class GraphShape(NamedTuple):
    """Sizes of a captured forward pass, padding included: first the decodes, padded, then the chunks, padded.

    num_rows: rows of the flat batch.
    is_wide: True if wide programs read prefixes that many of its decodes share.
    """

    num_decodes: int
    num_rows: int
    num_tiles: int
    is_wide: bool = False

    @property
    def num_chunk_rows(self) -> int:
        return self.num_rows - self.num_decodes if self.num_tiles else 0

    def holds(self, other: GraphShape) -> bool:
        """Whether a step of the other shape can be computed as this one, with more padding."""
        return (
            self.num_decodes >= other.num_decodes
            and self.num_chunk_rows >= other.num_chunk_rows
            and self.num_tiles >= other.num_tiles
        )


class Buckets:
    """Rounds a step's rows (by `RowSizes`), tiles and samples up.

    `usual` lists all sizes of rows, but not of tiles: many short chunks in one step need more tiles.

    Args:
        only_decodes: capture no step with chunks.
    """

    def __init__(self, config: EngineConfig, *, only_decodes: bool = False) -> None:
        self._block_size = config.block_size
        self._only_decodes = only_decodes
        self._budget = config.max_num_batched_tokens
        self._sizes = RowSizes(config.max_num_seqs, self._budget)
        # Whole blocks need one tile each, and a chunk may need one more, or two.
        self._more = up_to(max(8, 2 * config.max_num_seqs), [8, 32, 128, 256, *(512 << 2 * n for n in range(4))])
        self.sample_counts = self._sizes.decodes
        self._rare_counts = sorted(spread(self.sample_counts, 1.9))
        self.max_decodes = self._sizes.decodes[-1]
        self.max_rows = self._sizes.mixed_rows[-1]
        self.max_tiles = self._tiles(self.max_rows, self._more[-1])
        self.max_captured_tiles = self._tiles(self.max_rows, min(MAX_MORE_TILES, self._more[-1]))

    def shape(self, layout: BatchLayout, num_tiles: int, *, is_wide: bool = False) -> GraphShape:
        """The shape of a step with chunks of `num_tiles` tiles, which may be padding; one without any may be wide."""
        num_chunk_rows = max(layout.num_tokens - layout.num_decodes, min(1, num_tiles))
        num_decodes, num_rows = self._sizes.padded(layout.num_decodes, num_chunk_rows)
        if num_tiles:
            num_tiles = self._tiles(num_rows, round_up(self._more, max(0, num_tiles - self._whole_tiles(num_rows))))
        return GraphShape(num_decodes, num_rows, num_tiles, is_wide and not num_tiles)

    def may_capture(self, shape: GraphShape) -> bool:
        """Whether the graphs' memory holds a step of this shape."""
        return shape.num_tiles <= (0 if self._only_decodes else self.max_captured_tiles)

    def num_samples(self, count: int, *, is_rare: bool = False) -> int:
        """The number of sample rows, rounded up; heads with rare options have fewer sizes."""
        return round_up(self._rare_counts if is_rare else self.sample_counts, count)

    def heads(self) -> list[HeadShape]:
        """Every head without rare options, the most samples first."""
        counts = reversed(self.sample_counts)
        return [HeadShape(n, *kind) for n in counts for kind in ((True, False), (True, True), (False, False))]

    @staticmethod
    def stand_in(shape: GraphShape, captured: Iterable[GraphShape], *, at_any_cost: bool = False) -> GraphShape | None:
        """The smallest captured shape that holds a step of this shape; None if a launch without a graph is faster.

        Args:
            at_any_cost: True to take a slower one too, since without a graph the step would wait for a compiler.
        """
        most = max(STAND_IN_ROWS, shape.num_rows * 3 // 2)
        holding = [other for other in captured if other.holds(shape) and (at_any_cost or other.num_rows <= most)]
        # A graph of the other kind computes the step too, but none that is padded to many more rows for its kind.
        return min(holding, key=lambda other: (*other[1:3], other[0], other.is_wide != shape.is_wide), default=None)

    def _tiles(self, num_rows: int, more: int) -> int:
        num_tiles = self._whole_tiles(num_rows) + more
        step = min(64, max(4, 1 << max(0, num_tiles.bit_length() - 3)))  # an eighth to a quarter of most numbers
        return -(-num_tiles // step) * step

    def _whole_tiles(self, num_rows: int) -> int:
        return -(-num_rows // self._block_size)

    def common(self) -> list[GraphShape]:
        """The largest shape, then a medium, the largest and the smallest number of decodes.

        The compiler optimises for the first shape that it sees: for decodes the medium one.
        """
        most = self.max_decodes
        rows = self.max_rows
        sizes = dict.fromkeys((round_up(self._sizes.decodes, min(64, most)), most, MIN_ROWS))
        largest = GraphShape(most, rows, self._tiles(rows, self._more[0]))
        return [*([] if self._only_decodes else [largest]), *(GraphShape(size, size, 0) for size in sizes)]

    def coarse(self) -> list[GraphShape]:
        """The usual shapes that start-up captures: with padding they hold all others."""
        sizes = self._sizes
        budget = self._budget
        decodes = spread(sizes.decodes, 1.3)
        counts = spread(sizes.mixed_decodes, 4)
        rows = spread(sizes.mixed_rows[: sizes.mixed_rows.index(budget) + 1], 1.9)

        def is_coarse(shape: GraphShape) -> bool:
            if not shape.num_tiles:
                return shape.num_decodes in decodes
            return shape.num_rows >= budget or (shape.num_decodes in counts and shape.num_rows in rows)

        return [shape for shape in self.usual() if is_coarse(shape)]

    def at_start(self, *, compiles_each_size: bool) -> list[GraphShape | HeadShape]:
        """Shapes to capture before the first step, the largest first; few if each number of decodes is compiled."""
        shapes: dict[GraphShape | HeadShape, None] = dict.fromkeys(self.common())
        if not compiles_each_size:
            shapes |= dict.fromkeys(self.coarse())
        return [*(shapes | dict.fromkeys(self.heads()))]

    def usual(self) -> list[GraphShape]:
        """Shapes worth capturing while idle: any number of decodes, alone and together with chunks of a few prompts."""
        sizes = self._sizes
        shapes = [GraphShape(size, size, 0) for size in sizes.decodes]
        if self._only_decodes:
            return shapes
        rows = sizes.mixed_rows[: sizes.mixed_rows.index(self._budget) + 2]  # a full step, with the decodes' padding
        return shapes + [
            GraphShape(count, size, self._tiles(size, self._more[0]))
            for count, size in itertools.product(sizes.mixed_decodes, rows)
            if count < size and (count or size <= self._budget)
        ]

    def with_chunks(self) -> GraphShape:
        """A full step of chunks alone."""
        return GraphShape(0, self._budget, self._tiles(self._budget, self._more[0]))

    def largest(self) -> GraphShape:
        """Upper bound of every input's size."""
        return GraphShape(self.max_decodes, self.max_rows, self.max_tiles, is_wide=True)
