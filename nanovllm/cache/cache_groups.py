"""Block managers of models whose layers do not all keep the same positions: a pool and block tables for each group.

Layers with a sliding window, or attention in chunks, need only the end of a sequence. Their group lets go of a block
when a step that passed it was *read*: a step that fails moves the window back, and steps in flight still see it::

    full group     | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9 |..|
    window group   | . | . | 3 | 4 | . | . | . | 8 | 9 |..|     . let go: the null block in the table
                             kept tail       window

What is let go is forgotten at once and the next to be taken, unless it lies in a tail that a later request is likely to
ask for: before the end of the prompt, before a junction (where a known prefix ended that other requests went on from in
another way), or in what somebody has claimed. Those age in the free list like the blocks of a finished sequence.

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


class Hits(list[int]):
    """The first group's blocks of a prefix hit; `others` are those of the further groups.

    All are of one length; the null block stands where a window group needs none.
    """

    others: list[list[int]]


class Demand(int):
    """Free blocks wanted of the first group; `others` are those of the further groups."""

    others: tuple[int, ...]

    @classmethod
    def of_groups(cls, counts: AnySequence[int]) -> Demand:
        demand = cls(counts[0])
        demand.others = tuple(counts[1:])
        return demand

    def __add__(self, other: int) -> Demand:
        others = other.others if isinstance(other, Demand) else (other,) * len(self.others)
        return self.of_groups([int(self) + int(other), *map(int.__add__, self.others, others)])

    __radd__ = __add__


class CacheGroups(GroupBlocks):
    """The block manager of the first group, which keeps those of the others in step; the scheduler sees it alone.

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
        self.others = [GroupBlocks(k, n, block_size, tree) for k, n in zip(kinds[1:], num_blocks[1:], strict=True)]
        self.managers: list[GroupBlocks] = [self, *self.others]
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

    def tables_of(self, sequence: Sequence) -> Iterator[tuple[GroupBlocks, list[int]]]:
        """The sequence's block table in each group."""
        yield self, sequence.block_table
        if sequence.group_tables is not None:
            for manager, table in zip(self.others, sequence.group_tables.others, strict=True):
                yield manager, table.block_table

    def _further(self, sequence: Sequence) -> GroupTables:
        if sequence.group_tables is None:
            tables = [GroupTable() for _ in self.others]
            sequence.group_tables = GroupTables(tables, [0] * len(self.managers))
        return sequence.group_tables

    # ------------------------------------------------------------------------------------------------ capacity

    @property
    def num_free_blocks(self) -> int:
        return min(len(manager.free_blocks) for manager in self.managers)

    def has_free(self, num_blocks: int) -> bool:
        counts = (num_blocks, *num_blocks.others) if isinstance(num_blocks, Demand) else [num_blocks] * len(self._peaks)
        return all(n <= len(manager.free_blocks) for n, manager in zip(counts, self.managers, strict=True))

    def num_blocks_lacking(self, sequence: Sequence, num_tokens: int, hits: Collection[int] = ()) -> Demand:
        """Of a window group, no more than a sequence ever holds at a time."""
        lacking = self.num_blocks_for(num_tokens) - len(sequence.block_table) - len(hits)
        of_groups = [hits, *hits.others] if isinstance(hits, Hits) else [hits] * len(self.managers)
        first_held = self._further(sequence).first_held
        counts = []
        for manager, peak, claimed, first in zip(self.managers, self._peaks, of_groups, first_held, strict=True):
            wanted = lacking
            if not manager.kind.is_full:
                wanted = min(lacking, max(0, peak - (len(sequence.block_table) - first)))
            counts.append(min(wanted + manager.num_free_among(claimed), manager.num_blocks - 1))
        return Demand.of_groups(counts)

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
            self._further(sequence).junctions.add(first + len(nodes))
        hits = Hits(self.blocks_of(nodes[:length], first))
        hits.others = [manager.blocks_of(nodes[:length], first) for manager in self.others]
        if first and any(
            len(manager.free_blocks) <= manager.num_free_among(blocks)
            for manager, blocks in zip(self.managers, [hits, *hits.others], strict=True)
        ):  # beside what the sequence holds there would be no block left to compute in
            for blocks in (hits, *hits.others):
                blocks.clear()
        return hits

    def _blocks(self, sequence: Sequence, first: int, end: int) -> Iterator[tuple[bytes, bytes]]:
        for index in range(first, end):
            yield self._block_hash(sequence, index), sequence.block_tokens(index, self.block_size)

    def claim(self, sequence: HasBlockTable, blocks: Collection[int]) -> None:
        assert isinstance(sequence, Sequence) and isinstance(blocks, Hits)
        super().claim(sequence, blocks)
        for manager, table, of_group in zip(self.others, self._further(sequence).others, blocks.others, strict=True):
            manager.claim(table, of_group)

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
            for manager, table in self.tables_of(sequence):
                manager.hold(node, table[index], step_id)
            self.tree.release(node)
            parent = node.prefix_id

    def forget(self, sequence: Sequence) -> None:
        blocks = self._blocks(sequence, 0, len(sequence.token_ids) // self.block_size)
        for node in list(self.tree.and_longer(self.tree.find(blocks, sequence.cache_salt))):
            for manager in self.managers:
                manager.forget_prefix(node)

    def reset_prefix_cache(self) -> None:
        self.tree.clear()
        super().reset_prefix_cache()
        for manager in self.others:
            manager.reset_prefix_cache()

    # ---------------------------------------------------------------------------------- allocation and release

    def allocate(self, sequence: HasBlockTable, num_blocks: int) -> None:
        assert isinstance(sequence, Sequence)
        super().allocate(sequence, num_blocks)
        for manager, table in zip(self.others, self._further(sequence).others, strict=True):
            manager.allocate(table, num_blocks)

    def release(self, sequence: HasBlockTable, num_kept: int = 0) -> None:
        assert isinstance(sequence, Sequence)
        super().release(sequence, num_kept)
        if sequence.group_tables is not None:
            for manager, table in zip(self.others, sequence.group_tables.others, strict=True):
                manager.release(table, num_kept)
            if not num_kept:
                sequence.group_tables = None

    # ------------------------------------------------------------------------------------------ outcome of steps

    def commit(self, step_id: int, entries: Iterable[ScheduledSequence] = ()) -> None:
        for manager in self.managers:
            BlockManager.commit(manager, step_id)
        for sequence, start, num_new_tokens, _, table, _ in entries:
            end = start + num_new_tokens
            if start // self.block_size != end // self.block_size and sequence.block_table is table:
                self._let_go(sequence, end)

    def _let_go(self, sequence: Sequence, num_read: int) -> None:
        """Let go of what lies behind the windows, now that `num_read` tokens are computed for certain."""
        further, prompt = self._further(sequence), sequence.num_prompt_tokens
        junctions = {(prompt - 1) // self.block_size, prompt // self.block_size, *further.junctions}
        for number, (manager, table) in enumerate(self.tables_of(sequence)):
            first, end = further.first_held[number], manager.first_block(num_read)
            if not manager.kind.is_full and end > first:
                manager.let_go(table, first, end, junctions)
                further.first_held[number] = end

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
