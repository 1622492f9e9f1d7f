"""Hands out the KV cache's blocks and finds prefixes that are already in them; pure bookkeeping, no tensors.

The life of a block::

            allocate                      release (last reference)
    free ----------------> referenced -----------------------------> free, content kept
     ^                      |      ^                                    |        |
     |                      |      +---- claim: a prefix hit -----------+        |
     |             register: findable                                            |
     +---------------------- evicted: allocated for other content <--------------+

Invariant: every block but block 0 is either free or referenced, and a findable block holds, or is scheduled to hold
before anyone reads it, the KV of exactly the tokens of its entry after exactly the prefix of its entry.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as AnySequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Protocol

import xxhash

from nanovllm.batch import Copy, ScheduledBatch, ScheduledSequence
from nanovllm.sequence import Sequence


class WantedBlocks(dict[bytes, int]):
    """Block hash -> number of waiting sequences that may find the block; O(1) per block as they join and leave."""

    def __init__(self) -> None:
        super().__init__()
        self._hashes: dict[Sequence, AnySequence[bytes]] = {}

    def add(self, sequence: Sequence, hashes: AnySequence[bytes]) -> None:
        """Count a sequence that begins to wait; `hashes` are the hashes of its first blocks."""
        self._hashes[sequence] = hashes
        for block_hash in hashes:
            self[block_hash] = self.get(block_hash, 0) + 1

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that no longer waits, if it is counted."""
        for block_hash in self._hashes.pop(sequence, ()):
            if self[block_hash] > 1:
                self[block_hash] -= 1
            else:
                del self[block_hash]

    def by_others(self, sequence: Sequence, index: int, block_hash: bytes) -> int:
        """Number of waiting sequences besides this one that want its block `index`."""
        is_own = index < len(self._hashes.get(sequence, ()))
        return self.get(block_hash, 0) - is_own


digest = xxhash.xxh3_128_digest
HASH_BYTES = 16


def root_hash(hash_seed: str, cache_salt: str) -> bytes:
    """The parent of every first block. `hash_seed` names all that KV depends on besides tokens, such as the model."""
    return digest(f"{len(hash_seed)}:{hash_seed}{cache_salt}".encode("utf-8", "surrogatepass"))


@dataclass(slots=True)
class PrefixEntry:
    """Content that lookups find ("findable"): a block's tokens after a given prefix.

    `parent` is the prefix id of the block before, or the request's cache salt for a first block (a string, so that it
    equals no prefix id).
    """

    prefix_id: int
    block_hash: bytes
    parent: int | str
    tokens: bytes


class BlockObserver(Protocol):
    """Observer of the prefix index. A content that several blocks hold is forgotten with the last of them."""

    def findable(self, entry: PrefixEntry, parent_hash: bytes | None) -> None:
        """A content became findable; `parent_hash` is the hash of the block before, None for a first block."""

    def forgotten(self, block_hash: bytes) -> None:
        """A content is no longer findable: evicted, withdrawn, or not to be trusted."""

    def all_forgotten(self) -> None:
        """Nothing is findable any longer."""


MAX_SPARED = 16  # most free blocks searched for one that no waiting sequence wants


class BlockPool:
    """Ref-counted blocks; a free block keeps its content until it is allocated. Every operation is O(1) per block.

    Args:
        num_blocks: blocks in the pool, the null block included.

    Raises ValueError for fewer than 2.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}; at least 2 are needed, since block 0 is never given out.")
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self.num_touched_blocks = 0  # blocks handed out at least once; fresh ones go first, in order
        # Called when a findable block loses its last reference and keeps its content. It must not change the pool.
        self.on_idle: Callable[[int, PrefixEntry], None] | None = None
        self.wanted: Mapping[bytes, int] = {}  # keys: hashes that waiting sequences want, evicted last
        # The state of the pool, which only this class changes; `block_checks` and the live view read it.
        self.ref_counts = [0] * num_blocks
        self.free_blocks: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))  # the front goes first
        self.entry_of: list[PrefixEntry | None] = [None] * num_blocks
        self.holders: dict[int, dict[int, None]] = {}  # prefix id -> the blocks that hold its content, in order
        self.num_findable_blocks = 0  # a counter, since it is read after every step and pools are large

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_blocks)

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """Number of free blocks among `blocks`: a claim takes these off the free list."""
        return sum(self.ref_counts[block] == 0 for block in blocks)

    def pop_free(self, num_blocks: int) -> list[int]:
        """Take free blocks, least recently freed first, with one reference each; raises RuntimeError for too few."""
        if num_blocks > len(self.free_blocks):
            raise RuntimeError(f"{num_blocks} blocks asked for, {len(self.free_blocks)} free: check first")
        blocks = []
        for _ in range(num_blocks):
            block = self._next_free() if self.wanted else next(iter(self.free_blocks))
            del self.free_blocks[block]
            self.ref_counts[block] = 1
            self.num_touched_blocks = max(self.num_touched_blocks, block)
            if self.entry_of[block] is not None:
                self.forget_block(block)
                self.num_evictions += 1
            blocks.append(block)
        return blocks

    def _next_free(self) -> int:
        """The least recently freed block, or one of the next few if waiting sequences want its content."""
        for block in islice(self.free_blocks, MAX_SPARED):
            entry = self.entry_of[block]
            if entry is None or entry.block_hash not in self.wanted:
                return block
        return next(iter(self.free_blocks))

    def evict_first(self, block: int) -> None:
        """Make a free block the next to be allocated; it stays findable until then. No-op for a block in use."""
        if self.ref_counts[block] == 0:
            self.free_blocks.move_to_end(block, last=False)

    def pin(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self.free_blocks[block]
            self.ref_counts[block] += 1

    def unpin(self, blocks: list[int]) -> None:
        """Drop a reference to each block of a chain, tail first, so that the tail, useless alone, is evicted first."""
        for block in reversed(blocks):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free_blocks[block] = None
                entry = self.entry_of[block]
                if entry is None:
                    self.free_blocks.move_to_end(block, last=False)  # no content to keep: allocate it next
                elif self.on_idle is not None:
                    self.on_idle(block, entry)

    def hold(self, block: int, entry: PrefixEntry) -> None:
        """Make the block findable under `entry`."""
        self.entry_of[block] = entry
        self.holders.setdefault(entry.prefix_id, {})[block] = None
        self.num_findable_blocks += 1

    def forget_block(self, block: int) -> None:
        """Make a block unfindable; if it is free, it is allocated next. No-op for an unfindable block."""
        if (entry := self.entry_of[block]) is None:
            return
        self.entry_of[block] = None
        self.num_findable_blocks -= 1
        holders = self.holders[entry.prefix_id]
        del holders[block]
        self.evict_first(block)
        if not holders:
            del self.holders[entry.prefix_id]
            self._on_lost(entry)

    def forget_content(self, entry: PrefixEntry) -> None:
        """Make every block that holds this content unfindable."""
        for block in list(self.holders.get(entry.prefix_id, ())):
            self.forget_block(block)

    def forget_all(self) -> None:
        self.entry_of = [None] * self.num_blocks
        self.holders.clear()
        self.num_findable_blocks = 0

    def _on_lost(self, entry: PrefixEntry) -> None:
        """Called when no block of the pool holds a content any longer."""


class BlockManager(BlockPool):
    """Block tables over one pool, and an index of its prefixes by a chain of block hashes.

    The chain of hashes follows vLLM (Kwon et al. 2023). A hash only finds a candidate: a hit needs equal tokens and the
    same parent prefix id, so that a collision costs a miss and never a wrong answer.

    Args:
        num_blocks: blocks in the cache, the null block included.
        block_size: tokens per block.
        enable_prefix_caching: False makes every lookup a miss.
        hash_seed: text of all else that KV depends on (model identity, dtype); part of the first hash of each chain.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True, hash_seed: str = ""
    ) -> None:
        super().__init__(num_blocks)
        self.block_size = block_size
        self.max_running_tokens = (num_blocks - 1) * block_size  # tokens of all sequences that fit at once
        self.enable_prefix_caching = enable_prefix_caching
        self.hash_seed = hash_seed
        self.observer: BlockObserver | None = None
        self.entries: dict[bytes, PrefixEntry] = {}  # block hash -> entry, parents first
        self.wanted: WantedBlocks = WantedBlocks()
        self.cuts_chunks = False  # True if `cut` moves the ends of chunks
        self.copies: list[Copy] = []  # block copies to run before the next batch's forward pass
        self.at_steps: list[Callable[[], None]] = []  # functions to call before each step is scheduled
        self._prefix_ids = count(1)
        self._uncommitted: dict[int, list[tuple[BlockPool, int]]] = {}  # step id -> blocks that it made findable

    @property
    def pools(self) -> list[BlockPool]:
        return [self]

    # ------------------------------------------------------------------------------------------------ capacity

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def has_free(self, num_blocks: int, victim: Sequence | None = None, hits: Collection[int] = ()) -> bool:
        """Whether `num_blocks` blocks are free once `victim` has released its own, except those among `hits`."""
        freed = () if victim is None else {*victim.block_table}.difference(hits)
        return num_blocks <= len(self.free_blocks) + sum(self.ref_counts[block] == 1 for block in freed)

    def num_blocks_lacking(self, sequence: Sequence, num_tokens: int, hits: Collection[int]) -> int:
        """Free blocks that the sequence needs to hold `num_tokens`, if it claims `hits` first."""
        in_use = [block for block in hits if self.ref_counts[block]]  # a claim takes the other hits from the free ones
        return self.num_blocks_for(num_tokens) - len(sequence.block_table) - len(in_use)

    def cut(self, sequence: Sequence, start: int, end: int) -> int:
        """The end of a chunk of positions start..end-1: `end`, or a block boundary before it."""
        return end  # any end will do: blocks keep every position

    def rewindable(self, sequence: Sequence, num_tokens: int) -> int:
        """The largest number of computed tokens, at most `num_tokens`, that the sequence can return to."""
        return num_tokens

    def trim(self, sequence: Sequence) -> None:
        """When blocks are short, free the ones that are kept only in case a step fails."""

    # ------------------------------------------------------------------------------------------------ prefixes

    def want(self, sequence: Sequence) -> None:
        """Protect blocks that a waiting sequence will hit from eviction. No-op until the pool is full."""
        is_full = not any(self.entry_of[block] is None for block in islice(self.free_blocks, 1))
        may_find = self.enable_prefix_caching and (is_full or self.cuts_chunks)
        if may_find and (num_blocks := sequence.num_findable_blocks(self.block_size)) > 0:
            self._block_hash(sequence, num_blocks - 1)
            self.wanted.add(sequence, sequence.block_hashes[:num_blocks])

    def lookup(self, sequence: Sequence) -> list[int]:
        """Cached blocks with the sequence's next full blocks of tokens; it does not claim them.

        The search starts after the computed tokens, if these end on a block boundary. It stops before the last known
        token and before prompt tokens that need log-probabilities: these must be computed for their logits.
        """
        if sequence.num_computed_tokens % self.block_size or not self.enable_prefix_caching:
            return []
        return self._hits(sequence, len(sequence.block_table), sequence.num_findable_blocks(self.block_size))

    def _hits(self, sequence: Sequence, first: int, end: int) -> list[int]:
        return [next(iter(self.holders[entry.prefix_id])) for entry in self._find(sequence, first, end)]

    def claim(self, sequence: Sequence, blocks: Collection[int]) -> None:
        """Append blocks found by `lookup` to the block table, with a reference each. Call it before `allocate`."""
        self.pin(blocks)
        sequence.block_table.extend(blocks)

    def register(self, sequence: Sequence, first: int, end: int, step_id: int) -> None:
        """Make the sequence's blocks first..end-1 findable; step `step_id` or an earlier one computes their tokens."""
        if not self.enable_prefix_caching:
            return
        parent = self.parent_of(sequence, first)
        for index in range(first, end):
            if parent is None:  # a collision or a reset cut the chain: later blocks cannot be found
                return
            block = sequence.block_table[index]
            if (held := self.entry_of[block]) is None:
                if (held := self._add(sequence, index, parent)) is None:
                    return
                self.hold(block, held)
                self._uncommitted.setdefault(step_id, []).append((self, block))
            parent = held.prefix_id

    def _add(self, sequence: Sequence, index: int, parent: int | str) -> PrefixEntry | None:
        """The entry of the sequence's block `index`, new if need be; None if another content has its hash."""
        block_hash = self._block_hash(sequence, index)
        entry = self.entries.get(block_hash)
        if entry is None:
            tokens = sequence.block_tokens(index, self.block_size)
            entry = self.entries[block_hash] = PrefixEntry(next(self._prefix_ids), block_hash, parent, tokens)
            if self.observer is not None:
                self.observer.findable(entry, sequence.block_hashes[index - 1] if index else None)
        elif not self._matches(entry, parent, sequence, index):
            return None  # another content keeps this hash
        return entry

    def _matches(self, entry: PrefixEntry, parent: int | str | None, sequence: Sequence, index: int) -> bool:
        return entry.parent == parent and entry.tokens == sequence.block_tokens(index, self.block_size)

    def _find(self, sequence: Sequence, first: int, end: int) -> list[PrefixEntry]:
        """The entries of the sequence's full blocks first..end-1, up to the first that has none."""
        found: list[PrefixEntry] = []
        parent = self.parent_of(sequence, first)
        for index in range(first, end):
            entry = self.entries.get(self._block_hash(sequence, index))
            if entry is None or not self._matches(entry, parent, sequence, index):
                break
            found.append(entry)
            parent = entry.prefix_id
        return found

    def parent_of(self, sequence: Sequence, index: int) -> int | str | None:
        """The prefix id, or cache salt, before block `index`; None if that prefix is not findable."""
        if index == 0:
            return sequence.cache_salt
        entry = self.entry_of[sequence.block_table[index - 1]]
        return None if entry is None else entry.prefix_id

    _digest = staticmethod(digest)

    def _block_hash(self, sequence: Sequence, index: int) -> bytes:
        chain = sequence.block_hashes
        while len(chain) <= index:
            parent_hash = chain[-1] if chain else root_hash(self.hash_seed, sequence.cache_salt)
            chain.append(self._digest(parent_hash + sequence.block_tokens(len(chain), self.block_size)))
        return chain[index]

    def _on_lost(self, entry: PrefixEntry) -> None:
        del self.entries[entry.block_hash]
        if self.observer is not None:
            self.observer.forgotten(entry.block_hash)

    def forget(self, sequence: Sequence) -> None:
        """Make the content of the sequence's full blocks unfindable, and every prefix that continues it."""
        dead = {entry.prefix_id for entry in self._find(sequence, 0, len(sequence.token_ids) // self.block_size)}
        for entry in list(self.entries.values()):
            if entry.prefix_id in dead or entry.parent in dead:
                dead.add(entry.prefix_id)
                for pool in self.pools:
                    pool.forget_content(entry)

    def reset_prefix_cache(self) -> None:
        """Make every block unfindable. Blocks in use stay with their sequences."""
        self.entries.clear()
        self._uncommitted.clear()
        for pool in self.pools:
            pool.forget_all()
        if self.observer is not None:
            self.observer.all_forgotten()

    # ---------------------------------------------------------------------------------- allocation and release

    def allocate(self, sequence: Sequence, num_blocks: int) -> None:
        """Append `num_blocks` free blocks to the table. The caller has checked that enough are free."""
        sequence.block_table += self.pop_free(num_blocks)

    def release(self, sequence: Sequence, num_kept: int = 0) -> None:
        """Release all but the first `num_kept` blocks of the sequence; findable ones stay so until they are evicted.

        The table is cut in place, since batches in flight read only the part that stays. If none stays, the sequence
        gets a new table.
        """
        blocks = sequence.block_table[num_kept:]
        if num_kept:
            del sequence.block_table[num_kept:]
        else:
            sequence.block_table = []
        self.unpin(blocks)

    # ------------------------------------------------------------------------------------------------- forks
    #
    # A sequence continues from the KV of another. Full blocks are shared; a begun block, which both will write to, is
    # copied before the next forward pass:
    #
    #     source   | 1 | 2 | 3.. |            | 1 | 2 | 3.... |
    #     fork                          ->    | 1 | 2 | 7.. |      copy 3 -> 7

    def can_fork(self, source: Sequence, num_tokens: int) -> bool:
        """Whether `source` still holds the blocks of its first `num_tokens`, and a block is free for a copy."""
        has_room = num_tokens % self.block_size == 0 or bool(self.free_blocks)
        return has_room and len(source.block_table) >= self.num_blocks_for(num_tokens)

    def fork(self, source: Sequence, target: Sequence, num_tokens: int) -> None:
        """Share the blocks of the first `num_tokens` of `source` with `target`, which has none. Check `can_fork`."""
        target.block_table = self._shared(source.block_table, num_tokens, self, 0)
        target.num_computed_tokens = target.num_counted_tokens = num_tokens

    def _shared(self, table: list[int], num_tokens: int, pool: BlockPool, group: int) -> list[int]:
        """The first blocks of a table, with one more reference each; the begun one is a copy."""
        num_full, begun = divmod(num_tokens, self.block_size)
        shared = table[:num_full]
        pool.pin(shared)
        if begun:
            shared += pool.pop_free(1)
            # All copies of a step read before any writes: the copy of a copy comes from its source.
            sources = {copy.destination: copy.source for copy in self.copies if copy.group == group}
            self.copies.append(Copy(group, sources.get(table[num_full], table[num_full]), shared[-1]))
        return shared

    def take_copies(self, step_id: int) -> tuple[Copy, ...]:
        """The copies to run in step `step_id`, which is being scheduled."""
        # Of several copies into a block, the last counts.
        copies = {(copy.group, copy.destination): copy for copy in self.copies}
        self.copies = []
        return tuple(copies.values())

    def lost_blocks(self, undone: Iterable[ScheduledBatch]) -> set[tuple[int, int]]:
        """(group, block) of begun blocks without content: their copies were undone, or copy such a block."""
        lost = {(copy.group, copy.destination) for batch in undone for copy in batch.copies}
        for copy in self.copies:  # a fork of a fork, in the order in which they were made
            if (copy.group, copy.source) in lost:
                lost.add((copy.group, copy.destination))
        return lost

    # ------------------------------------------------------------------------------------------ outcome of steps

    def commit(self, step_id: int, entries: Iterable[ScheduledSequence] = ()) -> None:
        """Confirm that step `step_id` of these entries ran: the cache has the KV of the blocks that it registered."""
        self._uncommitted.pop(step_id, None)

    def withdraw(self, step_id: int) -> None:
        """Make the blocks that step `step_id` registered unfindable: it failed."""
        for pool, block in self._uncommitted.pop(step_id, ()):
            pool.forget_block(block)
