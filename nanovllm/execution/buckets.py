"""The sizes that a step's decodes and rows are rounded up to on a GPU, so that a few captured CUDA graphs serve all."""

from __future__ import annotations

from bisect import bisect_left

from nanovllm.config import EngineConfig

MIN_ROWS = 4  # a matrix product of one row takes longer than one of four


class RowSizes:
    """Fine where a step is short and of one kind, coarse where kinds multiply: mixed steps.

    decodes: what the number of decodes becomes in a step without chunks, in ascending order.
    mixed_decodes: likewise in one with chunks.
    mixed_rows: what all rows of one with chunks become, the decodes' padding included.
    """

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        most, budget = max(MIN_ROWS, max_num_seqs), max_num_batched_tokens
        quarters = (n << k for k in range(5, 12) for n in (4, 5, 6, 7))
        self.decodes = up_to(most, [4, 8, 16, 24, 32, 48, 64, 96, *quarters])
        self.mixed_decodes = [0, *up_to(most, [4, 16, 64, 96, *(128 << n for n in range(8))])]
        sizes = [64, 128, *(n << k for k in range(7, 14) for n in (2, 3))]
        # The decodes' padding may take a full step past the budget, mostly by little.
        self.mixed_rows = [*up_to(budget, sizes), *(budget + size for size in up_to(most, [64, 128, 256, 512]))]

    @classmethod
    def of(cls, config: EngineConfig) -> RowSizes | None:
        """Those of an engine with this configuration, fully resolved; None if it rounds nothing up.

        A device that is still "auto" counts as one that rounds nothing up.
        """
        if config.device.partition(":")[0] != "cuda" or config.attention_backend not in ("flex", "flash"):
            return None
        return cls(config.max_num_seqs, config.max_num_batched_tokens)

    def of_step(self, num_decodes: int, num_chunk_rows: int) -> tuple[int, int]:
        """The decodes and the rows that a step of so many is computed as."""
        if not num_chunk_rows:
            size = round_up(self.decodes, num_decodes)
            return size, size
        num_decodes = round_up(self.mixed_decodes, num_decodes)
        return num_decodes, round_up(self.mixed_rows, num_decodes + num_chunk_rows)


def up_to(limit: int, sizes: list[int]) -> list[int]:
    """The sizes below the limit, and the limit."""
    return [*(size for size in sizes if size < limit), limit]


def round_up(sizes: list[int], size: int) -> int:
    return sizes[bisect_left(sizes, size)]
