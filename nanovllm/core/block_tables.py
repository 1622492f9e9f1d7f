"""Block tables of a sequence: one in each cache group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


class HasBlockTable(Protocol):
    """A sequence, or what stands for it in one of its groups."""

    block_table: list[int]


@dataclass(slots=True)
class GroupTable:
    """A sequence's block table in one more group; the null block stands where a block fell behind the window."""

    block_table: list[int] = field(default_factory=list)


@dataclass(slots=True)
class GroupTables:
    """What a sequence holds beyond the block table of the first group.

    further: a table for each group but the first.
    first_held: in each group, the first block that was not freed yet.
    junctions: lengths in blocks at which it met known prefixes that were not wholly in the cache.
    """

    further: list[GroupTable]
    first_held: list[int]
    junctions: set[int] = field(default_factory=set)
