"""Block managers of models whose layers do not all keep the same positions: a pool and block tables for each group.

Layers with a sliding window, or attention in chunks, need only the end of a sequence. Their group frees a block when a
step that passed it was *read*: a step that fails moves the window back, and steps in flight still see it::

    full group     | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9 |..|
    window group   | . | . | 3 | 4 | . | . | . | 8 | 9 |..|     . freed: the null block in the table
                             kept tail       window

These blocks are evicted first, unless a later request is likely to ask for them: before the end of the prompt, before a
junction (where a known prefix ended and requests went on in different ways), or claimed before. Those age in the free
list like the blocks of a finished sequence.

A prefix hit ends where all groups agree: the first group holds all blocks before it, each window group those within
sight of what follows. Which prefix a block stands behind is the prefix tree's knowledge.

The design of a manager for each kind of layer follows vLLM's hybrid KV-cache manager, and what to retain follows its
experience that blocks from behind windows flooded the list of free blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as AnySequence

from nanovllm.block_manager import BlockManager
from nanovllm.cache.cache_pools import CachePools
from nanovllm.cache.group_blocks import GroupBlocks
from nanovllm.cache.kinds import StateKind
from nanovllm.cache.prefix_tree import PrefixNode, PrefixTree
from nanovllm.core.batch import ScheduledSequence
from nanovllm.core.block_tables import GroupTable, GroupTables, HasBlockTable
from nanovllm.core.config import EngineConfig
from nanovllm.core.outputs import CacheGroupStats
from nanovllm.core.prefix_entry import PrefixEntry
from nanovllm.core.sequence import Sequence


def known_prefixes(manager: BlockManager) -> dict[bytes, PrefixEntry] | dict[bytes, PrefixNode]:
    """What observers of the manager were told to be findable, by block hash, in this order."""
    if isinstance(manager, CacheGroups) and not manager.kind.is_full:
        return manager.tree.nodes
    return manager.entries


def pools_of(manager: BlockManager) -> list[BlockManager]:
    """The pool of each cache group."""
    return [*manager.managers] if isinstance(manager, CacheGroups) else [manager]


def group_stats(manager: BlockManager) -> tuple[CacheGroupStats, ...]:
    """The pools of a manager of cache groups; empty for another."""
    return tuple(
        CacheGroupStats(
            pool.kind.window,
            pool.kind.chunk,
            pool.num_blocks - 1,
            pool.num_blocks - 1 - len(pool.free_blocks),
            pool.num_findable_blocks,
            pool.num_evictions,
        )
        for pool in (manager.managers if isinstance(manager, CacheGroups) else ())
    )


class GroupHits(list[int]):
    """A prefix hit: as a list, the blocks of the first group; in `by_group`, as many blocks of each group.

    The null block stands where a window group needs none.
    """

    def __init__(self, by_group: list[list[int]]) -> None:
        super().__init__(by_group[0])
        self.by_group = by_group


class GroupCounts(int):
    """Numbers of blocks: as an int, that of the first group; in `by_group`, that of each group."""

    by_group: AnySequence[int]

    def __new__(cls, by_group: AnySequence[int]) -> GroupCounts:
        counts = super().__new__(cls, by_group[0])
        counts.by_group = by_group
        return counts

    def __add__(self, other: int) -> GroupCounts:
        counts = other.by_group if isinstance(other, GroupCounts) else [other] * len(self.by_group)
        return GroupCounts(list(map(int.__add__, self.by_group, counts)))

    __radd__ = __add__


class CacheGroups(GroupBlocks):
    """The block manager of the first group; passes each operation of the scheduler on to those of the further groups.

    All tables of a sequence are equally long. Capacity is that of the group which has the least left. The oldest
    sequence always finishes: each pool holds what one sequence needs at most, and a preemption frees in all of them.

    Args:
        kinds: one a group, full attention first if there is any.
        num_blocks: of each group, the null block included.
        max_chunk_tokens: that steps in flight compute of one prompt at most, for the decision to admit it.
        enable_prefix_caching, hash_seed: as of `BlockManager`.

    Raises ValueError for a pool that cannot hold what one sequence of `max_model_len` needs.
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
        tree = PrefixTree(self._became_known, self._became_unknown)
        super().__init__(kinds[0], num_blocks[0], block_size, tree)
        self.enable_prefix_caching, self.hash_seed = enable_prefix_caching, hash_seed
        further = zip(kinds[1:], num_blocks[1:], strict=True)
        self.managers: list[GroupBlocks] = [self, *(GroupBlocks(kind, n, block_size, tree) for kind, n in further)]
        chunk_blocks = self.num_blocks_for(max_chunk_tokens)
        self._peaks: list[int] = []  # of one sequence, with what steps in flight compute
        for manager in self.managers:
            needed = manager.kind.max_blocks(max_model_len, block_size)
            if needed > manager.num_blocks - 1:
                raise ValueError(
                    f"a pool of {manager.num_blocks} blocks (block 0 is reserved) for layers with window "
                    f"{manager.kind.window} and chunk {manager.kind.chunk} cannot hold the {needed} blocks that one "
                    f"sequence of {max_model_len} tokens needs. Give it at least {needed + 1} blocks."
                )
            self._peaks.append(needed if manager.kind.is_full else min(manager.num_blocks - 1, needed + chunk_blocks))

    def _became_known(self, node: PrefixNode) -> None:
        if self.observer is not None and not self.kind.is_full:
            self.observer.findable(node, None if node.above is None else node.above.block_hash)

    def _became_unknown(self, node: PrefixNode) -> None:
        if self.observer is not None and not self.kind.is_full:
            self.observer.forgotten(node.block_hash)

    def tables_of(self, sequence: Sequence) -> list[HasBlockTable]:
        """What has the sequence's block table in each group."""
        return [sequence, *self._group_tables(sequence).further]

    def _group_tables(self, sequence: Sequence) -> GroupTables:
        if sequence.group_tables is None:
            num_groups = len(self.managers)
            sequence.group_tables = GroupTables([GroupTable() for _ in range(num_groups - 1)], [0] * num_groups)
        return sequence.group_tables

    # ------------------------------------------------------------------------------------------------ capacity

    @property
    def num_free_blocks(self) -> int:
        return min(len(manager.free_blocks) for manager in self.managers)

    def has_free(self, num_blocks: int) -> bool:
        counts = num_blocks.by_group if isinstance(num_blocks, GroupCounts) else [num_blocks] * len(self.managers)
        return all(n <= len(manager.free_blocks) for n, manager in zip(counts, self.managers, strict=True))

    def num_blocks_lacking(self, sequence: Sequence, num_tokens: int, hits: Collection[int] = ()) -> GroupCounts:
        """Of a window group, no more than a sequence ever holds at a time."""
        lacking = self.num_blocks_for(num_tokens) - len(sequence.block_table) - len(hits)
        by_group = hits.by_group if isinstance(hits, GroupHits) else [hits] * len(self.managers)
        first_held = self._group_tables(sequence).first_held
        counts = []
        for manager, peak, claimed, first in zip(self.managers, self._peaks, by_group, first_held, strict=True):
            wanted = lacking
            if not manager.kind.is_full:
                wanted = min(lacking, max(0, peak - (len(sequence.block_table) - first)))
            counts.append(min(wanted + manager.num_free_among(claimed), manager.num_blocks - 1))
        return GroupCounts(counts)

    # ------------------------------------------------------------------------------------------------ prefixes

    def _hits(self, sequence: Sequence, first: int, end: int) -> list[int]:
        """The longest prefix on which all groups agree; where it falls short of what is known is a junction."""
        nodes = self.tree.find(self._blocks(sequence, first, end), self.parent_of(sequence, first))
        length, agreed = len(nodes), -1
        while agreed != length:
            agreed = length
            for manager in self.managers:
                length = manager.longest(nodes, first, length)
        if length < len(nodes):
            self._group_tables(sequence).junctions.add(first + len(nodes))
        by_group = [manager.blocks_of(nodes[:length], first) for manager in self.managers]
        if first and any(
            len(manager.free_blocks) <= manager.num_free_among(blocks)
            for manager, blocks in zip(self.managers, by_group, strict=True)
        ):  # the sequence holds blocks: with these there would be none left to compute in
            by_group = [[] for _ in by_group]
        return GroupHits(by_group)

    def _blocks(self, sequence: Sequence, first: int, end: int) -> Iterator[tuple[bytes, bytes]]:
        for index in range(first, end):
            yield self._block_hash(sequence, index), sequence.block_tokens(index, self.block_size)

    def claim(self, sequence: HasBlockTable, blocks: Collection[int]) -> None:
        assert isinstance(sequence, Sequence) and isinstance(blocks, GroupHits)
        for manager, table, found in zip(self.managers, self.tables_of(sequence), blocks.by_group, strict=True):
            GroupBlocks.claim(manager, table, found)

    def register(self, sequence: Sequence, first: int, end: int, step_id: int) -> None:
        if not self.enable_prefix_caching:
            return
        parent = self.parent_of(sequence, first)
        for index, (block_hash, tokens) in enumerate(self._blocks(sequence, first, end), first):
            if parent is None:
                return
            node = self.tree.add(block_hash, tokens, parent)
            if node is None:
                return
            node.num_users += 1  # so that it stays until every group had its chance
            for manager, table in zip(self.managers, self.tables_of(sequence), strict=True):
                manager.hold(node, table.block_table[index], step_id)
            self.tree.release(node)
            parent = node.prefix_id

    def forget(self, sequence: Sequence) -> None:
        blocks = self._blocks(sequence, 0, len(sequence.token_ids) // self.block_size)
        for node in list(self.tree.and_longer(self.tree.find(blocks, sequence.cache_salt))):
            for manager in self.managers:
                manager.forget_prefix(node)

    def reset_prefix_cache(self) -> None:
        self.tree.clear()
        for manager in self.managers:
            GroupBlocks.reset_prefix_cache(manager)

    # ---------------------------------------------------------------------------------- allocation and release

    def allocate(self, sequence: HasBlockTable, num_blocks: int) -> None:
        assert isinstance(sequence, Sequence)
        for manager, table in zip(self.managers, self.tables_of(sequence), strict=True):
            BlockManager.allocate(manager, table, num_blocks)

    def release(self, sequence: HasBlockTable, num_kept: int = 0) -> None:
        assert isinstance(sequence, Sequence)
        for manager, table in zip(self.managers, self.tables_of(sequence), strict=True):
            BlockManager.release(manager, table, num_kept)
        if not num_kept:
            sequence.group_tables = None

    # ------------------------------------------------------------------------------------------ outcome of steps

    def commit(self, step_id: int, entries: Iterable[ScheduledSequence] = ()) -> None:
        for manager in self.managers:
            BlockManager.commit(manager, step_id)
        for sequence, start, num_new_tokens, _, table, _ in entries:
            end = start + num_new_tokens
            if start // self.block_size != end // self.block_size and sequence.block_table is table:
                self._free_unseen(sequence, end)

    def _free_unseen(self, sequence: Sequence, num_read: int) -> None:
        """Free the blocks that no later row sees, now that `num_read` tokens are computed for certain."""
        tables, prompt = self._group_tables(sequence), sequence.num_prompt_tokens
        junctions = {(prompt - 1) // self.block_size, prompt // self.block_size, *tables.junctions}
        for number, (manager, table) in enumerate(zip(self.managers, self.tables_of(sequence), strict=True)):
            first, end = tables.first_held[number], manager.first_block(num_read)
            if end > first:
                manager.free_unseen(table.block_table, first, end, junctions)
                tables.first_held[number] = end

    def withdraw(self, step_id: int) -> None:
        for manager in self.managers:
            BlockManager.withdraw(manager, step_id)


def build_block_manager(config: EngineConfig, pools: CachePools, *, hash_seed: str = "") -> BlockManager:
    """The block manager of an engine: a plain one for full attention alone. The config is fully resolved."""
    if pools.is_one_full:
        return BlockManager(
            config.num_kv_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            hash_seed=hash_seed,
        )
    return CacheGroups(
        [group.kind for group in pools.groups],
        pools.num_blocks,
        config.block_size,
        max_model_len=config.max_model_len,
        max_chunk_tokens=config.long_prefill_token_threshold * (2 if config.overlap else 1),
        enable_prefix_caching=config.enable_prefix_caching,
        hash_seed=hash_seed,
    )
