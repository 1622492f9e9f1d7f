"""Recurrent states of the mock model: each slot holds the hash of the prefix after which it was written."""

from __future__ import annotations

from dataclasses import dataclass, field
from zlib import crc32

from nanovllm.batch import NULL_BLOCK, ScheduledBatch, ScheduledSequence
from nanovllm.block_manager import BlockManager, BlockPool, PrefixEntry
from nanovllm.sequence import Sequence

UNWRITTEN = None  # a slot that no successful step has written


def check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def empty_prefix(cache_salt: str) -> int:
    return crc32(cache_salt.encode()) + 1


def extend_prefix(prefix: int, token_id: int) -> int:
    """The hash of a prefix that is one token longer (the finaliser of splitmix64, Steele et al. 2014)."""
    mixed = (prefix * 0x9E3779B97F4A7C15 + token_id + 1) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return mixed ^ (mixed >> 31)


@dataclass(eq=False)
class Poison:
    """The KV of a position, or the state, where the model turned non-finite."""

    group: int
    block: int
    is_known: bool = False  # the scheduler knows of it
    holders: set[Sequence] = field(default_factory=set)  # sequences that held the block at that time

    def may_be_read_by(self, sequence: Sequence) -> bool:
        """Whether a request found it before it was reported, or began as the fork of one that did."""
        return not self.is_known or any(sample in self.holders for sample in (sequence, *sequence.samples))


class MockStates:
    """The records of one cache group. A step reads all of its states before it writes any."""

    def __init__(self, number: int, pool: BlockPool, block_size: int) -> None:
        self.number = number
        self._pool = pool
        self._block_size = block_size
        self.slots: list[int | Poison | None] = [UNWRITTEN] * pool.num_blocks
        self._reads: dict[Sequence, int] = {}  # sequence -> slot that the running step reads
        self._written: dict[int, dict[Sequence, int]] = {}  # step id -> sequence -> slot
        self._prefixes: dict[int | str, int] = {}  # prefix id -> hash of the prefix

    def read(self, entry: ScheduledSequence, table: list[int], prefixes: list[int]) -> bool:
        """Check the state that an entry reads; returns whether it is poisoned."""
        sequence = entry.sequence
        self._reads.pop(sequence, None)
        if entry.start == 0:
            return False
        slot = self._reads[sequence] = table[(entry.start - 1) // self._block_size]
        content = self.slots[slot]
        check(slot != NULL_BLOCK, f"{sequence} has no state after {entry.start} tokens")
        if isinstance(content, Poison):
            check(
                content.may_be_read_by(entry.sequence),
                f"{sequence} found state {slot}, whose owner had turned non-finite",
            )
            return True
        kind = "another" if content else "none"
        check(content == prefixes[entry.start - 1], f"{sequence} reads {kind} for its state after {entry.start} tokens")
        return False

    def write(self, batch: ScheduledBatch, entry: ScheduledSequence, table: list[int], state: int | Poison) -> int:
        """Write the state after an entry; returns its slot."""
        sequence = entry.sequence
        end = entry.start + entry.num_new_tokens
        slot = table[(end - 1) // self._block_size]
        written = self._written.setdefault(batch.step_id, {})
        check(slot != NULL_BLOCK, f"{sequence} has no slot for its state after {end} tokens")
        check(slot not in written.values(), f"state {slot} is written twice in a step")
        readers = {e.sequence for e in batch.entries if self._reads.get(e.sequence) == slot}
        check(readers <= {sequence}, f"{sequence} writes state {slot}, which {readers} read")
        is_in_place = self._reads.get(sequence) == slot
        check(is_in_place == bool(entry.start % self._block_size), f"{sequence} overwrites a state at a boundary")
        written[sequence] = slot
        self.slots[slot] = state
        return slot

    def fail(self, batch: ScheduledBatch) -> None:
        """The slots that a failed batch wrote are undefined."""
        for slot in self._written.pop(batch.step_id).values():
            self.slots[slot] = UNWRITTEN

    def check_findable(self, manager: BlockManager) -> None:
        """Check that each findable state is that after the tokens of its prefix, or that the next batch loads it."""
        by_id = {entry.prefix_id: entry for entry in manager.entries.values()}
        loaded = {copy.destination for copy in manager.copies if copy.group == self.number}
        for prefix_id, blocks in self._pool.holders.items():
            for block in blocks.keys() - loaded:
                content = self.slots[block]
                is_right = isinstance(content, Poison) or content == self._prefix_of(by_id[prefix_id], by_id)
                check(is_right, f"findable state {block} of group {self.number} is not that of its prefix")

    def _prefix_of(self, entry: PrefixEntry, by_id: dict[int, PrefixEntry]) -> int:
        if entry.prefix_id not in self._prefixes:
            parent = entry.parent
            prefix = empty_prefix(parent) if isinstance(parent, str) else self._prefix_of(by_id[parent], by_id)
            for token_id in memoryview(entry.tokens).cast("i"):
                prefix = extend_prefix(prefix, token_id)
            self._prefixes[entry.prefix_id] = prefix
        return self._prefixes[entry.prefix_id]


class MockBlocks:
    """Blocks of K and V, and records, by cache group."""

    block_size: int
    slots: dict[int, list[int | Poison | None]]  # group of K and V -> its slots
    states: list[MockStates]

    def block(self, group: int, block: int) -> list[int | Poison | None]:
        """The content of a block, or of a record."""
        slots = self._slots_of(group)
        size = self.size_of(group)
        return slots[block * size : (block + 1) * size]

    def set_block(self, group: int, block: int, content: list[int | Poison | None]) -> None:
        slots = self._slots_of(group)
        size = self.size_of(group)
        slots[block * size : (block + 1) * size] = content

    def size_of(self, group: int) -> int:
        """Slots of a block."""
        return self.block_size if group in self.slots else 1

    def _slots_of(self, group: int) -> list[int | Poison | None]:
        if group in self.slots:
            return self.slots[group]
        return next(states.slots for states in self.states if states.number == group)
