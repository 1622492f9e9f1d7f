"""Cache groups under any order of calls: every block in sight holds its tokens, nothing leaks, nobody starves."""

import random
from collections import Counter
from functools import cache

import pytest

from nanovllm.features.groups.state_kinds import FULL
from nanovllm.features.policies.walk import Sizes, walk_at_random
from tests.support.scheduling import Loop, make_group_scheduler, make_scheduler

NUM_WALKS = 72


def walk(seed):
    rng = random.Random(seed)
    kinds, counts, block_size, limits = Sizes.drawn(rng)
    return walk_at_random(Loop(make_group_scheduler(kinds, counts, block_size=block_size, **limits)), rng, 200)


@cache
def met():
    met = Counter()
    for loop in map(walk, range(NUM_WALKS)):
        met.update(loop.seen)
        met["preemptions"] += loop.scheduler.stats.num_preemptions
        met["prefix-cache hits"] += loop.scheduler.stats.prefix_cache_hits
        met["prefixes shared within a step"] += loop.model.num_shared_in_step
        met["evictions"] += sum(pool.num_evictions for pool in loop.manager.pools)
        met["failed steps"] += loop.scheduler.stats.num_failed_steps
    return met


@pytest.mark.parametrize(
    "situation",
    ["preemptions", "prefix-cache hits", "prefixes shared within a step", "evictions", "failed steps", "non-finite"],
)
def test_the_walks_meet(situation):
    assert met()[situation] > 20


def batches_of(scheduler, seed):
    """Every decision of a random walk: who computes what, in which blocks."""
    decisions = []
    schedule = scheduler.schedule

    def noted():
        batch = schedule()
        if batch is not None:
            decisions.append([(e.sequence.request_id, *e[1:4], tuple(e.block_table)) for e in batch.entries])
        return batch

    scheduler.schedule = noted
    walk_at_random(Loop(scheduler), random.Random(seed), 200)
    return decisions


@pytest.mark.costly
@pytest.mark.parametrize("seed", range(8))
def test_one_full_group_decides_what_a_block_manager_does(seed):
    limits = {"max_model_len": 24, "max_num_batched_tokens": 12, "max_num_seqs": 4, "long_prefill_token_threshold": 8}
    plain = make_scheduler(num_kv_blocks=10, block_size=3, **limits)
    assert batches_of(make_group_scheduler([FULL], [10], block_size=3, **limits), seed) == batches_of(plain, seed)
