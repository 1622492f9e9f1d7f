"""Which decodes of a step read blocks together: in plain arithmetic, against every other choice there is."""

import functools
import itertools
import random

import numpy as np
import pytest

from nanovllm.fast.attention.shared_prefixes import PIECES_PER_DECODE, SharedPrefixes, SharingRule
from nanovllm.fast.attention.step_tables import BUNDLE_NUMBERS, WIDE_NUMBERS
from nanovllm.fast.attention.tiles import Tiles
from nanovllm.features.costs.buckets import GraphShape
from nanovllm.layout import build_layout
from tests.support.gpu_steps import packing_of
from tests.support.shared_decodes import decode_entries, random_tables, wide_group_and_others

BLOCK_SIZE = 16


def prefixes_of(tables, contexts, rule):
    layout = build_layout(decode_entries(tables, contexts), BLOCK_SIZE, longest_first=True)
    return layout, SharedPrefixes.from_layout(layout, BLOCK_SIZE, rule)


def num_common(tables):
    shortest = min(map(len, tables))
    return next((i for i in range(shortest) if len({table[i] for table in tables}) > 1), shortest)


def gain(tables, rule):
    """Tokens that a group saves; the tables end before each decode's own block."""
    bundles = -(-len(tables) // rule.bundle_members)
    saved = num_common(tables) * BLOCK_SIZE * (len(tables) - bundles)
    return saved - rule.member_tokens * len(tables)


def best_gain(tables, rule):
    """Over every way to put decodes into groups."""

    @functools.cache
    def best(rows):
        if not rows:
            return 0.0
        first, others = rows[0], rows[1:]
        found = best(others)  # reads by itself
        for chosen in range(1, 2 ** len(others)):
            group = [first, *(row for bit, row in enumerate(others) if chosen >> bit & 1)]
            own = gain([tables[row] for row in group], rule)
            if own > 0:
                found = max(found, own + best(tuple(row for row in others if row not in group)))
        return found

    return best(tuple(range(len(tables))))


def gains(layout, prefixes, rule):
    """Check what holds of all groups; returns what each of them saves."""
    cut = [e.block_table[: e.start // BLOCK_SIZE] for e in layout.decodes]
    if prefixes is None:
        return cut, []
    assert len(prefixes.bundles) <= rule.max_bundles
    members = prefixes.members.tolist()
    assert len(set(members)) == len(members) <= len(cut)
    groups = {}
    end = 0
    for first, count, num_blocks in prefixes.bundles.tolist():
        assert first == end and 1 <= count <= rule.bundle_members and num_blocks > 0
        end += count
        own = members[first:end]
        assert prefixes.shared[own].tolist() == [num_blocks] * count
        groups.setdefault(tuple(cut[own[0]][:num_blocks]), []).extend(own)
    assert end == len(members) and (prefixes.shared > 0).sum() == len(members)
    for blocks, rows in groups.items():
        assert all(tuple(cut[row][: len(blocks)]) == blocks for row in rows)
    return cut, [gain([cut[row] for row in rows], rule) for rows in groups.values()]


def test_random_groups_share_what_they_read_and_save_nearly_as_much_as_can_be_saved():
    total = most = 0.0
    num_shared = 0
    for seed in range(150):
        choice = random.Random(seed)
        tables, contexts = random_tables(choice, choice.randint(2, 7), BLOCK_SIZE)
        rule = SharingRule(choice.choice([2, 3, 16]), 100, choice.choice([0.0, 4.0, 20.0]), choice.choice([0.0, 40.0]))
        layout, prefixes = prefixes_of(tables, contexts, rule)
        cut, found = gains(layout, prefixes, rule)
        best = best_gain(cut, rule)
        assert all(each > 0 for each in found) and sum(found) <= best
        assert not found or sum(found) > rule.step_tokens
        if best > 1.2 * rule.step_tokens:
            assert found, (seed, best)
        elif not found:
            continue
        total, most, num_shared = total + sum(found), most + best, num_shared + bool(found)
    assert num_shared > 40 and total > 0.95 * most, (num_shared, total, most)


def test_many_decodes_keep_to_the_number_of_bundles_and_take_the_best_groups():
    for seed in range(30):
        choice = random.Random(seed)
        tables, contexts = random_tables(choice, 200, BLOCK_SIZE)
        all_of_them = SharingRule(4, 1000, 0.0, 0.0)
        sums = []
        for most in (1000, 20, 5):
            rule = all_of_them._replace(max_bundles=most)
            sums.append(sum(gains(*prefixes_of(tables, contexts, rule), rule)[1]))
        assert sums[0] >= sums[1] >= sums[2] > 0


SYSTEM, EXAMPLES = list(range(1, 21)), list(range(21, 31))


@pytest.mark.parametrize("tables, expected", [
    ([[*SYSTEM, 100 + n] for n in range(8)], [(8, 20)]),  # all share the system prompt
    ([[*SYSTEM, *(EXAMPLES if n < 2 else []), 100 + n] for n in range(8)], [(8, 20)]),  # two share more: not worth it
    ([[*SYSTEM, *(EXAMPLES if n < 7 else []), 100 + n] for n in range(8)], [(7, 30)]),  # nearly all share more
    ([[*(SYSTEM if n % 2 else EXAMPLES), 100 + n] for n in range(8)], [(4, 20), (4, 10)]),
    ([[100 + n, *SYSTEM] for n in range(8)], []),  # equal blocks behind others are another's prefix
])  # fmt: skip
def test_the_group_that_saves_most_is_chosen(tables, expected):
    rule = SharingRule(16, 100, 4.0, 100.0)
    _, prefixes = prefixes_of(tables, [16 * len(table) for table in tables], rule)
    bundles = [] if prefixes is None else prefixes.bundles[:, 1:].tolist()
    assert sorted(map(tuple, bundles)) == sorted(expected)


def test_a_decode_reads_the_block_of_its_own_token_by_itself():
    tables = [[1, 2, 3], [1, 2, 3]]  # as they are when one is the other's copy up to its last full block
    rule = SharingRule(16, 100, 0.0, 0.0)
    for context, expected in ((16 * 3, 2), (16 * 2 + 1, 2), (16 * 2, 1), (17, 1)):
        num_blocks = -(-context // 16)
        _, prefixes = prefixes_of([table[:num_blocks] for table in tables], [context] * 2, rule)
        assert prefixes.bundles.tolist() == [[0, 2, expected]]
    assert prefixes_of([[1], [1]], [16, 3], rule)[1] is None


def test_prefixes_within_prefixes_of_any_depth_are_no_recursion_of_that_depth():
    tables = [[*range(1, 1 + depth), 5000 + depth] for depth in range(1, 1500)]
    rule = SharingRule(16, 1000, 0.0, 0.0)
    layout, prefixes = prefixes_of(tables, [16 * len(table) for table in tables], rule)
    assert gains(layout, prefixes, rule)[1]


def test_a_packed_step_names_the_blocks_of_each_bundle():
    tables = [[*SYSTEM, 100 + n] for n in range(5)] + [[200]] + [[*EXAMPLES, 300 + n] for n in range(4)]
    rule = SharingRule(3, 100, 0.0, 0.0)
    layout, prefixes = prefixes_of(tables, [16 * len(table) for table in tables], rule)
    packing = packing_of(GraphShape(16, 16, 0), BLOCK_SIZE, 16)
    packed = np.full(packing.num_words_for(layout), 12345, np.int32)
    packing.pack(layout, Tiles.from_layout(layout, BLOCK_SIZE, prefixes), None, packed)
    step = packing.views(packed)
    bundles = step.shared_bundles.reshape(-1, BUNDLE_NUMBERS)
    assert len(bundles) == 8 and not bundles[4:].any() and not step.shared_blocks[10:].any()
    for first, count, num_blocks, start in bundles[:4].tolist():
        for row in step.members[first : first + count].tolist():
            assert step.shared_blocks[row] == num_blocks
            assert layout.decodes[row].block_table[:num_blocks] == step.tables[start : start + num_blocks].tolist()
    packing.pack(layout, Tiles.from_layout(layout, BLOCK_SIZE), None, packed)
    assert not step.shared_bundles.any() and not step.shared_blocks.any() and not step.members.any()


WIDE_RULE = SharingRule(8, 100, 0.0, 0.0, wide_members=16, wide_pieces=12, least_wide=32, wide_tokens=160)


@pytest.mark.parametrize("num_members, num_blocks, is_wide", [
    (32, 10, True), (31, 10, False), (32, 9, False), (45, 40, True), (100, 11, True),
])  # fmt: skip
def test_a_group_is_wide_from_so_many_decodes_and_tokens_on(num_members, num_blocks, is_wide):
    tables, contexts = wide_group_and_others(num_members, num_blocks, block_size=BLOCK_SIZE)
    _, prefixes = prefixes_of(tables, contexts, WIDE_RULE)
    assert (prefixes.wide is not None) == is_wide
    num_reads = num_members * num_blocks * BLOCK_SIZE
    for wide_reads in (num_reads, num_reads + 1):
        of_reads = prefixes_of(tables, contexts, WIDE_RULE._replace(wide_reads=wide_reads))[1]
        assert (of_reads.wide is not None) == (is_wide and wide_reads == num_reads)
    narrow = prefixes_of(tables, contexts, WIDE_RULE._replace(wide_members=0))[1]
    assert narrow.wide is None
    for name in ("shared", "members", "bundles"):  # a graph without wide programs computes the same step
        assert np.array_equal(getattr(prefixes, name), getattr(narrow, name)), name


def wide_prefixes(num_members, num_blocks, rule=WIDE_RULE, **sizes):
    """Layout and prefixes of a step with a wide group."""
    tables, contexts = wide_group_and_others(num_members, num_blocks, block_size=BLOCK_SIZE, **sizes)
    layout, prefixes = prefixes_of(tables, contexts, rule)
    assert prefixes.wide is not None
    return layout, prefixes


@pytest.mark.parametrize("num_members, num_blocks", [(32, 10), (45, 40), (100, 11), (64, 300)])
def test_wide_pieces_cover_the_prefix_of_each_member_once_and_keep_to_their_number(num_members, num_blocks):
    layout, prefixes = wide_prefixes(num_members, num_blocks)
    wide, seen = prefixes.wide, {}
    for first, count, begin, end, part in wide.wide_pieces.tolist():
        assert 1 <= count <= WIDE_RULE.wide_members and begin < end
        for row in wide.members[first : first + count].tolist():
            seen.setdefault(row, []).append((begin, end, part))
    num_programs = -(-num_members // WIDE_RULE.wide_members)
    assert len(seen) == num_members and len(wide.wide_pieces) <= WIDE_RULE.wide_pieces + num_programs
    for row, pieces in seen.items():
        ends = [0, *(end for _, end, _ in sorted(pieces))]
        assert sorted(pieces) == [(*bounds, part) for part, bounds in enumerate(itertools.pairwise(ends))]
        assert ends[-1] == num_blocks == wide.shared[row] and wide.wide_parts[row] == len(pieces)
        assert layout.decodes[row].block_table[:num_blocks] == layout.decodes[min(seen)].block_table[:num_blocks]
    others = set(range(len(layout.decodes))) - seen.keys()
    assert not wide.wide_parts[sorted(others)].any()
    assert {row for row in others if wide.shared[row]} == set(wide.members[: wide.bundles[:, 1].sum()].tolist())


@pytest.mark.parametrize("num_multiprocessors", [132, 148, 188])
@pytest.mark.parametrize("num_decodes", [32, 33, 48])
def test_wide_pieces_fit_into_the_room_of_a_packed_step(num_multiprocessors, num_decodes):
    rule = WIDE_RULE._replace(wide_members=32, wide_pieces=num_multiprocessors)
    for num_blocks in (10, 131, 520, 528):
        layout, prefixes = wide_prefixes(num_decodes, num_blocks, rule, num_others=0)
        assert len(prefixes.wide.wide_pieces) <= PIECES_PER_DECODE * len(layout.decodes)


def test_a_wide_group_of_more_bundles_than_a_step_may_have_is_read_by_wide_programs_alone():
    _, prefixes = wide_prefixes(64, 10, WIDE_RULE._replace(max_bundles=7))
    assert len(prefixes.bundles) == 1 and (prefixes.wide.shared == 10).sum() == 64


def test_a_packed_step_has_wide_pieces_where_its_shape_is_wide():
    layout, prefixes = wide_prefixes(40, 12)
    for is_wide, expected in ((True, prefixes.wide), (False, prefixes)):
        packing = packing_of(GraphShape(64, 64, 0, is_wide), BLOCK_SIZE, 64)
        packed = np.full(packing.num_words_for(layout), 12345, np.int32)
        packing.pack(layout, Tiles.from_layout(layout, BLOCK_SIZE, prefixes), None, packed)
        step = packing.views(packed)
        assert np.array_equal(step.members[: len(expected.members)], expected.members)
        assert (step.shared_bundles[:, 1] > 0).sum() == len(expected.bundles)
        pieces = step.wide_pieces.reshape(-1, WIDE_NUMBERS)
        assert len(step.wide_parts) == (64 if is_wide else 0) and len(pieces) == (256 if is_wide else 0)
        for first, count, begin, end, start, part, *_ in pieces[pieces[:, 1] > 0].tolist():
            assert begin % BLOCK_SIZE == end % BLOCK_SIZE == 0 and part < step.wide_parts[step.members[first]]
            for row in step.members[first : first + count].tolist():
                assert layout.decodes[row].block_table[:12] == step.tables[start : start + 12].tolist()
