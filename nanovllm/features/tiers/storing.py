"""Block managers that know the tokens before each block, and store idle ones in a tier. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from nanovllm.batch import NULL_BLOCK, Copy, ScheduledSequence
from nanovllm.block_manager import BlockManager, BlockPool, PrefixEntry, root_hash
from nanovllm.features.tiers.books import StoredBlock, TierBooks
from nanovllm.sequence import Sequence

MAX_EXAMINED = 256  # limit of queued blocks that one step examines
# Content without a hit is stored in all steps if so large a share of it is found later, else in fewer, but some.
# no whole number of steps apart, for repeats
WORTH_SHARE = 0.1
LEAST_STEPS = 0.06


class Store(NamedTuple):
    """A copy of a block's content to a slot of host memory."""

    node: StoredBlock
    copy: Copy


class Load(NamedTuple):
    """A copy from host memory that no batch has taken yet."""

    slot: int
    node: StoredBlock
    entry: PrefixEntry


class StoringBlocks(BlockManager):
    """The part of `TieredBlocks` that stores.

    Invariant: slots of copies that no batch has taken yet are pinned, whatever idle time does, and only later copies of
    that batch read them.

    Attributes:
        books: books of the tiers.
        queues: block -> entry of each cache group's idle blocks that no tier has, the newest last.
    """

    books: TierBooks
    root_seed: str
    stores_all: bool
    max_step_blocks: int
    num_stored_blocks = 0

    def _begin_storing(self) -> None:
        self.queues: list[dict[int, PrefixEntry]] = [{} for _ in self.pools]
        # At 1 credit a step stores content without a hit; `_is_cut`: the last such step left some, so the next goes on.
        self._credit = 1.0
        self._is_cut = False
        self._passed: list[dict[int, PrefixEntry]] = [{} for _ in self.pools]  # blocks left to idle time, like `queues`
        self._nodes: dict[int, StoredBlock] = {}  # prefix id -> node
        self._loads: dict[tuple[int, int], Load] = {}  # (group, block) -> load
        self._storing: dict[tuple[int, int], StoredBlock] = {}  # (group, slot) of copies that no batch has taken yet
        self._stored_in: dict[int, dict[tuple[int, int], StoredBlock]] = {}  # step id -> copies that its batch took

    # ---------------------------------------------------------------------------------------- the tree of tokens

    def root_of(self, cache_salt: str) -> StoredBlock:
        return self.books.root(root_hash(self.root_seed, cache_salt))

    def _node_before(self, parent: int | str) -> StoredBlock:
        return self.root_of(parent) if isinstance(parent, str) else self._nodes[parent]

    def _add(self, sequence: Sequence, index: int, parent: int | str) -> PrefixEntry | None:
        entry = super()._add(sequence, index, parent)
        if entry is not None and entry.prefix_id not in self._nodes:
            node = self._nodes[entry.prefix_id] = self._node_before(parent).child(entry.tokens)
            node.entry = entry
        return entry

    def _on_lost(self, entry: PrefixEntry) -> None:
        super()._on_lost(entry)
        node = self._nodes.pop(entry.prefix_id)
        node.entry = None
        self.books.prune(node)

    def _path(self, node: StoredBlock, sequence: Sequence, first: int, end: int) -> list[StoredBlock]:
        return self.books.path(node, (sequence.block_tokens(index, self.block_size) for index in range(first, end)))

    @staticmethod
    def _holder(pool: BlockPool, node: StoredBlock) -> int:
        holders = None if node.entry is None else pool.holders.get(node.entry.prefix_id)
        return next(iter(holders)) if holders else NULL_BLOCK

    # ------------------------------------------------------------------------------------------------- the stores

    def _on_idle(self, group: int, block: int, entry: PrefixEntry) -> None:
        node = self._nodes.get(entry.prefix_id)
        if node is None or group in node.slots or group in node.places or self._is_superseded(group, block, entry):
            return
        self.queues[group].pop(block, None)
        self.queues[group][block] = entry

    def _is_superseded(self, group: int, block: int, entry: PrefixEntry) -> bool:
        """Whether a recurrent state is of no use to later requests, as far as known."""
        return False

    def is_worth(self, node: StoredBlock) -> bool:
        """Whether a content is likely to be asked for: it was before, or a waiting request wants it."""
        is_wanted = node.entry is not None and node.entry.block_hash in self.wanted
        return node.num_hits > 0 or len(node.children) > 1 or is_wanted

    def settled_block(self, group: int, node: StoredBlock) -> int:
        """A block with this content that a read step computed; the null block if there is none."""
        pool = self.pools[group]
        block = self._holder(pool, node)
        is_unread = any((pool, block) in of_step for of_step in self._uncommitted.values())
        if is_unread or (group, block) in self._loads or node.entry is None:
            return NULL_BLOCK
        return NULL_BLOCK if self._is_superseded(group, block, node.entry) else block

    def settled_slot(self, group: int, node: StoredBlock) -> int | None:
        """The slot that has this content; None if there is none, or if no batch has taken the copy into it yet."""
        slot = node.slots.get(group)
        return None if slot is None or (group, slot) in self._storing else slot

    def _evicts_soon(self, group: int) -> bool:
        """Whether the step that is being scheduled may evict content of a group."""
        pool = self.pools[group]
        return any(pool.entry_of[block] is not None for block in islice(pool.free_blocks, self.max_step_blocks))

    def idle_blocks(self, group: int, count: int = MAX_EXAMINED) -> list[tuple[int, StoredBlock]]:
        """(block, node) of queued blocks that still have their committed content, in no tier yet."""
        found = []
        pool = self.pools[group]
        queue = self.queues[group]
        unread = {block for of_step in self._uncommitted.values() for of_pool, block in of_step if of_pool is pool}
        for block, entry in [*islice(queue.items(), count)]:
            if pool.entry_of[block] is not entry or self._is_superseded(group, block, entry):
                del queue[block]
            elif block not in unread and (group, block) not in self._loads:
                node = self._nodes[entry.prefix_id]
                if group in node.slots or group in node.places:
                    del queue[block]
                else:
                    found.append((block, node))
        return found

    def stores_new(self) -> bool:
        """Whether the next step stores content without a hit too: all of a prefix, or none."""
        if self._is_cut:
            self._is_cut = False
            return True
        self._credit += min(1.0, max(LEAST_STEPS, self.books.found_share / WORTH_SHARE))
        is_turn = self._credit >= 1.0
        self._credit -= is_turn
        return is_turn

    def stores(self, group: int, max_bytes: int, *, stores_new: bool = True) -> list[Store]:
        """Copies of a group's idle blocks to host memory, for the next batch or with no step in flight.

        Blocks are hits from now on: the caller executes the copies before anything else, or pins their slots.

        Args:
            stores_new: content that is not `is_worth` it too; else it is left to idle time.
        """
        most = max(MAX_EXAMINED, self.max_step_blocks)
        self._is_cut |= stores_new and len(self.queues[group]) > most
        chosen: list[tuple[int, StoredBlock]] = []
        slots: list[int] = []
        num_bytes = 0
        # One block of each content: two sequences may have computed it.
        for node, block in {node: block for block, node in self.idle_blocks(group, most)}.items():
            if not (self.stores_all and stores_new) and not self.is_worth(node):
                if self.stores_all:
                    self._passed[group][block] = self.queues[group].pop(block)
                continue
            num_bytes += self.books.block_bytes[group]
            slot = self.books.take_slot(group) if num_bytes <= max_bytes else None
            if slot is None:
                self._is_cut |= stores_new
                break
            chosen.append((block, node))
            slots.append(slot)
        # Neighbours to neighbours, so that a CPU copies whole runs of blocks.
        slot_of = dict(zip(sorted(block for block, _ in chosen), sorted(slots), strict=True))
        for block, node in chosen:
            del self.queues[group][block]
            self.books.hold(node, group, slot_of[block])
        self.num_stored_blocks += len(chosen)
        node_of = dict(chosen)
        return [Store(node_of[block], Copy(group, block, ~slot)) for block, slot in slot_of.items()]

    def _queue(self, stores: Iterable[Store]) -> None:
        """Leave copies to the next batch."""
        for node, copy in stores:
            slot = ~copy.destination
            self.books.pin(copy.group, slot)
            self._storing[copy.group, slot] = node
            self.copies.append(copy)

    def stores_now(self) -> list[Store]:
        """A copy of an idle block, for the caller to execute at once or to drop; with no step in flight."""
        for group, size in enumerate(self.books.block_bytes):
            if not self.queues[group]:
                self.queues[group], self._passed[group] = self._passed[group], {}
            goes_on = self._is_cut  # a single block here must not begin a step's turn
            stores = self.stores(group, size) if self.queues[group] else []
            self._is_cut = goes_on
            if stores:
                return stores
        return []

    def _take_storing(self) -> dict[tuple[int, int], StoredBlock]:
        storing = self._storing
        self._storing = {}
        for group, slot in storing:
            self.books.unpin(group, slot)
        return storing

    def commit(self, step_id: int, entries: Iterable[ScheduledSequence] = ()) -> None:
        super().commit(step_id, entries)
        self._stored_in.pop(step_id, None)

    def withdraw(self, step_id: int) -> None:
        super().withdraw(step_id)
        for (group, slot), node in self._stored_in.pop(step_id, {}).items():
            for key in [key for key, load in self._loads.items() if key[0] == group and load[:2] == (slot, node)]:
                self._unpin_load(*key)
                self.pools[group].forget_block(key[1])
            if node.slots.get(group) == slot:
                self.books.drop(node, group)

    def _unpin_load(self, group: int, block: int) -> None:
        """Forget a load into a block, if there is one: its source may be evicted."""
        if (load := self._loads.pop((group, block), None)) is not None:
            self.books.unpin(group, load.slot)
