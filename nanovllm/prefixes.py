"""Prefixes of sequences: the hash chain of blocks, entries of the index, and blocks that waiting sequences want."""

from __future__ import annotations

from collections.abc import Sequence as AnySequence
from dataclasses import dataclass
from typing import Protocol

import xxhash

from nanovllm.sequence import Sequence


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


digest = xxhash.xxh3_128_digest
HASH_BYTES = 16


def root_hash(hash_seed: str, cache_salt: str) -> bytes:
    """The parent of every first block. `hash_seed` names all that KV depends on besides tokens, such as the model."""
    return digest(f"{len(hash_seed)}:{hash_seed}{cache_salt}".encode("utf-8", "surrogatepass"))


@dataclass(slots=True)
class PrefixEntry:
    """A findable content: a block's tokens after a given prefix.

    `parent` is the prefix id of the block before, or the request's cache salt for a first block (a string, so that it
    equals no prefix id).
    """

    prefix_id: int
    block_hash: bytes
    parent: int | str
    tokens: bytes


class BlockObserver(Protocol):
    """Follows which contents are findable. One that several blocks hold is forgotten with the last of them."""

    def findable(self, entry: PrefixEntry, parent_hash: bytes | None) -> None:
        """A content became findable; `parent_hash` is the hash of the block before, None for a first block."""

    def forgotten(self, block_hash: bytes) -> None:
        """A content is no longer findable: evicted, withdrawn, or not to be trusted."""

    def all_forgotten(self) -> None:
        """Nothing is findable any longer."""
