"""Blocks of one cache group: a pool, and the part of each prefix that its kind of state needs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as AnySequence

from nanovllm.batch import NULL_BLOCK
from nanovllm.block_manager import BlockPool, PrefixEntry
from nanovllm.features.groups.state_kinds import StateKind


class GroupBlocks:
    """A pool for one kind of state. Block tables have the null block where a sequence needs none.

    Attributes:
        max_held: blocks that one sequence holds at most, with the chunks that steps in flight compute.
        claimed: prefix ids of contents that a sequence claimed after they were computed.

    Raises ValueError for a pool that cannot hold one sequence of `max_model_len`.
    """

    keeps_records = False  # its blocks are K and V of positions
    kept: Collection[int] = ()  # blocks outside of all tables

    def __init__(
        self, kind: StateKind, pool: BlockPool, block_size: int, *, max_model_len: int, max_chunk_tokens: int
    ) -> None:
        self.kind = kind
        self.pool = pool
        self.block_size = block_size
        self.claimed: set[int] = set()
        needed = kind.max_blocks(max_model_len, block_size)
        num_blocks = pool.num_blocks - 1
        if needed > num_blocks:
            seen = (
                "recurrent states" if self.keeps_records else f"layers with window {kind.window} and chunk {kind.chunk}"
            )
            raise ValueError(
                f"a pool of {num_blocks + 1} blocks (block 0 is reserved) for {seen} cannot hold the {needed} blocks "
                f"that one sequence of {max_model_len} tokens needs. Give it at least {needed + 1} blocks."
            )
        in_flight = -(-max_chunk_tokens // block_size)
        self.max_held = needed if kind.is_full else min(num_blocks, needed + in_flight)

    def first_block(self, num_tokens: int) -> int:
        return self.kind.first_block(num_tokens, self.block_size)

    def first_needed(self, num_tokens: int) -> int:
        """The first block from which on a sequence with `num_tokens` computed tokens lacks none."""
        return self.first_block(num_tokens)

    def num_free_among(self, blocks: Iterable[int]) -> int:
        return self.pool.num_free_among(block for block in blocks if block != NULL_BLOCK)

    def num_freed(self, table: list[int], kept: Collection[int]) -> int:
        """Blocks that a release of the table would free, without those kept."""
        return sum(self.pool.ref_counts[block] == 1 for block in {*table}.difference(kept))

    @property
    def num_blocks_to_grow(self) -> int:
        """Blocks by which some table can grow now."""
        return len(self.pool.free_blocks)

    def num_lacking(self, table: list[int], first_held: int, num_blocks: int, hits: list[int]) -> int:
        """Free blocks that a sequence takes until its table is `num_blocks` longer, besides the `hits` that it claims.

        At most the number that one sequence holds at a time.
        """
        wanted = num_blocks
        if not self.kind.is_full:
            wanted = min(num_blocks, max(0, self.max_held - (len(table) - first_held)))
        return min(wanted + self.num_free_among(hits), self.pool.num_blocks - 1)

    def allocate(self, table: list[int], num_blocks: int) -> None:
        """Make the table `num_blocks` longer. The caller has checked that enough are free."""
        table += self.pool.pop_free(num_blocks)

    def hold(self, block: int, entry: PrefixEntry) -> None:
        """Make the block findable under `entry`."""
        self.pool.hold(block, entry)

    def claim(self, blocks: list[int], entries: Collection[PrefixEntry]) -> None:
        """Pin the blocks of a hit."""
        self.pool.pin(block for block in blocks if block != NULL_BLOCK)
        self.claimed.update(
            entry.prefix_id for entry, block in zip(entries, blocks, strict=True) if block != NULL_BLOCK
        )

    def unpin(self, blocks: list[int]) -> None:
        self.pool.unpin([block for block in blocks if block != NULL_BLOCK])

    def forget(self, entry: PrefixEntry) -> None:
        self.pool.forget_content(entry)
        self.claimed.discard(entry.prefix_id)

    def longest_hit(self, entries: AnySequence[PrefixEntry], first: int, end: int, *, with_fresh: bool) -> int:
        """Length of the longest hit in entries[:end]; entries[0] is block `first` of the sequence.

        Scanned from the right; the sequence holds the blocks before `first`. K and V that the step being scheduled
        writes count in any case, records only `with_fresh`.
        """
        holders = self.pool.holders
        if self.kind.is_full:
            return next((i for i, entry in enumerate(entries[:end]) if entry.prefix_id not in holders), end)
        index = end
        while index > 0:
            needed = max(0, self.first_block((first + end) * self.block_size) - first)
            while index > needed and entries[index - 1].prefix_id in holders:
                index -= 1
            if index <= needed:
                return end
            end = index = index - 1  # every longer hit needs the missing block
        return 0

    def hit_blocks(self, entries: AnySequence[PrefixEntry], first: int) -> list[int]:
        """A block for each entry of a hit; entries[0] is block `first` of the sequence."""
        needed = max(0, self.first_block((first + len(entries)) * self.block_size) - first)
        holders = self.pool.holders
        return [NULL_BLOCK] * needed + [next(iter(holders[entry.prefix_id])) for entry in entries[needed:]]

    def free_unseen(self, table: list[int], first: int, end: int, junctions: Collection[int]) -> None:
        """Free blocks first..end-1 of the table, and forget their contents except in kept tails.

        Args:
            junctions: lengths in blocks at which later requests may branch off.
        """
        pool = self.pool
        kept = [(self.first_block(length * self.block_size), length) for length in junctions]
        for index in range(first, end):
            block, table[index] = table[index], NULL_BLOCK
            if block == NULL_BLOCK:
                continue
            entry = pool.entry_of[block]
            is_shared = pool.ref_counts[block] > 1 or entry is None or entry.prefix_id in self.claimed
            if not is_shared and not any(begin <= index < length for begin, length in kept):
                pool.forget_block(block)
            pool.unpin([block])

    def rewindable(self, table: list[int], num_blocks: int) -> int:
        """The largest number of blocks, at most `num_blocks`, after which a sequence can continue."""
        return num_blocks  # blocks in sight stay until a step that passed them was read
