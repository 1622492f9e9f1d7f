"""Traits of attention layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Sight(NamedTuple):
    """The positions that a layer's rows see.

    window: a row at position q sees q - window + 1 to q; None for no such limit.
    chunk: a row sees its own chunk alone, the positions p with p // chunk == q // chunk (Llama 4).
    """

    window: int | None = None
    chunk: int | None = None

    @property
    def is_full(self) -> bool:
        return self == FULL

    def first_seen(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first position that a row at each of `positions` sees; non-decreasing in the position."""
        first = np.zeros_like(positions)
        if self.window is not None:
            first = np.maximum(first, positions - (self.window - 1))
        if self.chunk is not None:
            first = np.maximum(first, positions // self.chunk * self.chunk)
        return first


FULL = Sight()


@dataclass(frozen=True, slots=True)
class LayerTraits:
    """Traits of one attention layer, for its backend and its KV cache.

    num_heads, num_kv_heads: of queries; of keys and values.
    head_dim, value_dim: elements of one head of queries and keys; of one head of values and of the result.
    sight: the positions that its rows see.
    softcap: scores s become softcap * tanh(s / softcap) (Gemma 2); None for no cap.
    has_sinks: each head has a learned score that joins the softmax without a value (gpt-oss).
    shares: index of the earlier layer that computes its K and V; None for the layer itself.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    sight: Sight = FULL
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

    def shares_of(self, index: int) -> int:
        """Index of the layer that computes the K and V of layer `index`."""
        return index if self.shares is None else self.shares


def kinds_of(traits: Iterable[LayerTraits]) -> tuple[LayerTraits, ...]:
    """The different traits in the order of their first layers, regardless of `shares`."""
    return tuple(dict.fromkeys(kind_of(layer) for layer in traits))


def kind_of(traits: LayerTraits) -> LayerTraits:
    return replace(traits, shares=None)
