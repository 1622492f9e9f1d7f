"""Block managers with prefix hits that go on into tiers: host memory, and files read into it while the request waits.

A hit in host memory becomes free blocks that are findable at once, and copies into them, which the next batch executes
before its forward pass::

    lookup     | memory | memory | host | host |  compute ...
    the same   | memory | memory | new  | new  |                copies: host slot -> new block
    step         copies, then the forward pass, which reads them

Stores run the other way: from blocks without references, before the step that may overwrite them.

Invariant: every findable block is filled by a copy of a batch no later than the first that reads it, and a slot is a
hit only with content that a committed step computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as AnySequence
from functools import partial

from nanovllm.batch import NULL_BLOCK, Copy
from nanovllm.block_manager import PrefixEntry
from nanovllm.features.groups.cache_groups import CacheGroups
from nanovllm.features.groups.state_blocks import StateBlocks
from nanovllm.features.groups.state_kinds import FULL, StateKind
from nanovllm.features.tiers.books import StoredBlock, TierBooks, longest_run
from nanovllm.features.tiers.costs import LoadCosts
from nanovllm.features.tiers.reading import FileReads
from nanovllm.features.tiers.storing import MAX_EXAMINED, Load, StoringBlocks
from nanovllm.sequence import Sequence

HOST = "host"
STEP_BYTES = 2**28  # most bytes that a step stores, and without a latency goal most that it loads
EVICTED_BYTES = 2**31  # most bytes of blocks about to be evicted that a step stores on a side stream


class TieredBlocks(StoringBlocks):
    """A block manager with tiers, once they are attached."""

    def attach(
        self,
        books: TierBooks,
        costs: LoadCosts,
        *,
        root_seed: str,
        reads: FileReads | None = None,
        stores_all: bool = True,
        stores_while_busy: bool = True,
        max_load_bytes: Callable[[], float] = lambda: STEP_BYTES,
        max_step_blocks: int = MAX_EXAMINED,
    ) -> None:
        """Attach the tiers to a manager that has no entries yet.

        Args:
            root_seed: text of all that KV depends on besides tokens and salt.
            reads: reads of files; None for host memory alone.
            stores_all: True stores content that is not `is_worth` it, too.
            stores_while_busy: True lets steps store, on a side stream, blocks that are not about to be evicted.
            max_load_bytes: function that returns the most bytes of one step's loads.
            max_step_blocks: most blocks that one step allocates.
        """
        self.books = books
        self.costs = costs
        self.reads = reads
        self.root_seed = root_seed
        self.stores_while_busy = stores_while_busy
        self.max_load_bytes = max_load_bytes
        self.stores_all = stores_all
        self.max_step_blocks = max_step_blocks
        self.numbers = range(len(self.pools))  # indices of the cache groups
        self.kinds: AnySequence[StateKind] = [g.kind for g in self.groups] if isinstance(self, CacheGroups) else [FULL]
        self.num_loaded_blocks = self.num_loaded_tokens = 0
        self._begin_storing()
        self._step_bytes = 0  # bytes that the step being scheduled loads
        self._held_back: set[Sequence] = set()  # their loads go on in the next step
        self._declined: set[Sequence] = set()  # sequences that compute faster than they load
        self._has_waited = False  # True once this step has waited for files
        self.at_steps.append(self.begin_step)
        for group, pool in enumerate(self.pools):
            if self.books.block_bytes[group]:
                pool.on_idle = partial(self._on_idle, group)

    def forget(self, sequence: Sequence) -> None:
        num_blocks = len(sequence.token_ids) // self.block_size
        path = self._path(self.root_of(sequence.cache_salt), sequence, 0, num_blocks)
        super().forget(sequence)
        for node in path[:1]:
            self.books.distrust(node)

    def reset_prefix_cache(self) -> None:
        super().reset_prefix_cache()
        self._nodes.clear()
        for queue in (*self.queues, *self._passed):
            queue.clear()
        self._storing.clear()
        self._stored_in.clear()
        self._loads.clear()
        self.copies = [copy for copy in self.copies if copy.source >= 0 <= copy.destination]
        self.books.clear()
        self.root_seed += ":reset"  # files name their model, which may have changed
        if self.reads is not None:
            self.reads.detach()

    def forget_blocks(self) -> None:
        """Make all blocks of the KV cache unfindable, while no sequence has any; the tiers keep their content."""
        for key in list(self._loads):
            self._unpin_load(*key)
        never = -1  # copies that no batch has taken are withdrawn like those of a failed step
        self._stored_in[never] = self._take_storing()
        self.withdraw(never)
        self.copies = [copy for copy in self.copies if copy.source >= 0 <= copy.destination]
        for pool in self.pools:
            for block in range(pool.num_blocks):
                pool.forget_block(block)

    # --------------------------------------------------------------------------------------------- hits and loads

    def want(self, sequence: Sequence) -> None:
        super().want(sequence)
        self._declined.discard(sequence)
        if self.reads is not None and self.enable_prefix_caching:
            self.reads.refresh()
            path = self._path(
                self.root_of(sequence.cache_salt), sequence, 0, sequence.num_findable_blocks(self.block_size)
            )
            self._begin_reading(sequence, path)

    def _begin_reading(self, sequence: Sequence, path: list[StoredBlock]) -> None:
        """Read blocks of the path from files into host memory, unless computing them is faster."""
        assert self.reads is not None
        length = self._reach(path, 0, with_files=True)
        if length <= (known := self._reach(path, 0)):
            return
        lacking = [
            (path[index], group)
            for index in range(length)
            for group in self.numbers
            if self._needs(group, index, 0, length) and not self._has(group, path[index])
        ]
        needed = Counter(group for _, group in lacking)
        if self.kinds != [FULL] and any(count > self.books.max_slots(group) for group, count in needed.items()):
            return  # a hit needs all windows, chunks and states
        num_bytes = sum(self.books.block_bytes[group] for _, group in lacking)
        decision = self.costs.decide(
            self.reads.medium, num_bytes, known * self.block_size, (length - known) * self.block_size
        )
        self.costs.count(decision)
        if decision.loads:
            self.reads.begin(sequence, lacking, decision.compute_seconds)

    def lookup(self, sequence: Sequence) -> list[int]:
        if self.reads is not None and self.reads.is_waiting(sequence):
            may_block = not self._has_waited and len(self.free_blocks) == self.num_blocks - 1
            self._has_waited |= may_block
            self.reads.wait(sequence, may_block=may_block)
        hits = super().lookup(sequence)
        first = len(sequence.block_table)
        end = sequence.num_findable_blocks(self.block_size)
        if first + len(hits) >= end or sequence.num_computed_tokens % self.block_size or not self.books.roots:
            return hits
        # Known before the path is walked, since a request may wait for blocks over many steps.
        if sequence in self._declined or self._awaits_state(sequence) or not self._has_room(sequence, hits):
            return hits
        parent = self.parent_of(sequence, first) if self.enable_prefix_caching else None
        if parent is None:
            return hits
        before = self._node_before(parent)
        last = self._nodes[self.entry_of[hits[-1]].prefix_id] if hits else before  # type: ignore[union-attr]
        if sequence.block_tokens(first + len(hits), self.block_size) not in last.children:
            return hits
        path = self._path(before, sequence, first, end)
        length = self._reach(path, first)
        if length < len(path):
            self._prefix_ends(sequence, first + len(path))
        if length > len(hits) and self._load(sequence, hits, path[:length]):
            hits = super().lookup(sequence)
        return hits

    def _has(self, group: int, node: StoredBlock) -> bool:
        """Whether the block's content is in the KV cache or in host memory, if it has any."""
        if group in node.slots or not self.books.block_bytes[group]:
            return True
        return node.entry is not None and node.entry.prefix_id in self.pools[group].holders

    def _prefix_ends(self, sequence: Sequence, length: int) -> None:
        """A known prefix ends, and later requests may go on differently from there."""

    def _awaits_state(self, sequence: Sequence) -> bool:
        """Whether the step being scheduled writes a state from which the sequence goes on."""
        return False

    def _reach(self, path: AnySequence[StoredBlock], first: int, *, with_files: bool = False) -> int:
        """Length of the longest hit on the path, which begins with block `first`, over all cache groups."""
        length = len(path)
        agreed = -1
        while agreed != length:
            agreed = length
            for group, kind in enumerate(self.kinds):

                def has(index: int, group: int = group) -> bool:
                    return self._has(group, path[index]) or (with_files and group in path[index].places)

                length = longest_run(kind, has, first, length, self.block_size)
        return length

    def _needs(self, group: int, index: int, first: int, length: int) -> bool:
        """Whether a hit of `length` blocks from block `first` on needs the block of this index in a group."""
        return index >= self.kinds[group].first_block((first + length) * self.block_size, self.block_size) - first

    def _load(self, sequence: Sequence, hits: list[int], path: list[StoredBlock]) -> bool:
        """Make a path findable: free blocks, filled by copies of the next batch; False if that cannot be now."""
        first = len(sequence.block_table)
        length = len(path)
        lacking: list[list[int]] = []
        held: list[list[int]] = []
        of_groups = [[index for index in range(length) if self._needs(g, index, first, length)] for g in self.numbers]
        for pool, needed in zip(self.pools, of_groups, strict=True):
            holders = [self._holder(pool, path[index]) for index in needed]
            lacking.append([index for index, block in zip(needed, holders, strict=True) if block == NULL_BLOCK])
            held.append([block for block in holders if block != NULL_BLOCK])
        num_bytes = sum(len(of) * size for of, size in zip(lacking, self.books.block_bytes, strict=True))
        num_tokens = (length - len(hits)) * self.block_size
        decision = self.costs.decide(HOST, num_bytes, (first + len(hits)) * self.block_size, num_tokens)
        if not decision.loads:
            self._declined.add(sequence)
            self.costs.count(decision)
            return False
        if not all(
            len(pool.free_blocks) - pool.num_free_among(blocks) >= len(new)
            for pool, blocks, new in zip(self.pools, held, lacking, strict=True)
        ):
            return False
        others_run = len(self.free_blocks) < self.num_blocks - 1  # others wait for this step
        if others_run and self._step_bytes and self._step_bytes + num_bytes > self.max_load_bytes():
            self._held_back.add(sequence)
            return False
        self._step_bytes += num_bytes
        for pool, blocks in zip(self.pools, held, strict=True):
            pool.pin(blocks)
        loaded = self._fill(sequence, path, lacking)
        for pool, blocks, new in zip(self.pools, held, loaded, strict=True):
            pool.unpin([*blocks, *new])
        for group, needed in enumerate(of_groups):
            self.books.use([path[index] for index in needed], group)
        self.costs.count(decision)
        self.num_loaded_tokens += num_tokens
        self.num_loaded_blocks += sum(map(len, loaded))
        return True

    def _has_room(self, sequence: Sequence, hits: list[int]) -> bool:
        """Whether the sequence can compute all its known tokens."""
        return self.has_free(self.num_blocks_lacking(sequence, sequence.num_known_tokens, hits))

    def _fill(self, sequence: Sequence, path: list[StoredBlock], lacking: list[list[int]]) -> list[list[int]]:
        """Blocks that each group lacks of a path, findable and with a copy each."""
        first = len(sequence.block_table)
        # All at once: an eviction may remove entries of the path that no block of the first group holds.
        loaded = [sorted(pool.pop_free(len(indices))) for pool, indices in zip(self.pools, lacking, strict=True)]
        at_index = [dict(zip(*pair, strict=True)) for pair in zip(lacking, loaded, strict=True)]
        parent = self.parent_of(sequence, first)
        last = None
        for index, node in enumerate(path):
            entry = None if parent is None else self._add(sequence, first + index, parent)
            if entry is None:  # another content has this hash
                if last is not None and last.prefix_id not in self.holders:
                    self._on_lost(last)
                break
            for group, pool in enumerate(self.pools):
                block = at_index[group].get(index)
                if block is not None:
                    pool.hold(block, entry)
                    if not self.books.block_bytes[group]:
                        continue
                    self._unpin_load(group, block)
                    self.books.count_use(node, is_found=True)
                    self.books.pin(group, node.slots[group])
                    self._loads[group, block] = Load(node.slots[group], node, entry)
                    self.copies.append(Copy(group, ~node.slots[group], block))
            parent = entry.prefix_id
            last = entry
        return loaded

    def claim(self, sequence: Sequence, blocks: Collection[int]) -> None:
        super().claim(sequence, blocks)
        self._count_hits(blocks)

    def _count_hits(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            entry = self.entry_of[block]
            if entry is not None:
                self._nodes[entry.prefix_id].num_hits += 1

    def cut(self, sequence: Sequence, start: int, end: int) -> int:
        return start if self._awaits_load(sequence) else end

    def _awaits_load(self, sequence: Sequence) -> bool:
        return sequence in self._held_back or (self.reads is not None and self.reads.is_waiting(sequence))

    def begin_step(self) -> None:
        self._step_bytes = 0
        self._has_waited = False
        self._held_back.clear()
        if self._declined:
            self._declined = {sequence for sequence in self._declined if not sequence.is_finished}
        if self.reads is not None:
            self.reads.collect()
        due = [(group, self._evicts_soon(group)) for group, queue in enumerate(self.queues) if queue]
        due = [(group, evicts) for group, evicts in due if evicts or self.stores_while_busy]
        stores_new = bool(due) and self.stores_new()
        for group, evicts in due:
            most = EVICTED_BYTES if evicts and self.stores_while_busy else STEP_BYTES
            self._queue(self.stores(group, most, stores_new=stores_new))

    # ------------------------------------------------------------------------------------------ outcome of steps

    def take_copies(self, step_id: int) -> tuple[Copy, ...]:
        kept: list[Copy] = []
        for copy in super().take_copies(step_id):
            if copy.source >= 0:
                kept.append(copy)
                continue
            key = copy.group, copy.destination
            load = self._loads.get(key)
            if load is None or load.slot != ~copy.source:
                continue
            self._unpin_load(*key)
            pool = self.pools[copy.group]
            if pool.entry_of[copy.destination] is load.entry:  # no longer true once it was evicted again
                kept.append(copy)
                self._uncommitted.setdefault(step_id, []).append((pool, copy.destination))
        for key in list(self._loads):  # another copy has the block
            self._unpin_load(*key)
        self._stored_in[step_id] = self._take_storing()
        return tuple(kept)


class TieredGroups(CacheGroups, TieredBlocks):
    """Cache groups with tiers."""

    def cut(self, sequence: Sequence, start: int, end: int) -> int:
        return start if self._awaits_load(sequence) else CacheGroups.cut(self, sequence, start, end)

    def _is_superseded(self, group: int, block: int, entry: PrefixEntry) -> bool:
        states = self.groups[group]
        return isinstance(states, StateBlocks) and states.is_superseded(block, entry)

    def _prefix_ends(self, sequence: Sequence, length: int) -> None:
        self._group_tables(sequence).junctions.add(length)

    def _awaits_state(self, sequence: Sequence) -> bool:
        return self._group_tables(sequence).awaits_state

    def claim(self, sequence: Sequence, blocks: Collection[int]) -> None:
        CacheGroups.claim(self, sequence, blocks)
        self._count_hits(blocks)
