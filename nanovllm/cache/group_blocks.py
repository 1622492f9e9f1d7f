"""Blocks of one cache group: a block manager whose tables may have holes and whose prefixes go by the tree's ids."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as AnySequence

from nanovllm.block_manager import BlockManager
from nanovllm.cache.kinds import StateKind
from nanovllm.cache.prefix_tree import PrefixNode, PrefixTree
from nanovllm.core.batch import NULL_BLOCK
from nanovllm.core.block_tables import HasBlockTable
from nanovllm.core.prefix_entry import PrefixEntry


class GroupBlocks(BlockManager):
    """The blocks of one group; tables may have holes, and prefixes go by the tree's ids.

    Attributes:
        claimed: findable blocks that were claimed by some sequence since they were computed.
    """

    def __init__(self, kind: StateKind, num_blocks: int, block_size: int, tree: PrefixTree) -> None:
        super().__init__(num_blocks, block_size)
        self.kind = kind
        self.tree = tree
        self.claimed: set[int] = set()

    def first_block(self, num_tokens: int) -> int:
        return self.kind.first_block(num_tokens, self.block_size)

    def num_free_among(self, blocks: Iterable[int]) -> int:
        return super().num_free_among(block for block in blocks if block != NULL_BLOCK)

    def claim(self, sequence: HasBlockTable, blocks: Collection[int]) -> None:
        held = [block for block in blocks if block != NULL_BLOCK]
        sequence.block_table.extend([NULL_BLOCK] * (len(blocks) - len(held)))  # they come first
        BlockManager.claim(self, sequence, held)
        self.claimed.update(held)

    def longest(self, nodes: AnySequence[PrefixNode], first: int, end: int) -> int:
        """How many of the nodes, which stand at `first` and on, a hit may have at most, and no more than `end`.

        Scanned from the right; what stands before `first` is the sequence's own.
        """
        if self.kind.is_full:
            return next((i for i, node in enumerate(nodes[:end]) if node.block_hash not in self.entries), end)
        index = end
        while index > 0:
            needed = max(0, self.first_block((first + end) * self.block_size) - first)
            while index > needed and nodes[index - 1].block_hash in self.entries:
                index -= 1
            if index <= needed:
                return end
            end = index = index - 1  # no longer hit can do without the block that is missing
        return 0

    def blocks_of(self, nodes: AnySequence[PrefixNode], first: int) -> list[int]:
        """A block for each node, which stand at `first` and on, of those that a hit at their end needs."""
        needed = max(0, self.first_block((first + len(nodes)) * self.block_size) - first)
        return [NULL_BLOCK] * needed + [next(iter(self.entries[node.block_hash].blocks)) for node in nodes[needed:]]

    def hold(self, node: PrefixNode, block: int, step_id: int) -> None:
        """Make the block findable as the last of this prefix; `step_id` computes the last of its tokens, or follows."""
        if block == NULL_BLOCK or self.entry_of[block] is not None:
            return
        entry = self.entries.get(node.block_hash)
        if entry is None:
            entry = PrefixEntry(node.prefix_id, node.block_hash, node.parent, node.tokens)
            self.entries[node.block_hash] = entry
            node.num_users += 1
            if self.observer is not None and self.kind.is_full:
                self.observer.findable(entry, None if node.above is None else node.above.block_hash)
        entry.blocks[block] = None
        self.entry_of[block] = entry
        self.num_findable_blocks += 1
        self._uncommitted.setdefault(step_id, []).append(block)

    def _forget_block(self, block: int, entry: PrefixEntry) -> None:
        self.claimed.discard(block)
        super()._forget_block(block, entry)

    def _forget_entry(self, entry: PrefixEntry) -> None:
        if self.kind.is_full:
            super()._forget_entry(entry)
        else:  # the tree tells what it no longer knows
            del self.entries[entry.block_hash]
        self.tree.release(self.tree.node(entry))

    def forget_prefix(self, node: PrefixNode) -> None:
        if (entry := self.entries.get(node.block_hash)) is not None:
            for block in list(entry.blocks):
                self._forget_block(block, entry)

    def free_unseen(self, table: list[int], first: int, end: int, junctions: Collection[int]) -> None:
        """Free the table's blocks first..end-1; those outside of every kept tail are forgotten.

        Args:
            junctions: lengths in blocks at which later requests may go on.
        """
        kept = [(self.first_block(length * self.block_size), length) for length in junctions]
        for index in range(first, end):
            block, table[index] = table[index], NULL_BLOCK
            if block == NULL_BLOCK:
                continue
            is_kept = block in self.claimed or any(begin <= index < length for begin, length in kept)
            entry = self.entry_of[block]
            if entry is not None and self.ref_counts[block] == 1 and not is_kept:
                self._forget_block(block, entry)
            self._give_back([block])

    def _give_back(self, blocks: list[int]) -> None:
        super()._give_back([block for block in blocks if block != NULL_BLOCK])

    def reset_prefix_cache(self) -> None:
        super().reset_prefix_cache()
        self.claimed.clear()
