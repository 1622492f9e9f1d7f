"""Any order of calls with tiers: every block that a step reads has the KV of its tokens, and nothing leaks."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from nanovllm.features.groups.state_kinds import FULL, StateKind
from nanovllm.features.policies.walk import walk_at_random
from nanovllm.features.tiers.books import TierBooks
from nanovllm.features.tiers.costs import LoadCosts
from nanovllm.features.tiers.tiered_blocks import TieredBlocks
from nanovllm.sequence import Sequence
from tests.support.public_options import make_sequence
from tests.support.tiers import TieredLoop, make_tiered_scheduler

NUM_WALKS = 30
NUM_WALKS_WITH_SAMPLES = 8
KINDS = {
    "full attention": [FULL],
    "windows": [FULL, StateKind(window=5)],
    "chunks": [FULL, StateKind(chunk=8)],
    "windows alone": [StateKind(window=7), StateKind(window=3)],
    "states": [FULL, StateKind.record(1)],
    "windows and states": [FULL, StateKind(window=5), StateKind.record(1)],
}


def walk(seed: int, kinds: list[StateKind], num_calls: int = 200) -> TieredLoop:
    rng = random.Random(seed)
    max_model_len, block_size = rng.randint(12, 28), rng.choice((1, 2, 3, 4))
    longest = -(-max_model_len // block_size)
    max_num_seqs = rng.randint(1, 5)
    scheduler = make_tiered_scheduler(
        kinds,
        [1 + longest + rng.randint(0, 4) for _ in kinds],
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_seqs + block_size + rng.randint(0, 16),
        max_num_seqs=max_num_seqs,
        long_prefill_token_threshold=rng.randint(1, 4) * block_size,
    )
    loop = TieredLoop(scheduler, rng, num_slots=rng.randint(2, 30), has_files=rng.random() < 0.8)
    walk_at_random(loop, rng, num_calls, samples=(1,) if seed < NUM_WALKS else (1, 2, 4), more={loop.idle: 20})
    return loop


@pytest.mark.full
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_every_request_ends_with_its_tokens_whatever_the_tiers_do(kinds):
    has_states = any(kind.record_bytes for kind in kinds)  # which few walks read from files
    num_walks = NUM_WALKS * (1 + has_states) + NUM_WALKS_WITH_SAMPLES
    loops = [walk(seed, kinds) for seed in range(num_walks)]
    seen = sum((loop.seen for loop in loops), Counter())
    for situation in ("loads", "stores", "written", "read late", "non-finite"):
        assert seen[situation] > 0, situation
    assert seen["idle beside queued copies"] > 10
    assert bool(loops[0].model.states) or sum(loop.model.num_forked for loop in loops) > 50
    assert sum(loop.books.num_evictions for loop in loops) > 50
    reads = [loop.reads for loop in loops if loop.reads is not None]
    assert sum(r.num_failed for r in reads) > 0 and sum(r.num_read_blocks for r in reads) >= (2 if has_states else 5)
    assert sum(r.num_timeouts for r in reads) > 0 or kinds != [FULL]


def waiting(compute_seconds: float, *, num_taken: int) -> tuple[TieredBlocks, Sequence, list[int]]:
    """A prompt of three blocks, two of them in host memory, and the positions from which costs were asked for."""
    manager, sequence, asked = TieredBlocks(9, 4), make_sequence(range(12)), list[int]()

    def compute(start: int, count: int) -> float:
        asked.append(start)
        return compute_seconds

    books, costs = TierBooks([1], 8), LoadCosts(compute)
    costs.rates["host"] = 1.0
    manager.attach(books, costs, root_seed="model")
    node = manager.root_of("")
    for index in range(2):
        node = node.child(sequence.block_tokens(index, 4))
        books.hold(node, 0, books.take_slot(0))
    manager.pop_free(num_taken)
    return manager, sequence, asked


def test_a_prompt_that_is_faster_computed_is_not_asked_for_again_while_it_waits():
    manager, sequence, asked = waiting(0.1, num_taken=0)
    assert [manager.lookup(sequence) for _ in range(3)] == [[], [], []] and asked == [0]
    manager.want(sequence)  # preempted, and queued again
    assert manager.lookup(sequence) == [] and asked == [0, 0]


def test_a_prompt_that_waits_for_blocks_asks_for_no_costs():
    manager, sequence, asked = waiting(1e9, num_taken=6)
    assert manager.lookup(sequence) == [] and asked == []
    manager, sequence, asked = waiting(1e9, num_taken=5)
    assert len(manager.lookup(sequence)) == 2 and asked == [0]
