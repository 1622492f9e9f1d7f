"""Kinds of state that layers keep of a sequence, and how many blocks each takes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from nanovllm.layout import Sight

if TYPE_CHECKING:
    from nanovllm.attention import AttentionLayer


class StateKind(NamedTuple):
    """K and V of the positions that later rows see, in blocks; or one record of fixed size (a recurrent state).

    window, chunk: limits of the layers' `Sight`, in tokens.
    record_bytes: bytes of the record; None for K and V. A record is a window of 1: a row needs the latest alone.
    """

    window: int | None = None
    chunk: int | None = None
    record_bytes: int | None = None

    @classmethod
    def record(cls, num_bytes: int) -> StateKind:
        return cls(window=1, record_bytes=num_bytes)

    @property
    def is_full(self) -> bool:
        """Whether a sequence needs all its blocks until it ends."""
        return self.window is None and self.chunk is None

    @property
    def spans(self) -> tuple[int | None, int | None]:
        return self.window, self.chunk

    def within(self, num_positions: int) -> StateKind:
        """The kind for sequences of at most `num_positions`, without a window or chunk that holds them all."""
        if self.record_bytes is not None:
            return self
        window, chunk = (span if span and span < num_positions else None for span in self.spans)
        return self._replace(window=window, chunk=chunk)

    def first_position(self, position: int) -> int:
        """The first position that a row at `position` sees."""
        first = 0 if self.window is None else max(0, position - self.window + 1)
        return first if self.chunk is None else max(first, position // self.chunk * self.chunk)

    def first_block(self, num_tokens: int, block_size: int) -> int:
        """The first block that a sequence needs after `num_tokens` computed tokens.

        Counted from the last block boundary, so that a prefix hit there finds all that it needs; the last full block is
        always needed, since it names the prefix of the next one.
        """
        num_full = num_tokens // block_size
        return max(0, min(self.first_position(num_full * block_size) // block_size, num_full - 1))

    def max_blocks(self, max_model_len: int, block_size: int) -> int:
        """Most blocks that one sequence needs, including the block of its next token, once its steps were read."""
        longest = -(-max_model_len // block_size)
        span = max_model_len
        if self.window is not None:
            span = min(span, self.window - 1)
        if self.chunk is not None:
            span = min(span, self.chunk)
        return longest if self.is_full else min(longest, max(1, -(-span // block_size)) + 1)

    def num_seen(self, num_tokens: int) -> int:
        """Number of positions that the last of `num_tokens` tokens sees."""
        return num_tokens - self.first_position(num_tokens - 1)

    def num_pairs(self, start: int, count: int) -> int:
        """Number of pairs (row, visible position) of `count` rows from position `start` on."""
        if self.is_full:
            return count * start + count * (count + 1) // 2
        if self.chunk is None and self.window is not None:
            rising = max(0, min(count, self.window - start))  # rows that see all before them
            return rising * start + rising * (rising + 1) // 2 + (count - rising) * self.window
        return sum(self.num_seen(position + 1) for position in range(start, start + count))


FULL = StateKind()


def widen(layers: list[AttentionLayer], num_positions: int) -> None:
    """Replace windows that hide nothing from sequences of at most `num_positions`."""
    for index, layer in enumerate(layers):
        sight = Sight(*StateKind(*layer.traits.sight).within(num_positions).spans)
        layers[index] = replace(layer, traits=replace(layer.traits, sight=sight))
