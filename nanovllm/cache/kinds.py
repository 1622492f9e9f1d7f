"""Kinds of state that layers keep of a sequence, and the traits of attention layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class StateKind(NamedTuple):
    """K and V of the positions that later rows see, in blocks; or one record of fixed size (a recurrent state).

    window: a row at position q sees q - window + 1 to q; None for no such limit.
    chunk: a row sees its own chunk alone, the positions p with p // chunk == q // chunk (Llama 4).
    record_bytes: of the record; None for K and V. A record is a window of one: a row needs the latest alone.
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

    def block_bytes(self, token_bytes: int, block_size: int) -> int:
        """Bytes of one block in a layer with `token_bytes` of K and V a token."""
        return token_bytes * block_size if self.record_bytes is None else self.record_bytes

    def first_seen(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first position that a row at each of `positions` sees; non-decreasing in the position."""
        first = np.zeros_like(positions)
        if self.window is not None:
            first = np.maximum(first, positions - (self.window - 1))
        if self.chunk is not None:
            first = np.maximum(first, positions // self.chunk * self.chunk)
        return first

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
        longest, span = -(-max_model_len // block_size), max_model_len
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


@dataclass(frozen=True, slots=True)
class LayerTraits:
    """Traits of one attention layer, for its backend and its KV cache.

    num_heads, num_kv_heads: of queries; of keys and values.
    head_dim, value_dim: elements of one head of queries and keys; of one head of values and of the result.
    sight: the positions that its rows see, and therefore keep.
    softcap: scores s become softcap * tanh(s / softcap) (Gemma 2); None for no cap.
    has_sinks: each head has a learned score that joins the softmax without a value (gpt-oss).
    shares: index of the earlier layer that computes its K and V; None for the layer itself.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    sight: StateKind = FULL
    softcap: float | None = None
    has_sinks: bool = False
    shares: int | None = None

    @property
    def num_groups(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def token_values(self) -> int:
        """Elements of one token's K and V."""
        return self.num_kv_heads * (self.head_dim + self.value_dim)

    def within(self, num_positions: int) -> LayerTraits:
        """The traits for sequences of at most `num_positions`; see `StateKind.within`."""
        return replace(self, sight=self.sight.within(num_positions))

    def shares_of(self, index: int) -> int:
        """Index of the layer that computes the K and V of layer `index`."""
        return index if self.shares is None else self.shares

    @property
    def is_plain(self) -> bool:
        """Whether it is full causal attention alone, with K and V of one width."""
        return self.first_beyond() is None

    def first_beyond(self, *served: str) -> str | None:
        """Description of the first trait beyond plain attention that is not in `served`; None without one.

        Args:
            served: of "window", "chunk", "softcap", "sinks", "widths".
        """
        found = {
            "window": self.sight.window is not None and f"a sliding window of {self.sight.window} tokens",
            "chunk": self.sight.chunk is not None and f"attention in chunks of {self.sight.chunk} tokens",
            "softcap": self.softcap is not None and f"scores capped at {self.softcap:g} (softcap)",
            "sinks": self.has_sinks and "attention sinks",
            "widths": self.head_dim != self.value_dim
            and f"keys of {self.head_dim} and values of {self.value_dim} elements",
        }
        return next((words for name, words in found.items() if words and name not in served), None)


def kinds_of(traits: Iterable[LayerTraits]) -> tuple[LayerTraits, ...]:
    """The different traits in the order of their first layers, regardless of `shares`."""
    return tuple(dict.fromkeys(kind_of(layer) for layer in traits))


def kind_of(traits: LayerTraits) -> LayerTraits:
    return replace(traits, shares=None)
