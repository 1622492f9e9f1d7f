"""Slots of recurrent states: a sequence's working state, and checkpoints at block boundaries.

A table names the state after the last computed token of each block, and is sparse::

    block          |  0  |  1  |  2  |  3  |  4  |  5  |         . no state: the null block
    slots          |  .  |  .  |  7  |  .  |  4  |  9..|
                      checkpoint 7 ^   last one ^     ^ working state, overwritten in place by each step

A step of positions start..end-1 reads the slot of position start - 1 and writes the slot of position end - 1. Within a
block they are the same. After a boundary the state goes to a new slot, so the old one stays unchanged, as a
checkpoint for failed steps, preempted sequences and prefix hits.

Invariant: each slot in a table but the working one holds the state after the last token of its block.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence

from nanovllm.batch import NULL_BLOCK
from nanovllm.block_manager import BlockPool, PrefixEntry
from nanovllm.features.groups.group_blocks import GroupBlocks
from nanovllm.features.groups.state_kinds import StateKind


class StatePool(BlockPool):
    """Pool of slots; it calls `found` when a content gets its first slot, and `lost` when it loses the last."""

    def __init__(
        self, num_blocks: int, found: Callable[[PrefixEntry], None], lost: Callable[[PrefixEntry], None]
    ) -> None:
        super().__init__(num_blocks)
        self._on_found = found
        self._on_lost = lost  # type: ignore[method-assign,assignment]

    def hold(self, block: int, entry: PrefixEntry) -> None:
        if entry.prefix_id not in self.holders:
            self._on_found(entry)
        super().hold(block, entry)


class StateBlocks(GroupBlocks):
    """Slots for one kind of record. A step takes one where it begins a block, however many blocks it computes.

    Attributes:
        fresh: findable slots that the step being scheduled writes. The next step may read them: within a step no
            sequence reads a slot that another writes.
        kept: slots outside of all tables, see `keep`.
    """

    keeps_records = True

    def __init__(
        self, kind: StateKind, pool: BlockPool, block_size: int, *, max_model_len: int, max_chunk_tokens: int
    ) -> None:
        super().__init__(kind, pool, block_size, max_model_len=max_model_len, max_chunk_tokens=0)
        self.fresh: set[int] = set()
        self.kept: set[int] = set()
        self._superseded: dict[int, PrefixEntry] = {}  # free checkpoints that go first, the oldest first
        self._taken: set[int] = set()  # blocks that the step being scheduled has taken

    def first_needed(self, num_tokens: int) -> int:
        return max(0, num_tokens - 1) // self.block_size  # the one that the next step reads

    def begin_step(self) -> None:
        self.fresh.clear()
        self._taken.clear()

    @property
    def num_blocks_to_grow(self) -> int:
        return sys.maxsize if self.pool.free_blocks else 0

    def num_lacking(self, table: list[int], first_held: int, num_blocks: int, hits: list[int]) -> int:
        held = sum(block != NULL_BLOCK for block in (*table[first_held:], *hits))
        wanted = max(0, min(num_blocks, self.max_held - held))
        return min(wanted + self.num_free_among(hits), self.pool.num_blocks - 1)

    def allocate(self, table: list[int], num_blocks: int) -> None:
        if num_blocks == 0:
            return
        if table and table[-1] in self._taken:  # a chunk of this step becomes longer: its state moves to its new end
            slot, table[-1] = table[-1], NULL_BLOCK
            self.pool.forget_block(slot)
        else:
            slot = self._take()
            self._taken.add(slot)
        table += [NULL_BLOCK] * (num_blocks - 1) + [slot]

    def _take(self) -> int:
        """A free slot: an empty one, else a superseded checkpoint, else the one freed longest ago."""
        pool = self.pool
        while self._superseded and pool.free_blocks and pool.entry_of[next(iter(pool.free_blocks))] is not None:
            slot = next(iter(self._superseded))
            entry = self._superseded.pop(slot)
            if pool.entry_of[slot] is entry and entry.prefix_id not in self.claimed and pool.ref_counts[slot] == 0:
                pool.evict_first(slot)
                break
        (slot,) = pool.pop_free(1)
        return slot

    def keep(self) -> int:
        """A slot outside of all tables, for a copy of a state; the caller has checked that one is free."""
        slot = self._take()
        self.kept.add(slot)
        return slot

    def put_back(self, table: list[int], slot: int) -> None:
        """Give the table a kept slot in place of its working state."""
        self.kept.remove(slot)
        self.pool.unpin(table[-1:])
        table[-1] = slot

    def free_kept(self, slot: int) -> None:
        self.kept.remove(slot)
        self.pool.unpin([slot])

    def hold(self, block: int, entry: PrefixEntry) -> None:
        super().hold(block, entry)
        self.fresh.add(block)

    def find(self, entry: PrefixEntry, *, with_fresh: bool = False) -> int:
        holders = self.pool.holders.get(entry.prefix_id, ())
        return next((block for block in holders if with_fresh or block not in self.fresh), NULL_BLOCK)

    def longest_hit(self, entries: Sequence[PrefixEntry], first: int, end: int, *, with_fresh: bool) -> int:
        """Length of the longest prefix in entries[:end] with a state after it."""
        while end and self.find(entries[end - 1], with_fresh=with_fresh) == NULL_BLOCK:
            end -= 1
        return end

    def hit_blocks(self, entries: Sequence[PrefixEntry], first: int) -> list[int]:
        return [NULL_BLOCK] * (len(entries) - 1) + [self.find(entry) for entry in entries[-1:]]

    def free_unseen(self, table: list[int], first: int, end: int, junctions: Collection[int]) -> None:
        """Free states first..end-1 of the table. They stay findable, and are evicted first unless they are wanted."""
        pool = self.pool
        for index in range(first, end):
            block, table[index] = table[index], NULL_BLOCK
            if block == NULL_BLOCK:
                continue
            entry = pool.entry_of[block]
            if entry is not None and index + 1 not in junctions:
                self._superseded.pop(block, None)
                self._superseded[block] = entry
            pool.unpin([block])

    def is_superseded(self, block: int, entry: PrefixEntry) -> bool:
        """Whether a checkpoint is evicted before others: its sequence has passed it, and no other continued from it."""
        return self._superseded.get(block) is entry and entry.prefix_id not in self.claimed

    def rewindable(self, table: list[int], num_blocks: int) -> int:
        """The largest number of blocks, at most `num_blocks`, after which the table has a state."""
        while num_blocks and table[num_blocks - 1] == NULL_BLOCK:
            num_blocks -= 1
        return num_blocks
