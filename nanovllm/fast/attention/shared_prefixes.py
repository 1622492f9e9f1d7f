"""Groups of a step's decodes with a common prefix of blocks, which is read once a group.

::

    tables   a b c d | e        bundle 0   rows 0, 1, 3   blocks a b c d        each decode reads its other blocks,
             a b c d | f g               (members a bundle are limited)         row 2 all of them
             x y z
             a b c d | h

Members of a wide group fill the tiles of tensor cores: its bundles are programs of another kernel, with many more
members. Only graphs of such steps contain that kernel, so both ways to launch the step are planned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm.layout import BatchLayout

MIN_MEMBERS = 2
# Bytes read in the time of a merge, estimated for an H200: without groups, shared blocks come from the L2 cache at some
# 8 TB/s, and merging takes 2 µs and 16 ns a member.
_MEMBER_BYTES = 128e3
_STEP_BYTES = 16e6
WIDE_TOKENS = 4096  # fewest that make a group wide: shorter prefixes take a fraction of the step
# Fewest decodes times common tokens. On an H100 with 2 query heads a KV head 256 decodes of 16,384 tokens take 0.32 of
# a layer's time in bundles, 64 of 4,096 take 1.24.
WIDE_READS = 2**20
PIECES_PER_DECODE = 4  # most wide pieces of a step, for which packed steps have room
MAX_LEVELS = 8  # depth of prefixes within prefixes; deeper ones are not looked for


class SharingRule(NamedTuple):
    """The rule for when reading together pays.

    bundle_members: decodes that one program reads for.
    max_bundles: most bundles in a step.
    member_tokens, step_tokens: cost of merging for each member, and once a step, in tokens read.
    wide_members: decodes that one wide program reads for; 0 without wide programs.
    wide_pieces: most pieces of wide programs in a step, apart from one more for each program.
    least_wide, wide_tokens, wide_reads: fewest decodes and common tokens of a wide group, and of their product.
    """

    bundle_members: int
    max_bundles: int
    member_tokens: float
    step_tokens: float
    wide_members: int = 0
    wide_pieces: int = 0
    least_wide: int = 0
    wide_tokens: int = WIDE_TOKENS
    wide_reads: int = 0

    @classmethod
    def for_kernel(cls, kernel: Any, token_bytes: int) -> SharingRule:
        """The rule for a kernel; token_bytes: bytes of a token's K and V in one layer."""
        costs = _MEMBER_BYTES / token_bytes, _STEP_BYTES / token_bytes
        wide = kernel.wide_members, kernel.wide_pieces, kernel.least_wide, WIDE_TOKENS, WIDE_READS
        return cls(kernel.bundle_members, 0, *costs, *wide)


class Group(NamedTuple):
    """Decodes with the same first `num_blocks` blocks in their tables; `rows` are their indices among the decodes."""

    rows: list[int]
    num_blocks: int
    gain: float  # tokens saved from reading


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """The groups of a step, cut into bundles.

    shared: [num_decodes] int32, blocks that each decode's bundle reads for it; 0 for those in none.
    members: [num_members] int32, decodes, bundle by bundle.
    bundles: [num_bundles, 3] int32, index of the first member, number of members, number of blocks.
    wide_parts: [num_decodes] int32, pieces that wide programs compute for each decode.
    wide_pieces: [num_pieces, 5] int32, index of the first member, number of members, first block, end, index among the
        pieces of these members.
    wide: the same step with wide programs; None without wide groups.
    """

    shared: NDArray[np.int32]
    members: NDArray[np.int32]
    bundles: NDArray[np.int32]
    wide_parts: NDArray[np.int32] | None = None
    wide_pieces: NDArray[np.int32] | None = None
    wide: SharedPrefixes | None = None

    @classmethod
    def from_layout(cls, layout: BatchLayout, block_size: int, rule: SharingRule) -> SharedPrefixes | None:
        """The groups of a step's decodes; None where no decodes share enough."""
        tables = [entry.block_table for entry in layout.decodes]
        if len(tables) - len({table[0] for table in tables}) < MIN_MEMBERS - 1:
            return None
        # The block of a decode's new token is never shared.
        limits = (layout.positions[: len(tables)] // block_size).tolist()
        cut = [table[:limit] for table, limit in zip(tables, limits, strict=True)]
        grouping = _Grouping(cut, block_size, rule)
        found = grouping.groups()
        groups = grouping.chosen(found)
        prefixes = cls._from_groups(groups, len(tables), rule) if groups else None
        wide_groups = [group for group in found if grouping.is_wide(group)]
        if wide_groups:
            others = grouping.chosen([group for group in found if not grouping.is_wide(group)])
            wide = cls._with_wide(others, wide_groups, len(tables), rule)
            prefixes = replace(prefixes or cls._from_groups([], len(tables), rule), wide=wide)
        return prefixes

    @classmethod
    def _from_groups(cls, groups: list[Group], num_decodes: int, rule: SharingRule) -> SharedPrefixes:
        shared = np.zeros(num_decodes, np.int32)
        members: list[int] = []
        bundles: list[tuple[int, int, int]] = []
        for rows, num_blocks, _ in groups:
            shared[rows] = num_blocks
            bundles += _even_parts(len(members), rows, num_blocks, rule.bundle_members)
            members += rows
        return cls(shared, np.array(members, np.int32), np.array(bundles, np.int32).reshape(-1, 3))

    @classmethod
    def _with_wide(
        cls, groups: list[Group], wide_groups: list[Group], num_decodes: int, rule: SharingRule
    ) -> SharedPrefixes:
        """Bundles of some groups and wide programs of others, with prefixes cut into nearly equal pieces."""
        narrow = cls._from_groups(groups, num_decodes, rule)
        members = narrow.members.tolist()
        parts = np.zeros(num_decodes, np.int32)
        programs: list[tuple[int, int, int]] = []
        for rows, num_blocks, _ in wide_groups:
            narrow.shared[rows] = num_blocks
            programs += _even_parts(len(members), rows, num_blocks, rule.wide_members)
            members += rows
        # Each program has one piece more than its share at most.
        most = min(rule.wide_pieces, PIECES_PER_DECODE * num_decodes - len(programs))
        length = -(-sum(num_blocks for _, _, num_blocks in programs) // most)
        pieces: list[tuple[int, int, int, int, int]] = []
        for first, count, num_blocks in programs:
            num_parts = -(-num_blocks // length)
            parts[members[first : first + count]] = num_parts
            ends = [num_blocks * number // num_parts for number in range(num_parts + 1)]
            pieces += [(first, count, end, after, part) for part, (end, after) in enumerate(pairwise(ends))]
        # Programs that run at the same time read the same blocks.
        pieces.sort(key=lambda piece: piece[2])
        return cls(narrow.shared, np.array(members, np.int32), narrow.bundles, parts, np.array(pieces, np.int32))


class _Grouping:
    """Chooses groups in the tree of common beginnings: each decode joins one, at the depth that saves most."""

    def __init__(self, tables: list[list[int]], block_size: int, rule: SharingRule) -> None:
        self._tables = tables
        self._block_size = block_size
        self._rule = rule

    def groups(self) -> list[Group]:
        """All groups, those with the largest gain a bundle first."""
        rows = [row for row, table in enumerate(self._tables) if table]
        found = [group for branch in self._branches(rows, 0) for group in self._best(branch, 0, MAX_LEVELS)]
        return sorted(found, key=lambda group: -group.gain / self._num_bundles(len(group.rows)))

    def is_wide(self, group: Group) -> bool:
        """Whether wide programs read for the group."""
        rule = self._rule
        count = len(group.rows)
        num_tokens = group.num_blocks * self._block_size
        is_large = num_tokens >= rule.wide_tokens and count * num_tokens >= rule.wide_reads
        return rule.wide_members > 0 and is_large and count >= rule.least_wide

    def chosen(self, found: list[Group]) -> list[Group]:
        """The first groups, up to `max_bundles`; none if they save less than merging takes."""
        chosen = []
        left = self._rule.max_bundles
        for group in found:
            num_bundles = self._num_bundles(len(group.rows))
            if num_bundles <= left:
                chosen.append(group)
                left -= num_bundles
        return chosen if sum(group.gain for group in chosen) > self._rule.step_tokens else []

    def _branches(self, rows: list[int], depth: int) -> Iterator[list[int]]:
        """Groups of rows with the same block at this depth, if large enough."""
        by_block: dict[int, list[int]] = {}
        for row in rows:
            if depth < len(self._tables[row]):
                by_block.setdefault(self._tables[row][depth], []).append(row)
        return (branch for branch in by_block.values() if len(branch) >= MIN_MEMBERS)

    def _best(self, rows: list[int], depth: int, num_levels: int) -> list[Group]:
        """The groups of rows that share `depth` blocks or more."""
        tables = [self._tables[row] for row in rows]
        depth = _common(min(tables), max(tables), depth)  # the first and the last in order differ first
        chosen: list[Group] = []
        rest = self._group(rows, depth)
        for branch in self._branches(rows, depth) if num_levels > 1 else ():
            deeper = self._best(branch, depth, num_levels - 1)
            covered = {row for group in deeper for row in group.rows}
            without = self._group([row for row in rest.rows if row not in covered], depth)
            if sum(group.gain for group in deeper) + max(0.0, without.gain) > max(0.0, rest.gain):
                chosen += deeper
                rest = without
        return [*chosen, rest] if rest.gain > 0 else chosen

    def _group(self, rows: list[int], num_blocks: int) -> Group:
        rule = self._rule
        count = len(rows)
        num_tokens = num_blocks * self._block_size * (count - self._num_bundles(count))
        return Group(rows, num_blocks, num_tokens - rule.member_tokens * count)

    def _num_bundles(self, count: int) -> int:
        return -(-count // self._rule.bundle_members)


def _even_parts(first: int, rows: list[int], num_blocks: int, most: int) -> list[tuple[int, int, int]]:
    """Bundles of up to `most` members of a group; `first`: index of its first member."""
    count = -(-len(rows) // most)
    ends = [len(rows) * number // count for number in range(count + 1)]
    return [(first + end, after - end, num_blocks) for end, after in pairwise(ends)]


def _common(one: list[int], other: list[int], start: int) -> int:
    """Length of the common prefix of two tables; the first `start` blocks are known to be equal."""
    end = min(len(one), len(other))
    return next((index for index in range(start, end) if one[index] != other[index]), end)
