"""Block managers for models with several kinds of layers: one pool and one block table per sequence in each group.

Layers with a sliding window, or attention in chunks, need only the end of a sequence. Their group frees a block when a
step that passed it was *read*: a step that fails moves the window back, and steps in flight still see it::

    full group     | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9 |..|
    window group   | . | . | 3 | 4 | . | . | . | 8 | 9 |..|     . freed: the null block in the table
                             kept tail       window

These blocks are evicted first, unless a later request is likely to ask for them: before the end of the prompt, before a
junction (the end of a known prefix after which requests differ), or claimed before. Those age in the free list like the
blocks of a finished sequence.

A prefix hit ends where all groups agree: the group of full attention holds all blocks before it, each window group the
blocks that the next token sees.

Invariant: a prefix is in the index while the first group holds its last block or a longer prefix is in the index. For a
window group holds the end of a prefix without its beginning, and every hit ends with a block of each group.

One pool per kind of layer follows vLLM's hybrid KV-cache manager. Kept tails follow its experience that blocks from
before the windows flooded the list of free blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as AnySequence
from dataclasses import dataclass, field

from nanovllm.batch import NULL_BLOCK, ScheduledSequence
from nanovllm.block_manager import BlockManager, BlockObserver, BlockPool, PrefixEntry
from nanovllm.features.engine_stats import CacheGroupStats
from nanovllm.features.groups.group_blocks import GroupBlocks
from nanovllm.features.groups.state_blocks import StateBlocks, StatePool
from nanovllm.features.groups.state_kinds import StateKind
from nanovllm.sequence import Sequence


def group_stats(manager: BlockManager) -> tuple[CacheGroupStats, ...]:
    """The pools of a manager of cache groups; empty for another."""
    return tuple(
        CacheGroupStats(
            *group.kind.spans,
            group.pool.num_blocks - 1,
            group.pool.num_blocks - 1 - len(group.pool.free_blocks),
            group.pool.num_findable_blocks,
            group.pool.num_evictions,
            group.kind.record_bytes,
        )
        for group in (manager.groups if isinstance(manager, CacheGroups) else ())
    )


class GroupCounts(int):
    """Numbers of blocks of each group (`by_group`); as an int, the number of the first group."""

    by_group: AnySequence[int]

    def __new__(cls, by_group: AnySequence[int]) -> GroupCounts:
        counts = super().__new__(cls, by_group[0])
        counts.by_group = by_group
        return counts

    def __add__(self, other: int) -> GroupCounts:
        counts = other.by_group if isinstance(other, GroupCounts) else [other] * len(self.by_group)
        return GroupCounts(list(map(int.__add__, self.by_group, counts)))

    __radd__ = __add__


@dataclass(slots=True)
class GroupTables:
    """State of a sequence in cache groups; `Sequence.block_table` is the table of the first group.

    further: block tables of the other groups; the null block replaces each block that left the window.
    first_held: index of the first block that is not freed, one a group.
    junctions: lengths in blocks of known prefixes that were only partly in the cache.
    awaits_state: True if the step being scheduled writes a state that gives a longer hit in the next step.
    """

    further: list[list[int]]
    first_held: list[int]
    junctions: set[int] = field(default_factory=set)
    awaits_state: bool = False


class CacheGroups(BlockManager):
    """A pool and block tables for each cache group, and one prefix index; the base class is the first group's pool.

    All tables of a sequence are equally long. The group with the fewest free blocks limits capacity. The oldest
    sequence always finishes: each pool has room for one longest sequence, and a preemption frees blocks in all pools.

    Args:
        kinds: kind of each group, full attention first if there is any.
        num_blocks: blocks of each group, the null block included.
        max_chunk_tokens: most tokens of one prompt that steps in flight compute; for the decision to admit it.
        enable_prefix_caching, hash_seed: arguments of `BlockManager`.

    Raises ValueError for a pool that cannot hold one sequence of `max_model_len`.
    """

    def __init__(
        self,
        kinds: AnySequence[StateKind],
        num_blocks: AnySequence[int],
        block_size: int,
        *,
        max_model_len: int,
        max_chunk_tokens: int,
        enable_prefix_caching: bool = True,
        hash_seed: str = "",
    ) -> None:
        super().__init__(num_blocks[0], block_size, enable_prefix_caching=enable_prefix_caching, hash_seed=hash_seed)
        if kinds[0].record_bytes is not None:
            raise ValueError(
                "the first cache group has records; the prefix index needs one with a block for each block"
            )
        pools: list[BlockPool] = [self]
        for kind, count in zip(kinds[1:], num_blocks[1:], strict=True):
            is_record = kind.record_bytes is not None
            pools.append(StatePool(count, self._state_found, self._state_lost) if is_record else BlockPool(count))
        limits = {"max_model_len": max_model_len, "max_chunk_tokens": max_chunk_tokens}
        self.groups = [
            (GroupBlocks if kind.record_bytes is None else StateBlocks)(kind, pool, block_size, **limits)
            for kind, pool in zip(kinds, pools, strict=True)
        ]
        if not kinds[0].is_full:  # each sequence needs a block, however long it is
            self.max_running_tokens = (num_blocks[0] - 1) * max_model_len
        self._states = [group for group in self.groups if isinstance(group, StateBlocks)]
        self.cuts_chunks = bool(self._states)
        self.at_steps += [group.begin_step for group in self._states]
        self.state_observer: BlockObserver | None = None  # hears of states that become findable or are evicted
        self.by_id: dict[int | str, PrefixEntry] = {}
        self.num_longer: dict[int | str, int] = {}  # prefix id -> entries that are one block longer
        for pool in pools:
            pool.wanted = self.wanted

    @property
    def pools(self) -> list[BlockPool]:
        return [group.pool for group in self.groups]

    def tables_of(self, sequence: Sequence) -> Iterator[tuple[GroupBlocks, list[int]]]:
        """Each group with the sequence's block table there."""
        return zip(self.groups, (sequence.block_table, *self._group_tables(sequence).further), strict=True)

    def _group_tables(self, sequence: Sequence) -> GroupTables:
        if sequence.group_tables is None:
            num_groups = len(self.groups)
            sequence.group_tables = GroupTables([[] for _ in range(num_groups - 1)], [0] * num_groups)
        tables: GroupTables = sequence.group_tables
        return tables

    # ------------------------------------------------------------------------------------------------ capacity

    @property
    def num_free_blocks(self) -> int:
        """Blocks by which a sequence's tables can grow."""
        return min(group.num_blocks_to_grow for group in self.groups)

    def has_free(self, num_blocks: int, victim: Sequence | None = None, hits: Collection[int] = ()) -> bool:
        counts = num_blocks.by_group if isinstance(num_blocks, GroupCounts) else [num_blocks] * len(self.groups)
        if victim is not None:
            entries = self._hit_entries(hits)
            tables = self.tables_of(victim)
            freed = [group.num_freed(table, group.hit_blocks(entries, 0)) for group, table in tables]
            counts = list(map(int.__sub__, counts, freed))
        return all(n <= len(group.pool.free_blocks) for n, group in zip(counts, self.groups, strict=True))

    def num_blocks_lacking(self, sequence: Sequence, num_tokens: int, hits: Collection[int]) -> GroupCounts:
        """Counts for a window group at most the blocks that one sequence holds at a time."""
        lacking = self.num_blocks_for(num_tokens) - len(sequence.block_table) - len(hits)
        first_held = self._group_tables(sequence).first_held
        of_groups = zip(self.tables_of(sequence), first_held, self.hits_by_group(sequence, hits), strict=True)
        return GroupCounts(
            [group.num_lacking(table, first, lacking, found) for (group, table), first, found in of_groups]
        )

    def trim(self, sequence: Sequence) -> None:
        tables = self._group_tables(sequence)
        newest = (sequence.num_computed_tokens - 1) // self.block_size
        for number, (group, table) in enumerate(self.tables_of(sequence)):
            if group.keeps_records and not group.pool.free_blocks and newest > tables.first_held[number]:
                group.free_unseen(table, tables.first_held[number], newest, self._junctions(sequence))
                tables.first_held[number] = newest

    # ------------------------------------------------------------------------------------- where states are kept

    def cut(self, sequence: Sequence, start: int, end: int) -> int:
        """The first boundary in the chunk at which a state is kept, else `end`; `start` while it awaits a state.

        A state in a block is overwritten in place, so a chunk that begins in one ends with it at the latest.
        """
        if not self._states:
            return end
        if sequence.group_tables is not None and sequence.group_tables.awaits_state:
            return start
        if start % self.block_size:
            return min(end, self.num_blocks_for(start) * self.block_size)
        return self._next_checkpoint(sequence, start, end) if self.enable_prefix_caching else end

    def _next_checkpoint(self, sequence: Sequence, start: int, end: int) -> int:
        """The first boundary between start and end at which a state is kept; `end` if there is none.

        It is the last one before the end of the known tokens, or a junction: after it fewer waiting sequences go on
        as this one does, or a prefix ends that the index knows.
        """
        block_size = self.block_size
        junctions = self._group_tables(sequence).junctions
        first = start // block_size + 1  # the boundaries between them
        stop = (end - 1) // block_size
        last = (sequence.num_known_tokens - 1) // block_size
        num_full = len(sequence.token_ids) // block_size
        nearest = min((n for n in (last, max(junctions, default=0)) if first <= n <= stop), default=stop + 1)
        for length in range(first, nearest):
            num_wanted = self._num_others(sequence, length - 1)
            if num_wanted > (self._num_others(sequence, length) if length < num_full else 0):
                return length * block_size
            if not num_wanted:
                break
        return min(end, nearest * block_size)

    def _num_others(self, sequence: Sequence, index: int) -> int:
        return self.wanted.by_others(sequence, index, self._block_hash(sequence, index))

    def rewindable(self, sequence: Sequence, num_tokens: int) -> int:
        if not self._states:
            return num_tokens
        length = num_tokens // self.block_size
        agreed = -1
        while agreed != length:
            agreed = length
            for group, table in self.tables_of(sequence):
                length = group.rewindable(table, length)
        return length * self.block_size

    # ------------------------------------------------------------------------------------------------ prefixes

    def _hits(self, sequence: Sequence, first: int, end: int) -> list[int]:
        """The longest prefix in all groups. The end of a longer prefix in the index becomes a junction."""
        entries = self._find(sequence, first, end)
        length = self._longest_hit(entries, first)
        if length < len(entries):
            self._group_tables(sequence).junctions.add(first + len(entries))
        if self._states:
            writes_states = any(group.fresh for group in self._states)
            will_be_longer = writes_states and self._longest_hit(entries, first, with_fresh=True) > length
            self._group_tables(sequence).awaits_state = will_be_longer
        by_group = [group.hit_blocks(entries[:length], first) for group in self.groups]
        if first and any(
            len(group.pool.free_blocks) <= group.num_free_among(blocks)
            for group, blocks in zip(self.groups, by_group, strict=True)
        ):  # the sequence holds blocks: with these there would be none left to compute in
            return []
        return by_group[0]

    def _longest_hit(self, entries: list[PrefixEntry], first: int, *, with_fresh: bool = False) -> int:
        """Length of the longest prefix that all groups have."""
        length = len(entries)
        agreed = -1
        while agreed != length:
            agreed = length
            for group in self.groups:
                length = group.longest_hit(entries, first, length, with_fresh=with_fresh)
        return length

    def hits_by_group(self, sequence: Sequence, hits: Collection[int]) -> list[list[int]]:
        """The blocks of a hit in each group; `hits` are the first group's, from `lookup`."""
        entries = self._hit_entries(hits)
        return [group.hit_blocks(entries, len(sequence.block_table)) for group in self.groups]

    def _hit_entries(self, hits: Collection[int]) -> list[PrefixEntry]:
        entries: list[PrefixEntry] = []
        for block in reversed([*hits]):  # a window group has the null block at first, but never at last
            entry = self.by_id[entries[-1].parent] if entries else self.entry_of[block]
            assert entry is not None
            entries.append(entry)
        return entries[::-1]

    def claim(self, sequence: Sequence, blocks: Collection[int]) -> None:
        entries = self._hit_entries(blocks)
        by_group = self.hits_by_group(sequence, blocks)
        for (group, table), found in zip(self.tables_of(sequence), by_group, strict=True):
            group.claim(found, entries)
            table.extend(found)

    def register(self, sequence: Sequence, first: int, end: int, step_id: int) -> None:
        super().register(sequence, first, end, step_id)
        _, *further = self.tables_of(sequence)
        for index in range(first, end):
            entry = self.entry_of[sequence.block_table[index]]
            if entry is None:
                return
            for group, table in further:
                if table[index] != NULL_BLOCK and group.pool.entry_of[table[index]] is None:
                    group.hold(table[index], entry)
                    self._uncommitted.setdefault(step_id, []).append((group.pool, table[index]))

    def _add(self, sequence: Sequence, index: int, parent: int | str) -> PrefixEntry | None:
        if NULL_BLOCK in sequence.block_table[index : index + 1]:
            return None
        entry = super()._add(sequence, index, parent)
        if entry is not None and entry.prefix_id not in self.by_id:
            self.by_id[entry.prefix_id] = entry
            self.num_longer[entry.prefix_id] = 0
            if parent in self.num_longer:
                self.num_longer[parent] += 1
        return entry

    def _on_lost(self, entry: PrefixEntry) -> None:
        lost: PrefixEntry | None = entry
        while lost is not None and lost.prefix_id not in self.holders and not self.num_longer[lost.prefix_id]:
            super()._on_lost(lost)
            del self.by_id[lost.prefix_id], self.num_longer[lost.prefix_id]
            for group in self.groups:
                group.forget(lost)
            lost = self.by_id.get(lost.parent)
            if lost is not None:
                self.num_longer[lost.prefix_id] -= 1

    def _state_found(self, entry: PrefixEntry) -> None:
        if self.state_observer is not None:
            parent = self.by_id.get(entry.parent)
            self.state_observer.findable(entry, None if parent is None else parent.block_hash)

    def _state_lost(self, entry: PrefixEntry) -> None:
        if self.state_observer is not None:
            self.state_observer.forgotten(entry.block_hash)

    def reset_prefix_cache(self) -> None:
        self.by_id.clear()
        self.num_longer.clear()
        for group in self.groups:
            group.claimed.clear()
        super().reset_prefix_cache()

    # ---------------------------------------------------------------------------------- allocation and release

    def allocate(self, sequence: Sequence, num_blocks: int) -> None:
        for group, table in self.tables_of(sequence):
            group.allocate(table, num_blocks)

    def release(self, sequence: Sequence, num_kept: int = 0) -> None:
        for group, table in self.tables_of(sequence):
            group.unpin(table[num_kept:])
            if num_kept:
                del table[num_kept:]
        if not num_kept:
            sequence.block_table = []
            sequence.group_tables = None

    def can_fork(self, source: Sequence, num_tokens: int) -> bool:
        num_full, begun = divmod(num_tokens, self.block_size)
        last = num_full if begun else num_full - 1  # the last full block names the prefix
        for group, table in self.tables_of(source):
            is_short = len(table) <= last or (begun and not group.pool.free_blocks)
            if is_short or NULL_BLOCK in table[group.first_block(num_tokens) : last + 1]:
                return False
        return True

    def fork(self, source: Sequence, target: Sequence, num_tokens: int) -> None:
        """Share, in each group, the blocks that `target` sees; none of its steps would free blocks before these."""
        firsts = [group.first_block(num_tokens) for group in self.groups]
        tables = [
            [NULL_BLOCK] * first + self._shared(table[first:], num_tokens - first * self.block_size, group.pool, number)
            for number, ((group, table), first) in enumerate(zip(self.tables_of(source), firsts, strict=True))
        ]
        target.block_table = tables[0]
        target.group_tables = GroupTables(tables[1:], firsts, {*self._group_tables(source).junctions})
        target.num_computed_tokens = target.num_counted_tokens = num_tokens

    # ------------------------------------------------------------------------------------------ outcome of steps

    def commit(self, step_id: int, entries: Iterable[ScheduledSequence] = ()) -> None:
        super().commit(step_id)
        for sequence, start, num_new_tokens, _, table, *_ in entries:
            end = start + num_new_tokens
            if start // self.block_size != end // self.block_size and sequence.block_table is table:
                self._free_unseen(sequence, end)

    def _free_unseen(self, sequence: Sequence, num_read: int) -> None:
        """Free the blocks that no later row sees, now that `num_read` tokens are computed for certain."""
        tables = self._group_tables(sequence)
        junctions = self._junctions(sequence)
        for number, (group, table) in enumerate(self.tables_of(sequence)):
            first = tables.first_held[number]
            end = group.first_block(num_read)
            if end > first:
                group.free_unseen(table, first, end, junctions)
                tables.first_held[number] = end

    def _junctions(self, sequence: Sequence) -> set[int]:
        """Lengths in blocks after which later requests are likely to continue."""
        prompt = sequence.num_prompt_tokens
        block_size = self.block_size
        return {(prompt - 1) // block_size, prompt // block_size, *self._group_tables(sequence).junctions}
