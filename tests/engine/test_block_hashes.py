"""Block hashes: several blocks of one content, and hashes that collide."""

import random

import pytest

from nanovllm.block_manager import BlockManager
from nanovllm.sequence import Sequence
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

# ----------------------------------------------------------------------------------------------------------- duplicates


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
    check_blocks(manager, [first, second])
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
        sequence.num_computed_tokens = len(sequence.token_ids)
        check_blocks(manager, [sequence])
        release(manager, sequence)
    assert num_hits(manager, prompt + A + B + [9]) == num_blocks + 2


# ----------------------------------------------------------------------------------------------------------- collisions


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
        check_blocks(manager, live)
        if len(live) == 2:
            release(manager, live.pop(rng.randrange(2)))
    assert num_found > 0


def test_a_prefix_that_collides_with_a_registered_one_stays_unfindable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(BlockManager, "_digest", staticmethod(lambda data: b"same"))
    manager = make_manager(8)
    first, second = computed(manager, A), computed(manager, B + C)
    assert num_hits(manager, [*A, 9]) == 1
    assert num_hits(manager, B + C + [9]) == 0
    check_blocks(manager, [first, second])


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
