"""Cache groups: layers whose rows see the same positions share a block table and a pool of blocks."""

from __future__ import annotations

from typing import NamedTuple


class CacheGroup(NamedTuple):
    """Layers that keep K and V of the same positions.

    layers: their indices in the model.
    block_bytes: of one block over all of them.
    window: a row at position q sees q - window + 1 to q; None for no such limit.
    chunk: a row sees its own chunk alone, the positions p with p // chunk == q // chunk; None for no such limit.
    """

    layers: tuple[int, ...] = ()
    block_bytes: int = 0
    window: int | None = None
    chunk: int | None = None

    @property
    def is_full(self) -> bool:
        """Whether every block is needed as long as its sequence runs."""
        return self.window is None and self.chunk is None

    def first_block(self, num_tokens: int, block_size: int) -> int:
        """The first block that a sequence needs which goes on behind `num_tokens` computed tokens.

        Counted from the last block boundary, so that whoever hits the prefix there finds all that it needs; the last
        full block is always needed, since the prefix of the next one is known by it.
        """
        num_full = num_tokens // block_size
        position, first = num_full * block_size, 0
        if self.window is not None:
            first = max(first, position - self.window + 1)
        if self.chunk is not None:
            first = max(first, position // self.chunk * self.chunk)
        return max(0, min(first // block_size, num_full - 1))

    def num_seen(self, num_tokens: int) -> int:
        """Positions that the last of `num_tokens` sees."""
        seen = num_tokens if self.window is None else min(num_tokens, self.window)
        return seen if self.chunk is None else min(seen, (num_tokens - 1) % self.chunk + 1)

    def num_pairs(self, start: int, count: int) -> int:
        """Pairs of a row and a position that it sees, for `count` rows from position `start` on."""
        if self.is_full:
            return count * start + count * (count + 1) // 2
        if self.chunk is None and self.window is not None:
            rising = max(0, min(count, self.window - start))  # rows that see all before them
            return rising * start + rising * (rising + 1) // 2 + (count - rising) * self.window
        return sum(self.num_seen(position + 1) for position in range(start, start + count))

    def max_blocks(self, max_model_len: int, block_size: int) -> int:
        """Blocks that one sequence needs at most, the next token's included, once its steps were read."""
        longest, span = -(-max_model_len // block_size), max_model_len
        if self.window is not None:
            span = min(span, self.window - 1)
        if self.chunk is not None:
            span = min(span, self.chunk)
        return longest if self.is_full else min(longest, max(1, -(-span // block_size)) + 1)
