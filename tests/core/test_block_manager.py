"""The block manager hands out blocks in the right order, finds what is there, and never finds what is not."""

import random

import pytest

from nanovllm.block_manager import NULL_BLOCK, BlockManager
from nanovllm.sequence import Sequence
from tests.support.scheduling import make_sequence

SIZE = 4
STEP = 1


def make_manager(num_free: int, **options: object) -> BlockManager:
    return BlockManager(num_free + 1, SIZE, **options)


def compute(manager: BlockManager, sequence: Sequence, num_tokens: int | None = None, *, step_id: int = STEP) -> int:
    """Compute the sequence up to `num_tokens` in one committed step, hits first; returns the number of blocks hit."""
    num_tokens = sequence.num_tokens if num_tokens is None else num_tokens
    hits = manager.lookup(sequence)
    manager.claim(sequence, hits)
    first = len(sequence.block_table)
    manager.allocate(sequence, manager.num_blocks_for(num_tokens) - first)
    manager.register(sequence, first, num_tokens // manager.block_size, step_id)
    manager.commit(step_id)
    sequence.num_computed_tokens = num_tokens
    return len(hits)


def release(manager: BlockManager, sequence: Sequence) -> None:
    manager.release(sequence)
    sequence.num_computed_tokens = 0


def computed(manager: BlockManager, tokens: list[int], **options: object) -> Sequence:
    sequence = make_sequence(tokens, **options)
    compute(manager, sequence)
    return sequence


def num_hits(manager: BlockManager, tokens: list[int], **options: object) -> int:
    return len(manager.lookup(make_sequence(tokens, **options)))


A, B, C, D = ([n] * SIZE for n in range(1, 5))  # one block of tokens each


# ------------------------------------------------------------------------------------------------------------ usage


@pytest.mark.parametrize("num_holders", [1, 2, 254, 255, 300])
def test_usage_tells_who_holds_a_block_and_what_can_be_found(num_holders):
    manager = make_manager(6)
    holders = [computed(manager, A + B[:2]) for _ in range(num_holders if num_holders < 5 else 1)]
    while len(holders) < num_holders:  # more than there are blocks for tails
        holders.append(make_sequence(A + B[:2]))
        manager.claim(holders[-1], manager.lookup(holders[-1]))
    release(manager, computed(manager, [8] * SIZE))
    counts, findable = manager.usage()
    assert len(counts) == len(findable) == manager.num_blocks
    assert counts[holders[0].block_table[0]] == min(num_holders, 255)
    assert counts[holders[0].block_table[1]] == 1
    assert sum(findable) == manager.num_findable_blocks == 2
    assert findable[holders[0].block_table[0]] == 1
    assert findable[holders[0].block_table[1]] == 0  # not full
    assert counts.count(0) == manager.num_free_blocks + 1  # and the null block


# -------------------------------------------------------------------------------------------------- order of reuse


def test_the_null_block_is_never_handed_out():
    manager = make_manager(3)
    sequence = computed(manager, A + B + C)
    assert sorted(sequence.block_table) == [1, 2, 3]
    assert NULL_BLOCK not in sequence.block_table


def test_a_pool_without_a_block_to_give_is_refused():
    with pytest.raises(ValueError, match="num_blocks is 1; at least 2"):
        BlockManager(1, SIZE)


def test_asking_for_more_blocks_than_are_free_is_refused_and_leaves_no_trace():
    manager = make_manager(3)
    computed(manager, A)
    sequence = make_sequence(B + C + D)
    with pytest.raises(RuntimeError, match="3 blocks asked for, 2 free"):
        manager.allocate(sequence, 3)
    assert sequence.block_table == []
    assert manager.num_free_blocks == 2


def test_tokens_round_up_to_blocks():
    manager = make_manager(3)
    assert [manager.num_blocks_for(count) for count in (0, 1, 3, 4, 5, 8, 9)] == [0, 1, 1, 1, 2, 2, 3]


def test_the_block_freed_longest_ago_is_taken_first():
    manager = make_manager(3)
    sequences = [computed(manager, tokens) for tokens in (A, B, C)]
    freed = [sequences[index].block_table[0] for index in (1, 2, 0)]
    for index in (1, 2, 0):
        release(manager, sequences[index])
    assert computed(manager, D * 3).block_table == freed


def test_a_chain_loses_its_tail_before_its_head():
    manager = make_manager(3)
    sequence = computed(manager, A + B + C)
    release(manager, sequence)
    computed(manager, D)
    assert num_hits(manager, A + B + C + [9]) == 2
    computed(manager, D * 2)
    assert num_hits(manager, A + B + C + [9]) == 1


def test_a_block_with_nothing_to_lose_is_taken_before_any_findable_one():
    manager = make_manager(3)
    findable, partial = computed(manager, A), computed(manager, [*B, 9])
    unfindable = partial.block_table[1]
    release(manager, findable)  # freed first, but worth keeping
    release(manager, partial)
    assert computed(manager, D[:2]).block_table == [unfindable]
    assert (num_hits(manager, [*A, 9]), num_hits(manager, [*B, 9])) == (1, 1)
    assert manager.num_evictions == 0


def test_a_hit_renews_the_age_of_a_block():
    manager = make_manager(2)
    first, second = computed(manager, A), computed(manager, B)
    release(manager, first)
    release(manager, second)
    again = make_sequence([*A, 9])
    manager.claim(again, manager.lookup(again))
    manager.release(again)
    computed(manager, D)
    assert num_hits(manager, [*A, 9]) == 1
    assert num_hits(manager, [*B, 9]) == 0


def test_evictions_count_findable_blocks_taken_for_something_else():
    manager = make_manager(3)
    release(manager, computed(manager, A + B))
    assert manager.num_evictions == 0
    computed(manager, C)  # the block never used
    assert manager.num_evictions == 0
    computed(manager, D * 2)
    assert manager.num_evictions == 2


# ---------------------------------------------------------------------------------------------------- prefix hits


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_hit_leaves_at_least_the_last_token_to_compute(num_blocks: int, extra: int):
    manager = make_manager(8)
    tokens = list(range(num_blocks * SIZE + extra))
    release(manager, computed(manager, tokens))
    assert num_hits(manager, tokens) == (len(tokens) - 1) // SIZE
    assert compute(manager, make_sequence(tokens)) * SIZE < len(tokens)


def test_a_hit_is_a_whole_block_in_its_place():
    manager = make_manager(8)
    computed(manager, A + B)
    assert num_hits(manager, A + B[:3]) == 1
    assert num_hits(manager, B + A) == 0
    assert num_hits(manager, [*B, 9]) == 0
    assert num_hits(manager, C + B + [9]) == 0


def test_the_lookup_goes_on_behind_what_is_computed():
    manager = make_manager(8)
    late = make_sequence(A + B + C)
    compute(manager, late, SIZE)
    other = computed(manager, A + B)
    assert manager.lookup(late) == other.block_table[1:]


def test_a_prefix_is_shared_and_not_copied():
    manager = make_manager(4)
    first = computed(manager, A + B + C[:1])
    second = computed(manager, A + B + D[:1])
    assert second.block_table[:2] == first.block_table[:2]
    assert manager.num_free_blocks == 0
    release(manager, first)
    assert manager.num_free_blocks == 1
    manager.check_integrity([first, second])


def test_a_claimed_free_block_is_charged():
    manager = make_manager(3)
    release(manager, computed(manager, A + B))
    sequence = make_sequence(A + B + [9])
    hits = manager.lookup(sequence)
    assert manager.num_free_blocks == 3
    assert manager.num_free_among(hits) == 2
    manager.claim(sequence, hits)
    assert manager.num_free_blocks == 1
    other = make_sequence(A + B + [8])
    assert manager.num_free_among(manager.lookup(other)) == 0


def test_a_lookup_alone_changes_nothing():
    manager = make_manager(3)
    release(manager, computed(manager, A + B))
    num_hits(manager, A + B + [9])
    assert manager.num_free_blocks == 3
    computed(manager, D * 2)
    assert num_hits(manager, A + B + [9]) == 1  # B, the tail, was still the older one


def test_each_cache_salt_has_prefixes_of_its_own():
    manager = make_manager(8)
    computed(manager, A, cache_salt="one")
    assert num_hits(manager, [*A, 9], cache_salt="one") == 1
    assert num_hits(manager, [*A, 9], cache_salt="two") == 0
    assert num_hits(manager, [*A, 9]) == 0


def test_a_salt_cannot_be_confused_with_the_hash_seed():
    one = make_manager(8, hash_seed="model1")
    two = make_manager(8, hash_seed="model")
    salted, plain = make_sequence(A), make_sequence(A, cache_salt="1")
    compute(one, salted)
    compute(two, plain)
    assert salted.block_hashes != plain.block_hashes


def test_the_hash_seed_is_part_of_every_hash():
    sequences = [make_sequence(A + B), make_sequence(A + B)]
    for seed, sequence in zip(("bfloat16", "float32"), sequences, strict=True):
        compute(make_manager(8, hash_seed=seed), sequence)
    assert not set(sequences[0].block_hashes) & set(sequences[1].block_hashes)


def test_a_salt_may_hold_any_text():
    manager = make_manager(8)
    for salt in ("", "ü", "\0", "\ud800", "x" * 10_000):
        computed(manager, A, cache_salt=salt)
        assert num_hits(manager, [*A, 9], cache_salt=salt) == 1


def test_hashes_are_kept_on_the_sequence_and_extended_only_by_full_blocks(monkeypatch: pytest.MonkeyPatch):
    digested: list[bytes] = []
    digest = BlockManager._digest
    monkeypatch.setattr(BlockManager, "_digest", staticmethod(lambda data: digested.append(data) or digest(data)))
    manager = make_manager(8)
    sequence = make_sequence(A + B + C[:3])
    manager.lookup(sequence)
    assert len(digested) == 2  # the seed and block 0: a miss ends the walk
    compute(manager, sequence)
    assert len(sequence.block_hashes) == 2
    count = len(digested)
    manager.lookup(sequence)
    assert len(digested) == count


def test_without_prefix_caching_nothing_is_ever_found():
    manager = make_manager(8, enable_prefix_caching=False)
    computed(manager, A + B)
    assert num_hits(manager, A + B + [9]) == 0
    assert manager.num_findable_blocks == 0


# ------------------------------------------------------------------------------------------------------ duplicates


def computed_twice(manager: BlockManager, tokens: list[int]) -> tuple[Sequence, Sequence]:
    """Two sequences with the same content in different blocks, as when both were computed before either was known."""
    sequences = make_sequence(tokens), make_sequence(tokens, arrival=1)
    for sequence in sequences:
        manager.allocate(sequence, manager.num_blocks_for(len(tokens)))
        sequence.num_computed_tokens = len(tokens)
    for sequence in sequences:
        manager.register(sequence, 0, len(tokens) // SIZE, STEP)
    return sequences


def test_blocks_of_the_same_content_share_a_prefix_so_that_either_leads_on():
    manager = make_manager(8)
    first, second = computed_twice(manager, A)
    for tail, sequence in ((B, first), (C, second)):
        sequence.token_ids.extend(tail)
        manager.allocate(sequence, 1)
        manager.register(sequence, 1, 2, STEP)
        sequence.num_computed_tokens = 2 * SIZE
    manager.check_integrity([first, second])
    assert num_hits(manager, A + B + [9]) == 2
    assert num_hits(manager, A + C + [9]) == 2


@pytest.mark.parametrize("freed", [0, 1])
def test_content_is_found_while_one_of_its_blocks_lives(freed: int):
    manager = make_manager(2)
    sequences = computed_twice(manager, A)
    release(manager, sequences[freed])
    computed(manager, D)  # takes the freed block
    assert manager.lookup(make_sequence([*A, 9])) == sequences[1 - freed].block_table
    release(manager, sequences[1 - freed])
    computed(manager, B)
    assert num_hits(manager, [*A, 9]) == 0


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_a_prompt_of_whole_blocks_run_twice_leaves_its_whole_chain_to_the_next_turn(num_blocks: int):
    manager = make_manager(32)
    prompt = list(range(num_blocks * SIZE))
    for turn in range(2):  # the second recomputes the last block, since a hit leaves a token to compute
        sequence = make_sequence(prompt, arrival=turn)
        assert compute(manager, sequence) == (num_blocks - 1 if turn else 0)
        sequence.token_ids.extend(A + B)
        manager.allocate(sequence, 2)
        manager.register(sequence, num_blocks, num_blocks + 2, STEP)
        sequence.num_computed_tokens = sequence.num_tokens
        manager.check_integrity([sequence])
        release(manager, sequence)
    assert num_hits(manager, prompt + A + B + [9]) == num_blocks + 2


# ------------------------------------------------------------------------------------------------------ collisions


@pytest.mark.parametrize("bits", [0, 1, 3])
def test_colliding_hashes_cost_misses_and_never_a_wrong_block(bits: int, monkeypatch: pytest.MonkeyPatch):
    digest = BlockManager._digest
    weak = staticmethod(lambda data: bytes([digest(data)[0] & (2**bits - 1)]))
    monkeypatch.setattr(BlockManager, "_digest", weak)
    rng = random.Random(bits)
    manager = make_manager(12)
    computed_behind: dict[int, list[object]] = {}  # block -> the salted prefix that it was computed for
    num_found = 0
    live: list[Sequence] = []
    for arrival in range(500):
        tokens = [token for _ in range(rng.randint(1, 3)) for token in rng.choice((A, B))] + [9]
        sequence = make_sequence(tokens, arrival=arrival, cache_salt=rng.choice(("", "salt")))
        found = compute(manager, sequence)
        num_found += found
        for index, block in enumerate(sequence.block_table):
            prefix = [sequence.cache_salt, *tokens[: (index + 1) * SIZE]]
            if index < found:
                assert computed_behind[block] == prefix
            computed_behind[block] = prefix
        live.append(sequence)
        manager.check_integrity(live)
        if len(live) == 2:
            release(manager, live.pop(rng.randrange(2)))
    assert num_found > 0


def test_a_prefix_that_collides_with_a_registered_one_stays_unfindable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(BlockManager, "_digest", staticmethod(lambda data: b"same"))
    manager = make_manager(8)
    first, second = computed(manager, A), computed(manager, B + C)
    assert num_hits(manager, [*A, 9]) == 1
    assert num_hits(manager, B + C + [9]) == 0
    manager.check_integrity([first, second])


def test_equal_tokens_behind_a_colliding_parent_are_no_hit(monkeypatch: pytest.MonkeyPatch):
    digest, heads = BlockManager._digest, tuple(make_sequence(tokens).block_tokens(0, SIZE) for tokens in (A, B))
    blind_to_heads = staticmethod(lambda data: b"0" * 16 if data.endswith(heads) else digest(data))
    monkeypatch.setattr(BlockManager, "_digest", blind_to_heads)
    manager = make_manager(8)
    computed(manager, A + C)
    probe = make_sequence(B + C + [9])
    assert manager.lookup(probe) == []
    compute(manager, probe, SIZE)
    assert manager.lookup(probe) == []
    assert manager.num_findable_blocks == 2


# ------------------------------------------------------------------------------------------------ outcome of steps


def scheduled(manager: BlockManager, tokens: list[int], step_id: int, **options: object) -> Sequence:
    """A sequence whose tokens are computed by a step that is still in flight."""
    sequence = make_sequence(tokens, **options)
    hits = manager.lookup(sequence)
    manager.claim(sequence, hits)
    manager.allocate(sequence, manager.num_blocks_for(len(tokens)) - len(hits))
    manager.register(sequence, len(hits), len(tokens) // SIZE, step_id)
    sequence.num_computed_tokens = len(tokens)
    return sequence


def test_a_block_can_be_found_as_soon_as_its_computation_is_scheduled():
    manager = make_manager(4)
    first = scheduled(manager, [*A, 9], step_id=1)
    assert manager.lookup(make_sequence([*A, 8])) == first.block_table[:1]


def test_a_failed_step_takes_back_what_it_made_findable_and_no_more():
    manager = make_manager(8)
    scheduled(manager, [*A, 9], step_id=1)
    manager.commit(1)
    scheduled(manager, A + B + [9], step_id=2)
    scheduled(manager, [*C, 9], step_id=3)
    manager.withdraw(2)
    assert num_hits(manager, A + B + [9]) == 1
    assert num_hits(manager, [*C, 9]) == 1
    manager.withdraw(3)
    assert num_hits(manager, [*C, 9]) == 0


def test_a_committed_step_cannot_be_withdrawn():
    manager = make_manager(4)
    scheduled(manager, [*A, 9], step_id=1)
    manager.commit(1)
    manager.withdraw(1)
    assert num_hits(manager, [*A, 9]) == 1


def test_a_free_block_that_a_failed_step_made_findable_is_the_next_to_be_taken():
    manager = make_manager(2)
    release(manager, computed(manager, A))
    aborted = scheduled(manager, B, step_id=2)
    [block] = aborted.block_table
    release(manager, aborted)
    manager.withdraw(2)
    assert computed(manager, C).block_table == [block]
    assert num_hits(manager, [*A, 9]) == 1


def test_withdrawing_a_step_spares_a_block_that_was_reused_since():
    manager = make_manager(1)
    release(manager, scheduled(manager, A, step_id=1))
    reused = scheduled(manager, B, step_id=2)
    manager.commit(1)
    manager.withdraw(1)
    manager.check_integrity([reused])
    assert num_hits(manager, [*B, 9]) == 1


def test_a_withdrawn_head_hides_the_chain_behind_it():
    manager = make_manager(4)
    first = scheduled(manager, A, step_id=1)
    first.token_ids.extend(B)
    manager.allocate(first, 1)
    first.num_computed_tokens = 2 * SIZE
    manager.withdraw(1)
    manager.register(first, 1, 2, step_id=2)
    assert num_hits(manager, A + B + [9]) == 0
    manager.check_integrity([first])


# ------------------------------------------------------------------------------------------- forgetting, returning


def test_reset_makes_everything_unfindable_and_leaves_blocks_with_their_owners():
    manager = make_manager(8)
    running = computed(manager, A + B)
    release(manager, computed(manager, C))
    table = list(running.block_table)
    manager.reset_prefix_cache()
    assert manager.num_findable_blocks == 0
    assert num_hits(manager, [*A, 9]) + num_hits(manager, [*C, 9]) == 0
    assert running.block_table == table
    assert manager.num_free_blocks == 6
    manager.check_integrity([running])


def test_after_a_reset_a_chain_that_began_before_it_is_not_continued():
    manager = make_manager(8)
    running = computed(manager, A)
    manager.reset_prefix_cache()
    running.token_ids.extend(B)
    manager.allocate(running, 1)
    manager.register(running, 1, 2, STEP)
    running.num_computed_tokens = 2 * SIZE
    assert manager.num_findable_blocks == 0
    fresh = computed(manager, A)
    assert num_hits(manager, A + B + [9]) == 1
    manager.check_integrity([running, fresh])


def test_blocks_dropped_by_a_reset_are_not_counted_as_evictions():
    manager = make_manager(2)
    release(manager, computed(manager, A + B))
    manager.reset_prefix_cache()
    computed(manager, C + D)
    assert manager.num_evictions == 0


def test_forgetting_a_sequence_hides_all_its_blocks_and_keeps_them_in_its_table():
    manager = make_manager(8)
    spoilt, healthy = computed(manager, A + B), computed(manager, C)
    table = list(spoilt.block_table)
    manager.forget(spoilt)
    assert spoilt.block_table == table
    assert num_hits(manager, A + B + [9]) == 0
    assert num_hits(manager, [*C, 9]) == 1
    manager.check_integrity([spoilt, healthy])


def test_forgotten_content_can_be_computed_and_found_again():
    manager = make_manager(8)
    spoilt = computed(manager, A + B)
    manager.forget(spoilt)
    release(manager, spoilt)
    computed(manager, A + B)
    assert num_hits(manager, A + B + [9]) == 2


def test_content_behind_a_forgotten_prefix_can_be_found_again_once_it_is_recomputed():
    manager = make_manager(8)
    spoilt = computed(manager, [*A, 9])
    child = computed(manager, A + B)  # shares the spoilt prefix
    manager.forget(spoilt)
    again = computed(manager, A + B + [9])
    assert num_hits(manager, A + B + [9]) == 2
    manager.check_integrity([spoilt, child, again])


def test_release_gives_the_sequence_a_new_table_so_that_a_launched_batch_keeps_the_old_one():
    manager = make_manager(4)
    sequence = computed(manager, A + B)
    launched = sequence.block_table
    release(manager, sequence)
    assert launched == [1, 2]
    assert sequence.block_table == []
    assert manager.num_free_blocks == 4


def test_truncate_keeps_the_head_and_frees_the_tail():
    manager = make_manager(4)
    sequence = computed(manager, A + B + C)
    launched = list(sequence.block_table)
    manager.truncate(sequence, 1)
    sequence.num_computed_tokens = SIZE
    assert sequence.block_table == launched[:1]
    assert manager.num_free_blocks == 3
    assert num_hits(manager, A + B + C + [9]) == 3
    manager.check_integrity([sequence])


def test_a_shared_block_is_free_only_when_its_last_owner_gave_it_back():
    manager = make_manager(4)
    owners = [computed(manager, [*A, 9]), computed(manager, [*A, 8])]
    assert manager.num_free_blocks == 1
    release(manager, owners[0])
    assert manager.num_free_blocks == 2
    release(manager, owners[1])
    assert manager.num_free_blocks == 4
    manager.check_integrity(owners)


# -------------------------------------------------------------------------------- check_integrity finds corruption


def corrupt(corruption: str) -> tuple[BlockManager, list[Sequence]]:
    """Two sequences that share a block, one cached free block, and one thing that is not as it should be."""
    manager = make_manager(8)
    release(manager, computed(manager, D))
    first, second = computed(manager, A + B + [9]), computed(manager, A + C, arrival=1)
    free = next(iter(manager._free))
    head = manager._entry_of[first.block_table[0]]
    match corruption:
        case "none":
            pass
        case "a block short":
            first.block_table.pop()
        case "a block too many":
            first.block_table.append(free)
        case "a block twice":
            first.block_table[2] = first.block_table[1]
        case "changed tokens":
            first.token_ids[SIZE] = 7
        case "another parent":
            manager._entry_of[first.block_table[1]].parent += 100
        case "a reference too many":
            manager._ref_counts[free] += 1
        case "a reference too few":
            manager._ref_counts[first.block_table[0]] -= 1
        case "the null block given out":
            manager._ref_counts[first.block_table[2]], manager._ref_counts[NULL_BLOCK] = 0, 1
            first.block_table[2] = NULL_BLOCK
        case "the null block free":
            del manager._free[free]
            manager._free[NULL_BLOCK] = None
        case "a lost block":
            del manager._free[free]
        case "free and referenced":
            del manager._free[free]
            manager._free[first.block_table[0]] = None
        case "an entry without blocks":
            head.blocks.clear()
        case "an entry under another hash":
            manager._entries[b"other"] = manager._entries.pop(head.block_hash)
        case "a stranger's block":
            head.blocks[free] = None
        case "a block that no entry names":
            manager._entry_of[free] = head
        case "one prefix id twice":
            head.prefix_id = manager._entry_of[first.block_table[1]].prefix_id
    return manager, [first, second]


def test_an_intact_manager_passes_its_check():
    manager, sequences = corrupt("none")
    manager.check_integrity(sequences)


@pytest.mark.parametrize(
    ("corruption", "message"),
    [
        ("a block short", "should hold 3 blocks"),
        ("a block too many", "should hold 3 blocks"),
        ("a block twice", "holds a block twice"),
        ("changed tokens", "does not hold the tokens of"),
        ("another parent", "hangs on another prefix"),
        ("a reference too many", "reference counts differ"),
        ("a reference too few", "reference counts differ"),
        ("the null block given out", "the null block was given out"),
        ("the null block free", "the null block is among the free ones"),
        ("a lost block", "free and referenced blocks are not all blocks"),
        ("free and referenced", "a block is free and referenced"),
        ("an entry without blocks", "an entry without blocks"),
        ("an entry under another hash", "an entry under another hash"),
        ("a stranger's block", "an entry names a stranger's block"),
        ("a block that no entry names", "a findable block that no entry names"),
        ("one prefix id twice", "prefix"),
    ],
)
def test_check_integrity_names(corruption: str, message: str):
    manager, sequences = corrupt(corruption)
    with pytest.raises(RuntimeError, match=message):
        manager.check_integrity(sequences)


def test_check_integrity_names_a_sequence_that_was_left_out():
    manager, sequences = corrupt("none")
    with pytest.raises(RuntimeError, match="reference counts differ"):
        manager.check_integrity(sequences[:1])


def test_one_look_rules_out_prefixes_that_a_lookup_would_not_find():
    manager = make_manager(8)
    release(manager, computed(manager, list(range(8))))
    for length in range(1, 14):
        sequence = make_sequence(range(length))
        found = len(manager.lookup(sequence))
        assert [manager.may_hold(sequence, index) for index in range(4)] == [index < found for index in range(4)]
    assert not manager.may_hold(make_sequence([9] * 9), 0)
