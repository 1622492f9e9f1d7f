"""The block manager: the order of reuse, and prefix hits."""

import pytest

from nanovllm.batch import NULL_BLOCK, Copy
from nanovllm.block_manager import BlockManager
from tests.engine.blocks import (
    SIZE,
    STEP,
    A,
    B,
    C,
    D,
    check_blocks,
    compute,
    computed,
    make_manager,
    make_sequence,
    num_hits,
    release,
)

# ------------------------------------------------------------------------------------------------------- order of reuse


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


def test_a_findable_block_is_idle_when_its_last_reference_goes():
    manager = make_manager(8)
    idle: list[tuple[int, bytes]] = []
    manager.on_idle = lambda block, entry: idle.append((block, entry.tokens))
    first, second = (computed(manager, A + B + [9], arrival=arrival) for arrival in range(2))
    held, names = first.block_table[:2], [first.block_tokens(index, SIZE) for index in range(2)]
    assert second.block_table[:2] == held
    release(manager, first)
    assert idle == []
    release(manager, second)  # its third block is not findable
    assert idle == [(held[1], names[1]), (held[0], names[0])]
    computed(manager, A + B + [9])  # claimed, and in use again
    assert len(idle) == 2


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


# ---------------------------------------------------------------------------------------------------------- prefix hits


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_hit_leaves_at_least_the_last_token_to_compute(num_blocks: int, extra: int):
    manager = make_manager(8)
    tokens = list(range(num_blocks * SIZE + extra))
    release(manager, computed(manager, tokens))
    assert num_hits(manager, tokens) == (len(tokens) - 1) // SIZE
    assert compute(manager, make_sequence(tokens)) * SIZE < len(tokens)


def test_a_hit_leaves_the_rows_of_reported_prompt_tokens_to_compute():
    manager = make_manager(4)
    computed(manager, A + B + [9])
    sequence = make_sequence(A + B + [8])
    for num_reported, num_found in ((1, 0), (SIZE, 0), (SIZE + 1, 1), (2 * SIZE, 1), (2 * SIZE + 1, 2)):
        sequence.prompt_logprobs = [None] * num_reported
        assert len(manager.lookup(sequence)) == num_found


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
    late.num_computed_tokens += 1  # a hit would replace the block that it has begun
    assert manager.lookup(late) == []


def test_a_victim_frees_the_blocks_that_it_holds_alone_and_its_successor_does_not_claim():
    manager = make_manager(4)
    computed(manager, [*A, 9])
    victim = computed(manager, A + B)  # shares A
    assert manager.has_free(2, victim) and not manager.has_free(3, victim)
    assert manager.has_free(1, victim, hits=victim.block_table)
    assert not manager.has_free(2, victim, hits=victim.block_table)


def test_a_prefix_is_shared_and_not_copied():
    manager = make_manager(4)
    first = computed(manager, A + B + C[:1])
    second = computed(manager, A + B + D[:1])
    assert second.block_table[:2] == first.block_table[:2]
    assert manager.num_free_blocks == 0
    release(manager, first)
    assert manager.num_free_blocks == 1
    check_blocks(manager, [first, second])


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
    assert len(digested) == 1  # block 0: a miss ends the walk
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


def test_contents_that_a_waiting_request_wants_are_evicted_last():
    manager = make_manager(3)
    for tokens in (A, B, C):
        release(manager, computed(manager, tokens))
    waiting = make_sequence([*A, 9])
    manager.want(waiting)
    computed(manager, D)
    assert (num_hits(manager, [*A, 9]), num_hits(manager, [*B, 9]), num_hits(manager, [*C, 9])) == (1, 0, 1)
    manager.wanted.remove(waiting)
    computed(manager, [8] * SIZE)
    assert (num_hits(manager, [*A, 9]), num_hits(manager, [*C, 9])) == (0, 1)  # it kept its place


def test_wanted_contents_are_evicted_once_nothing_else_is_free():
    manager = make_manager(2)
    for tokens in (A, B):
        release(manager, computed(manager, tokens))
    for tokens in (A, B):
        manager.want(make_sequence([*tokens, 9]))
    computed(manager, C + D)
    assert manager.num_evictions == 2


def test_an_allocation_passes_few_wanted_contents():
    manager = make_manager(24)
    for number in range(24):
        release(manager, computed(manager, [number] * SIZE))
    for number in range(20):
        manager.want(make_sequence([*[number] * SIZE, 9]))
    computed(manager, [50] * SIZE)
    assert [num_hits(manager, [*[number] * SIZE, 9]) for number in (0, 1, 15, 20)] == [0, 1, 1, 1]


def test_a_sequence_wants_what_it_may_find_alone():
    manager = make_manager(2)
    computed(manager, C + D)
    whole = make_sequence(A + B + [9])
    logged = make_sequence(A + B + [9])
    logged.prompt_logprobs = [None]
    manager.want(whole)
    manager.want(logged)  # which computes its whole prompt
    assert sorted(manager.wanted.values()) == [1, 1]
    assert manager.wanted.by_others(whole, 0, whole.block_hashes[0]) == 0
    assert manager.wanted.by_others(logged, 0, whole.block_hashes[0]) == 1
    for sequence in (whole, logged, whole):  # once more than it was counted
        manager.wanted.remove(sequence)
    assert manager.wanted == {}


def test_while_blocks_are_empty_nobody_counts_what_is_wanted():
    manager = make_manager(3)
    release(manager, computed(manager, A + B))
    manager.want(make_sequence([*A, 9]))
    assert manager.wanted == {}


def test_the_last_of_several_copies_into_a_block_counts():
    manager = make_manager(5)
    for source in [computed(manager, [*tokens, 9]) for tokens in (A, B)]:
        fork = make_sequence([*source.token_ids, 9])
        manager.fork(source, fork, SIZE + 1)
        copy = Copy(0, source.block_table[1], fork.block_table[1])
        release(manager, fork)  # before a step has taken the copy
    assert manager.take_copies(STEP) == (copy,)
    assert manager.take_copies(STEP + 1) == ()
