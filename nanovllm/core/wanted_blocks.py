"""How many waiting sequences want each block: where they will go on, and which contents are evicted last."""

from __future__ import annotations

from collections.abc import Sequence as AnySequence

from nanovllm.core.sequence import Sequence


class WantedBlocks(dict[bytes, int]):
    """Block hash -> number of waiting sequences that may find the block; O(1) per block as they join and leave."""

    def __init__(self) -> None:
        super().__init__()
        self._hashes: dict[Sequence, AnySequence[bytes]] = {}

    def add(self, sequence: Sequence, hashes: AnySequence[bytes]) -> None:
        """Count a sequence that waits from now on; `hashes` are those of its first blocks."""
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
