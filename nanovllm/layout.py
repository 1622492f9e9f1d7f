"""Lays a scheduled batch out as rows: token ids, positions and the slot mapping of the flat batch.

Rows are ordered decodes first (sequences with one new token), then chunks, so that each attention call gets a slice::

    row     0     1     2   | 3    4    5    6  | 7    8
            a     b     c   | d    d    d    d  | e    e        one forward pass over all of them
            decode call     | chunk call
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm.batch import ScheduledSequence
from nanovllm.sequence import Sequence


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

    num_heads, num_kv_heads: heads of queries; heads of keys and values.
    head_dim, value_dim: elements of one head of queries and keys; of one head of values and of the result.
    sight: the positions that its rows see.
    softcap: scores s become softcap * tanh(s / softcap) (Gemma 2); None for no cap.
    has_sinks: True if each head has a learned score that joins the softmax without a value (gpt-oss).
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

    def shares_of(self, index: int) -> int:
        """Index of the layer that computes the K and V of layer `index`."""
        return index if self.shares is None else self.shares


def kinds_of(traits: Iterable[LayerTraits]) -> tuple[LayerTraits, ...]:
    """The different traits in the order of their first layers, regardless of `shares`."""
    return tuple(dict.fromkeys(kind_of(layer) for layer in traits))


def kind_of(traits: LayerTraits) -> LayerTraits:
    return replace(traits, shares=None)


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Host arrays of one step, `num_tokens` rows (padding not included).

    entries: the batch's entries that have rows, in row order.
    row_starts: [num_entries + 1] first row of each entry.
    token_ids: [num_tokens] int64; -1 - i for the i-th token that the step before samples.
    positions: [num_tokens] int64, position of each row's token in its sequence.
    slot_mapping: [num_tokens] int64, cache slot that takes the row's K and V.
    sample_rows: [num_samples] int64, rows that need logits, in the order of `ScheduledBatch.sampling`: the last
        `num_samples` rows of each entry.
    sampled_positions: [num_samples] int64, positions of the tokens drawn from them.
    blocks_to_clear: blocks that this step begins to fill but does not finish. Their unused slots must hold finite
        values, since a masked slot still enters the product as 0 * value.
    others: the same rows in each cache group after the first.
    state_reads, state_writes: [num_entries] int64, in a group of records alone: the slots of each entry's state before
        the step (the null block where the entry begins its sequence: no state), and after it.
    """

    entries: list[ScheduledSequence]
    num_decodes: int
    row_starts: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slot_mapping: NDArray[np.int64]
    sample_rows: NDArray[np.int64]
    sampled_positions: NDArray[np.int64]
    blocks_to_clear: NDArray[np.int64]
    others: tuple[BatchLayout, ...] = ()
    state_reads: NDArray[np.int64] | None = None
    state_writes: NDArray[np.int64] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.positions)

    @property
    def decodes(self) -> list[ScheduledSequence]:
        return self.entries[: self.num_decodes]

    @property
    def chunks(self) -> list[ScheduledSequence]:
        return self.entries[self.num_decodes :]


def build_layout(
    batch_entries: SequenceABC[ScheduledSequence],
    block_size: int,
    in_flight: Mapping[Sequence, int] | None = None,
    *,
    longest_first: bool = False,
) -> BatchLayout:
    """Lay out a step's entries; the only Python loops are over entries, never over tokens.

    Args:
        in_flight: sequences that the step before samples -> index of their newest token among its samples, which the
            host may not have read yet.
        longest_first: True sorts decodes by context, longest first, for backends that compute them in this order.
    """
    starts = np.fromiter((entry.start for entry in batch_entries), np.int64, len(batch_entries))
    counts = np.fromiter((entry.num_new_tokens for entry in batch_entries), np.int64, len(batch_entries))
    num_samples = np.fromiter((entry.num_samples for entry in batch_entries), np.int64, len(batch_entries))
    sampled_positions = _up_to(starts + counts, num_samples)
    # Decodes first; chunks keep the order of the batch.
    order = np.lexsort((np.where(counts == 1, -starts if longest_first else 0, 0), counts > 1))
    if np.count_nonzero(counts) < len(counts):
        has_rows = counts > 0
        order = order[has_rows[order]]
    entries = [batch_entries[index] for index in order.tolist()]
    starts = starts[order]
    counts = counts[order]
    num_decodes = int((counts == 1).sum())
    row_starts = np.zeros(len(entries) + 1, np.int64)
    np.cumsum(counts, out=row_starts[1:])
    last_rows = np.zeros(len(batch_entries), np.int64)  # last row of each entry of the batch
    last_rows[order] = row_starts[1:] - 1
    if len(entries) < len(batch_entries):  # an entry without rows has the last row of the entry before
        last_rows = last_rows[np.maximum.accumulate(np.where(has_rows, np.arange(len(has_rows)), 0))]

    # A row's position is its index in its entry plus the entry's start.
    positions = np.arange(row_starts[-1]) + np.repeat(starts - row_starts[:-1], counts)
    slot_mapping, blocks_to_clear = map_slots(entries, starts, counts, positions, block_size)
    return BatchLayout(
        entries=entries,
        num_decodes=num_decodes,
        row_starts=row_starts,
        token_ids=_token_ids(entries, int(row_starts[-1]), in_flight or {}),
        positions=positions,
        slot_mapping=slot_mapping,
        sample_rows=_up_to(last_rows, num_samples),
        sampled_positions=sampled_positions,
        blocks_to_clear=blocks_to_clear,
    )


def _up_to(lasts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The `counts[i]` consecutive numbers that end with `lasts[i]`, for one i after the other."""
    numbers = lasts.repeat(counts)
    if len(numbers) > np.count_nonzero(counts):  # some count is above 1
        numbers -= np.cumsum(counts).repeat(counts) - np.arange(1, len(numbers) + 1)
    return numbers


def map_slots(
    entries: list[ScheduledSequence],
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    positions: NDArray[np.int64],
    block_size: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The slot mapping, and the blocks to clear; see `BatchLayout`."""
    ends = starts + counts
    # Only the blocks that this step touches, flattened; a row finds its own through the offset of its entry.
    first_blocks = starts // block_size
    last_blocks = (ends - 1) // block_size
    widths = last_blocks - first_blocks + 1
    spans = zip(entries, first_blocks.tolist(), last_blocks.tolist(), strict=True)
    flat_blocks = np.fromiter(
        chain.from_iterable(
            (entry.block_table[first],) if first == last else entry.block_table[first : last + 1]
            for entry, first, last in spans
        ),
        np.int64,
        int(widths.sum()),
    )
    offsets = np.cumsum(widths) - widths
    block_of_row = flat_blocks[positions // block_size + np.repeat(offsets - first_blocks, counts)]
    unfinished = (last_blocks * block_size >= starts) & (ends % block_size != 0)
    slot_mapping = block_of_row * block_size + positions % block_size
    return slot_mapping, flat_blocks[(offsets + widths - 1)[unfinished]]


def _token_ids(
    entries: list[ScheduledSequence], num_tokens: int, in_flight: Mapping[Sequence, int]
) -> NDArray[np.int64]:
    token_ids = np.empty(num_tokens, np.int64)
    row = 0
    for sequence, start, count, _, _, _, draft in entries:
        known = sequence.token_ids
        if draft:  # maybe some of its rows
            tokens = *known[start:], *draft[max(0, start - len(known)) :]
            token_ids[row : row + count] = tokens[:count]
        elif count == 1:
            token_ids[row] = known[start] if start < len(known) else -1 - in_flight[sequence]
        else:
            token_ids[row : row + count] = known[start : start + count]
        row += count
    return token_ids
