"""Entries of the prefix index, and the interface of their observers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


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
