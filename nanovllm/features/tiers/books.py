"""State of a tier: prefixes by the tokens on their path, and the slots of host memory with their content. No torch.

Invariant: a slot is free, or belongs to one `StoredBlock` and group, or to a read in progress. A queued copy pins the
slot that it reads or writes: it is not free before its last pin has gone, even if its block is forgotten. A block in a
tier is found by its tokens and those of all blocks before it, never by a number that another process would assign anew.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from nanovllm import block_manager as block_hashes
from nanovllm.block_manager import PrefixEntry
from nanovllm.features.groups.state_kinds import StateKind

FIRST_SHARE = 0.2  # initial `found_share`
MIN_MEMORY = 256  # blocks by which that share is averaged, or all of the tier's


class StoredBlock:
    """A full block after a given prefix: a node in the tree of tokens.

    Attributes:
        parent: the block before; None for a root, which stands for a model and a cache salt.
        key: the int32 tokens as bytes; a root's hash.
        entry: its entry in the prefix index, while it is findable in the KV cache.
        slots: cache group -> slot of host memory that holds its content.
        places: cache group -> its place in a file; a place of 0 bytes for a group without content.
        num_hits: sequences that found it after it was computed.
        num_reads: reads of files in progress.
    """

    __slots__ = ("_hash", "children", "entry", "key", "num_hits", "num_reads", "parent", "places", "slots")

    def __init__(self, parent: StoredBlock | None, key: bytes) -> None:
        self.parent = parent
        self.key = key
        self.children: dict[bytes, StoredBlock] = {}
        self.entry: PrefixEntry | None = None
        self.slots: dict[int, int] = {}
        self.places: dict[int, Any] = {}
        self.num_hits = self.num_reads = 0
        self._hash = key if parent is None else b""

    @property
    def hash(self) -> bytes:
        """Hash of the chain up to here: its name in files."""
        chain: list[StoredBlock] = []
        node = self
        while not node._hash:
            assert node.parent is not None
            chain.append(node)
            node = node.parent
        for known, block in zip((node, *reversed(chain)), reversed(chain), strict=False):
            block._hash = block_hashes.digest(known._hash + block.key)
        return self._hash

    def child(self, tokens: bytes) -> StoredBlock:
        """The block that continues this one, new if need be."""
        found = self.children.get(tokens)
        if found is None:
            found = self.children[tokens] = StoredBlock(self, tokens)
        return found

    def below(self) -> Iterator[StoredBlock]:
        """This block and every longer prefix."""
        pending = [self]
        while pending:
            node = pending.pop()
            pending += node.children.values()
            yield node


class TierBooks:
    """The tree of tokens, and the slots of host memory: at most `max_bytes`, least recently used content first to go.

    Args:
        block_bytes: bytes of one block in each cache group; 0 where a block has no content but its tokens.
        shares: part of `max_bytes` that each cache group may take, so that none starves another; None: 1 for each.
    """

    def __init__(self, block_bytes: Sequence[int], max_bytes: int, shares: Sequence[float] | None = None) -> None:
        self.block_bytes = tuple(block_bytes)
        self.max_bytes = max_bytes
        self._shares = [1.0] * len(self.block_bytes) if shares is None else shares
        self.roots: dict[bytes, StoredBlock] = {}
        self.num_bytes = self.num_evictions = 0  # bytes of slots that exist, used or free
        self.found_share = FIRST_SHARE  # part of recently stored blocks that was found later
        self.generation = 0  # number of `clear` calls: a read that began before one is void
        self.on_change: Callable[[StoredBlock, int, bool], None] | None = None  # (block, group, is stored)
        self._num_slots = [0] * len(self.block_bytes)
        self._free: list[list[int]] = [[] for _ in self.block_bytes]
        self._used: list[OrderedDict[StoredBlock, None]] = [OrderedDict() for _ in self.block_bytes]
        self._pins: Counter[tuple[int, int]] = Counter()  # pins of each (group, slot)
        self._forgotten: set[tuple[int, int]] = set()  # slots without a block that wait for their last unpin

    @property
    def num_stored(self) -> int:
        """Blocks in host memory, one for each cache group."""
        return sum(map(len, self._used))

    @property
    def used_bytes(self) -> int:
        return sum(len(used) * size for used, size in zip(self._used, self.block_bytes, strict=True))

    def root(self, key: bytes) -> StoredBlock:
        if key not in self.roots:
            self.roots[key] = StoredBlock(None, key)
        return self.roots[key]

    def path(self, node: StoredBlock, blocks: Iterable[bytes]) -> list[StoredBlock]:
        """Known blocks that continue `node` with these tokens, up to the first that is not known."""
        found: list[StoredBlock] = []
        for tokens in blocks:
            child = node.children.get(tokens)
            if child is None:
                break
            found.append(child)
            node = child
        return found

    # ------------------------------------------------------------------------------------------------------- slots

    def max_slots(self, group: int) -> float:
        """Most slots that the group may have."""
        size = self.block_bytes[group]
        return self._shares[group] * self.max_bytes // size if size else math.inf

    def take_slot(self, group: int) -> int | None:
        """A slot of no content, perhaps of the least recently used; None if all slots are pinned or read into."""
        if not self._free[group]:
            size = self.block_bytes[group]
            of_group = size * (self._num_slots[group] + 1)
            if self.num_bytes + size <= self.max_bytes and of_group <= self._shares[group] * self.max_bytes:
                self.num_bytes += size
                self._num_slots[group] += 1
                return self._num_slots[group] - 1
            victim = next((node for node in self._used[group] if not self.is_pinned(group, node.slots[group])), None)
            if victim is None:
                return None
            self.num_evictions += 1
            self.count_use(victim, is_found=False)
            self.drop(victim, group)
        return self._free[group].pop()

    def free_slot(self, group: int, slot: int) -> None:
        """Give back a slot of `take_slot` that was not filled."""
        self._free[group].append(slot)

    def hold(self, node: StoredBlock, group: int, slot: int) -> None:
        """The slot has, or will have before anyone reads it, the content of a block: a hit from now on."""
        node.slots[group] = slot
        self._used[group][node] = None
        if self.on_change is not None:
            self.on_change(node, group, True)

    def use(self, nodes: Sequence[StoredBlock], group: int) -> None:
        """Mark blocks of a chain as used now, the tail first, so that the head is evicted last."""
        for node in reversed(nodes):
            if group in node.slots:
                self._used[group].move_to_end(node)

    def count_use(self, node: StoredBlock, *, is_found: bool) -> None:
        """Update `found_share` when a block without hits is found in the tier, or leaves it unfound."""
        if node.num_hits == 0:
            self.found_share += (is_found - self.found_share) / max(MIN_MEMORY, sum(self._num_slots))

    def pin(self, group: int, slot: int) -> None:
        """Keep a slot for a copy that is not executed yet."""
        self._pins[group, slot] += 1

    def is_pinned(self, group: int, slot: int) -> bool:
        return (group, slot) in self._pins

    def unpin(self, group: int, slot: int) -> None:
        self._pins[group, slot] -= 1
        if not self._pins[group, slot]:
            del self._pins[group, slot]
            if (group, slot) in self._forgotten:
                self._forgotten.remove((group, slot))
                self._free[group].append(slot)

    def drop(self, node: StoredBlock, group: int) -> None:
        """Forget a block's content in host memory, if it is there."""
        slot = node.slots.pop(group, None)
        if slot is not None:
            del self._used[group][node]
            if self.is_pinned(group, slot):
                self._forgotten.add((group, slot))
            else:
                self._free[group].append(slot)
            if self.on_change is not None:
                self.on_change(node, group, False)
        self.prune(node)

    def prune(self, node: StoredBlock) -> None:
        """Remove a block without content and entry from the tree, and those before it that it kept there."""
        current: StoredBlock | None = node
        while current is not None and current.parent is not None:
            if current.children or current.slots or current.places or current.entry or current.num_reads:
                return
            current.parent.children.pop(current.key, None)
            current = current.parent
        if current is not None and not current.children:
            self.roots.pop(current.key, None)

    def distrust(self, node: StoredBlock) -> None:
        """Forget the content of a block and of every longer prefix, in memory and in files."""
        for block in [*node.below()][::-1]:
            block.places.clear()
            for group in list(block.slots):
                self.drop(block, group)
            self.prune(block)

    def clear(self) -> None:
        """Forget everything: KV computed from now on is of another model, or not to be mixed with the former.

        The caller has dropped the copies that pinned slots.
        """
        for group, used in enumerate(self._used):
            for node in list(used):
                self._free[group].append(node.slots.pop(group))
                if self.on_change is not None:
                    self.on_change(node, group, False)
            used.clear()
        for group, slot in self._forgotten:
            self._free[group].append(slot)
        self._forgotten.clear()
        self.roots.clear()
        self._pins.clear()
        self.generation += 1

    def check(self) -> None:
        """Verify the invariant, except for reads in progress; raises RuntimeError. A diagnostic."""
        for group, used in enumerate(self._used):
            forgotten = [slot for of_group, slot in self._forgotten if of_group == group]
            slots = [*self._free[group], *forgotten, *(node.slots[group] for node in used)]
            if len(set(slots)) != len(slots) or not set(slots) <= set(range(self._num_slots[group])):
                raise RuntimeError(f"tier: a slot of group {group} has two owners")
        sizes = [count * size for count, size in zip(self._num_slots, self.block_bytes, strict=True)]
        if sum(sizes) != self.num_bytes or self.num_bytes > self.max_bytes:
            raise RuntimeError(f"tier: {self.num_bytes} bytes of slots, {sum(sizes)} counted, {self.max_bytes} allowed")
        for root in self.roots.values():
            for node in root.below():
                if node.parent is not None and node.parent.children.get(node.key) is not node:
                    raise RuntimeError("tier: a block is not in the tree")


def longest_run(kind: StateKind, has: Callable[[int], bool], first: int, end: int, block_size: int) -> int:
    """Length of the longest hit in blocks first..first+end-1 of a sequence, of a group that `has` some of them."""
    if kind.is_full:
        return next((index for index in range(end) if not has(index)), end)
    index = end
    while index > 0:
        needed = max(0, kind.first_block((first + end) * block_size, block_size) - first)
        while index > needed and has(index - 1):
            index -= 1
        if index <= needed:
            return end
        end = index = index - 1
    return 0
