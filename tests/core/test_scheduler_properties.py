"""Any order of calls, any lateness, any failure: every request ends with exactly its tokens, and nothing leaks.

Two drivers of the same rules: hypothesis, which shrinks what it finds, and a seeded walk of thousands of steps.
"""

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from nanovllm.block_manager import BlockManager
from nanovllm.features.policies.walk import AGEING, WEIGHTS, walk_at_random
from tests.support.public_options import make_sequence
from tests.support.scheduler_fuzz import SchedulerRules
from tests.support.scheduling import Loop, make_scheduler


def make_tiny_loop(
    *,
    block_size: int,
    max_model_len: int,
    num_spare_blocks: int,
    num_spare_tokens: int,
    max_num_seqs: int,
    threshold_blocks: int,
    max_num_partial_prefills: int,
    max_long_partial_prefills: int,
    enable_prefix_caching: bool,
    num_hash_bits: int,
    priority_ageing_s: float | None,
    client_weights: dict[str, float] | None,
) -> Loop:
    """A pool hardly larger than one sequence, a budget hardly larger than allowed, and hashes that may collide."""
    scheduler = make_scheduler(
        block_size=block_size,
        enable_prefix_caching=enable_prefix_caching,
        max_model_len=max_model_len,
        num_kv_blocks=1 + -(-max_model_len // block_size) + num_spare_blocks,
        max_num_batched_tokens=max_num_seqs + block_size + num_spare_tokens,
        max_num_seqs=max_num_seqs,
        long_prefill_token_threshold=threshold_blocks * block_size,
        max_num_partial_prefills=max(max_num_partial_prefills, max_long_partial_prefills),
        max_long_partial_prefills=max_long_partial_prefills,
        priority_ageing_s=priority_ageing_s,
        client_weights=client_weights,
    )
    if num_hash_bits < 128:
        mask = (1 << num_hash_bits) - 1
        digest = BlockManager._digest
        scheduler.block_manager._digest = lambda data: bytes([digest(data)[0] & mask])
    return Loop(scheduler)


class SchedulerMachine(SchedulerRules):
    @initialize(
        block_size=st.sampled_from([1, 2, 3, 4]),
        max_model_len=st.integers(6, 28),
        num_spare_blocks=st.integers(0, 5),
        num_spare_tokens=st.integers(0, 12),
        max_num_seqs=st.integers(1, 6),
        threshold_blocks=st.integers(1, 6),
        max_num_partial_prefills=st.integers(1, 3),
        max_long_partial_prefills=st.sampled_from([1, 2, 6]),
        enable_prefix_caching=st.sampled_from([True, True, True, False]),
        num_hash_bits=st.sampled_from([128, 128, 2, 0]),
        priority_ageing_s=st.sampled_from(AGEING),
        client_weights=st.sampled_from(WEIGHTS),
    )
    def start(self, **limits: int) -> None:
        self.loop = make_tiny_loop(**limits)
        self.max_model_len = limits["max_model_len"]


TestAnyOrderOfCalls = SchedulerMachine.TestCase
TestAnyOrderOfCalls.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def walk(seed: int, num_calls: int) -> Loop:
    """A walk on a random tiny engine."""
    rng = random.Random(seed)
    max_model_len = rng.randint(8, 28)
    loop = make_tiny_loop(
        block_size=rng.choice((1, 2, 3, 4)),
        max_model_len=max_model_len,
        num_spare_blocks=rng.randint(0, 6),
        num_spare_tokens=rng.randint(0, 16),
        max_num_seqs=rng.randint(1, 6),
        threshold_blocks=rng.randint(1, 6),
        max_num_partial_prefills=rng.randint(1, 3),
        max_long_partial_prefills=rng.choice((1, 2, 6)),
        enable_prefix_caching=rng.random() < 0.9,
        num_hash_bits=rng.choice((128, 128, 128, 2)),
        priority_ageing_s=rng.choice(AGEING),
        client_weights=rng.choice(WEIGHTS),
    )
    return walk_at_random(loop, rng, num_calls)


NUM_WALKS = 75


@pytest.fixture(scope="module")
def walks() -> list[Loop]:
    return [walk(seed, num_calls=200) for seed in range(NUM_WALKS)]


@pytest.mark.full
def test_thousands_of_random_steps_end_every_request_with_exactly_its_tokens(walks: list[Loop]):
    assert sum(loop.scheduler.stats.num_steps for loop in walks) > 5000
    reasons = Counter(sequence.finish_reason for loop in walks for sequence in loop.sequences)
    assert set(reasons) == {"stop", "length", "abort", "error"}
    assert min(reasons.values()) > 10


@pytest.mark.parametrize(
    "situation",
    [
        "preemptions",
        "prefix-cache hits",
        "prefixes shared within a step",
        "forked samples",
        "evictions",
        "failed steps",
        "late registrations",
        "preempted in flight",
        "aborted in flight",
        "dropped in flight",
        "non-finite",
        "ordered by age",
        "clients beside each other",
        "slots taken",
        "bounds checked",
    ],
)
def test_the_walks_meet(situation: str, walks: list[Loop]):
    met: Counter[str] = Counter()
    for loop in walks:
        stats = loop.scheduler.stats
        met.update(loop.seen)
        met["preemptions"] += stats.num_preemptions
        met["prefix-cache hits"] += stats.prefix_cache_hits
        met["prefixes shared within a step"] += loop.model.num_shared_in_step
        met["forked samples"] += loop.model.num_forked
        met["evictions"] += loop.manager.num_evictions
        met["failed steps"] += stats.num_failed_steps
    assert met[situation] > 20


def test_older_requests_do_not_take_the_blocks_of_a_client_beyond_the_bound_of_shares():
    rng = random.Random(8)
    limits = {"max_num_batched_tokens": 25, "max_num_partial_prefills": 1, "long_prefill_token_threshold": 1}
    scheduler = make_scheduler(block_size=1, num_kv_blocks=17, max_model_len=16, max_num_seqs=8, **limits)
    arrival, gaps = 0, []
    while not arrival or any(sequence.client == "a" for sequence in scheduler.waiting):
        while arrival < 60 or sum(sequence.client == "b" for sequence in scheduler.waiting) < 2:
            client, longest, most = ("a", 10, 6) if arrival < 60 else ("b", 13, 16)
            tokens = [rng.randrange(8) for _ in range(rng.randint(1, longest))]
            scheduler.add(make_sequence(tokens, arrival=arrival, client=client, max_tokens=most, max_model_len=16))
            arrival += 1
        batch = scheduler.schedule()
        scheduler.update(batch, [1] * len(batch.sampling))
        gaps.append(scheduler.waiting.gap)
    assert scheduler.waiting.bound < max(gaps) < 1.5 * scheduler.waiting.bound
