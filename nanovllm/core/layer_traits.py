"""What attention layers differ in, and which positions a row of each sees."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Sight(NamedTuple):
    """Which positions a row sees: those up to its own, from `first_seen` on.

    window: a row at position q sees q - window + 1 to q; None for no such limit.
    chunk: a row sees its own chunk alone, the positions p with p // chunk == q // chunk (Llama 4).
    """

    window: int | None = None
    chunk: int | None = None

    @property
    def is_full(self) -> bool:
        return self.window is None and self.chunk is None

    def first_seen(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first position that a row at each of `positions` sees; it never decreases from one to the next."""
        first = np.zeros_like(positions)
        if self.window is not None:
            first = np.maximum(first, positions - (self.window - 1))
        if self.chunk is not None:
            first = np.maximum(first, positions // self.chunk * self.chunk)
        return first


FULL_SIGHT = Sight()


@dataclass(frozen=True, slots=True)
class LayerTraits:
    """One attention layer, as an attention backend and the KV cache have to know it.

    num_heads, num_kv_heads: of queries; of keys and values.
    head_dim, value_dim: elements of one head of queries and keys; of one head of values and of the result.
    window, chunk: see `Sight`.
    softcap: scores s become softcap * tanh(s / softcap) (Gemma 2); None where they stay.
    has_sinks: a learned score a head joins the softmax and adds nothing to its result (gpt-oss).
    shares: index of the earlier layer whose K and V it attends to; None where it has its own.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None
    chunk: int | None = None
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
        """The same for sequences of at most so many tokens: a window or chunk that holds all of them is none."""
        window, chunk = (size if size and size < num_positions else None for size in (self.window, self.chunk))
        return replace(self, window=window, chunk=chunk)

    def shares_of(self, index: int) -> int:
        """The layer whose K and V the layer with this index attends to."""
        return index if self.shares is None else self.shares

    @property
    def sight(self) -> Sight:
        return Sight(self.window, self.chunk)

    @property
    def is_plain(self) -> bool:
        """Whether it is full causal attention and nothing else, with K and V of one width."""
        return self.first_beyond() is None

    def first_beyond(self, *served: str) -> str | None:
        """The first thing beyond plain attention that is not among `served`, in words; None if there is none.

        Args:
            served: of "window", "chunk", "softcap", "sinks", "widths".
        """
        found = {
            "window": self.window is not None and f"a sliding window of {self.window} tokens",
            "chunk": self.chunk is not None and f"attention in chunks of {self.chunk} tokens",
            "softcap": self.softcap is not None and f"scores capped at {self.softcap:g} (softcap)",
            "sinks": self.has_sinks and "attention sinks",
            "widths": self.head_dim != self.value_dim
            and f"keys of {self.head_dim} and values of {self.value_dim} elements",
        }
        return next((words for name, words in found.items() if words and name not in served), None)


def kinds_of(traits: Iterable[LayerTraits]) -> tuple[LayerTraits, ...]:
    """The different traits in the order of their first layers; whose K and V a layer sees makes no difference."""
    return tuple(dict.fromkeys(kind_of(layer) for layer in traits))


def kind_of(traits: LayerTraits) -> LayerTraits:
    return replace(traits, shares=None)
