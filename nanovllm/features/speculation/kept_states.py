"""Recurrent states of sequences with drafts: a state cannot be cut back, so a copy from before the step is kept.

::

    before the step    state --copy--> kept slot        by the step's `copies`, before its forward pass
    the step             | overwritten in place by its rows
    all accepted       state after the drafts           it stands, and the kept slot is freed
    a rejection        kept slot, in the table again    accepted rows and the new token are left to compute

The next step computes these rows again, as a chunk: the model itself then brings the state to the accepted end.
"""

from __future__ import annotations

from nanovllm.batch import Copy
from nanovllm.block_manager import BlockManager
from nanovllm.features.groups.state_blocks import StateBlocks
from nanovllm.sequence import Sequence

SPARE_SLOTS = 1  # slots that stay free, so that drafts delay no other sequence


class KeptStates:
    """The kept slot of each sequence in the step with drafts, the only one in flight, until it is read or undone.

    Args:
        number: index of the cache group of states.
    """

    def __init__(self, manager: BlockManager, group: StateBlocks, number: int) -> None:
        self._manager = manager
        self._group = group
        self._number = number
        self._kept: dict[Sequence, int] = {}

    @classmethod
    def of_manager(cls, manager: BlockManager) -> KeptStates | None:
        """The kept states of a manager; None for a manager without states."""
        groups = list(enumerate(getattr(manager, "groups", ())))  # `CacheGroups` has states as its last group
        number, group = groups[-1] if groups else (0, None)
        return cls(manager, group, number) if isinstance(group, StateBlocks) else None

    def num_left(self, num_known: int) -> int:
        """Positions from `num_known` on in the block of the last known token: a state is kept at ends of blocks."""
        return -num_known % self._group.block_size

    def keep(self, sequence: Sequence) -> bool:
        """Keep the state before the step being scheduled, once the sequence is placed; False without free slots."""
        if (len(sequence.token_ids) - 1) % self._group.block_size == 0:
            return True  # the step begins a block, so it writes to another slot than it reads
        if self._group.pool.num_free_blocks <= SPARE_SLOTS:
            return False
        slot = self._kept[sequence] = self._group.keep()
        self._manager.copies.append(Copy(self._number, self._table(sequence)[-1], slot))
        return True

    def put_back(self, sequence: Sequence, start: int) -> int:
        """Return to the state before the step, which began at position `start`; returns the computed tokens."""
        if (slot := self._kept.pop(sequence, None)) is None:
            return self._manager.rewindable(sequence, start)
        self._group.put_back(self._table(sequence), slot)
        return start

    def free_kept(self) -> None:
        """Free the slots that were not put back."""
        while self._kept:
            self._group.free_kept(self._kept.popitem()[1])

    def _table(self, sequence: Sequence) -> list[int]:
        assert sequence.group_tables is not None
        return sequence.group_tables.further[self._number - 1]
