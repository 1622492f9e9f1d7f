"""Cache groups under any order of calls: every block in sight holds its tokens, nothing leaks, nobody starves."""

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from nanovllm.block_manager import BlockManager, PrefixEntry
from nanovllm.features.groups.state_kinds import FULL, StateKind
from nanovllm.features.policies.walk import AGEING, walk_at_random
from nanovllm.scheduler import Scheduler
from tests.support.scheduler_fuzz import SchedulerRules
from tests.support.scheduling import Loop, make_group_scheduler, make_scheduler

MIXES = (
    lambda span: [FULL, StateKind(window=span)],
    lambda span: [FULL, StateKind(chunk=span)],
    lambda span: [StateKind(window=span)],
    lambda span: [StateKind(chunk=span)],
    lambda span: [FULL, StateKind(window=span), StateKind(window=1 + span // 2, chunk=span)],
    lambda span: [StateKind(window=span + 3), StateKind(window=span)],
    lambda span: [FULL, StateKind.record(100)],
    lambda span: [FULL, StateKind(window=span), StateKind.record(100)],
)


def make_tiny_loop(
    *,
    mix: int,
    span: int,
    num_spare_blocks: list[int],
    block_size: int,
    max_model_len: int,
    num_spare_tokens: int,
    max_num_seqs: int,
    threshold_blocks: int,
    enable_prefix_caching: bool,
    num_hash_bits: int,
    priority_ageing_s: float | None,
) -> Loop:
    """Pools hardly larger than what one sequence needs in each, and a budget hardly larger than allowed."""
    groups = MIXES[mix](span)
    scheduler = make_group_scheduler(
        groups,
        [1 + g.max_blocks(max_model_len, block_size) + n for g, n in zip(groups, num_spare_blocks, strict=False)],
        block_size=block_size,
        enable_prefix_caching=enable_prefix_caching,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_seqs + block_size + num_spare_tokens,
        max_num_seqs=max_num_seqs,
        long_prefill_token_threshold=threshold_blocks * block_size,
        max_num_partial_prefills=3,
        max_long_partial_prefills=2,
        priority_ageing_s=priority_ageing_s,
    )
    if num_hash_bits < 128:
        mask = (1 << num_hash_bits) - 1
        digest = BlockManager._digest
        scheduler.block_manager._digest = lambda data: bytes([digest(data)[0] & mask])
    return Loop(scheduler)


class GroupsMachine(SchedulerRules):
    @initialize(
        mix=st.integers(0, len(MIXES) - 1),
        span=st.integers(1, 12),
        num_spare_blocks=st.lists(st.integers(0, 6), min_size=3, max_size=3),
        block_size=st.sampled_from([1, 2, 3, 4]),
        max_model_len=st.integers(6, 28),
        num_spare_tokens=st.integers(0, 12),
        max_num_seqs=st.integers(1, 6),
        threshold_blocks=st.integers(1, 6),
        enable_prefix_caching=st.sampled_from([True, True, True, False]),
        num_hash_bits=st.sampled_from([128, 128, 2, 0]),
        priority_ageing_s=st.sampled_from(AGEING),
    )
    def start(self, **limits: int) -> None:
        self.loop = make_tiny_loop(**limits)
        self.max_model_len = limits["max_model_len"]


TestAnyOrderOfCalls = GroupsMachine.TestCase
TestAnyOrderOfCalls.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def walk(seed: int, num_calls: int) -> Loop:
    rng = random.Random(seed)
    loop = make_tiny_loop(
        mix=seed % len(MIXES),
        span=rng.randint(1, 12),
        num_spare_blocks=[rng.randint(0, 8) for _ in range(3)],
        block_size=rng.choice((1, 2, 3, 4)),
        max_model_len=rng.randint(8, 28),
        num_spare_tokens=rng.randint(0, 16),
        max_num_seqs=rng.randint(1, 6),
        threshold_blocks=rng.randint(1, 6),
        enable_prefix_caching=rng.random() < 0.9,
        num_hash_bits=rng.choice((128, 128, 128, 2)),
        priority_ageing_s=rng.choice(AGEING),
    )
    return walk_at_random(loop, rng, num_calls)


@pytest.fixture(scope="module")
def walks() -> list[Loop]:
    return [walk(seed, num_calls=200) for seed in range(72)]


@pytest.mark.full
def test_thousands_of_random_steps_end_every_request_with_exactly_its_tokens(walks: list[Loop]):
    assert sum(loop.scheduler.stats.num_steps for loop in walks) > 3000
    reasons = Counter(sequence.finish_reason for loop in walks for sequence in loop.sequences)
    assert set(reasons) == {"stop", "length", "abort", "error"}


@pytest.mark.parametrize(
    "situation",
    ["preemptions", "prefix-cache hits", "prefixes shared within a step", "evictions", "failed steps", "non-finite"],
)
def test_the_walks_meet(situation: str, walks: list[Loop]):
    met: Counter[str] = Counter()
    for loop in walks:
        met.update(loop.seen)
        met["preemptions"] += loop.scheduler.stats.num_preemptions
        met["prefix-cache hits"] += loop.scheduler.stats.prefix_cache_hits
        met["prefixes shared within a step"] += loop.model.num_shared_in_step
        met["evictions"] += sum(pool.num_evictions for pool in loop.manager.pools)
        met["failed steps"] += loop.scheduler.stats.num_failed_steps
    assert met[situation] > 20


class Followed:
    """What a router has heard to be findable, by block hash; every message must fit what came before."""

    def __init__(self) -> None:
        self.hashes: dict[bytes, None] = {}

    def findable(self, entry: PrefixEntry, parent_hash: bytes | None) -> None:
        assert entry.block_hash not in self.hashes
        self.hashes[entry.block_hash] = None

    def forgotten(self, block_hash: bytes) -> None:
        del self.hashes[block_hash]

    def all_forgotten(self) -> None:
        self.hashes.clear()


@pytest.mark.parametrize("mix", range(len(MIXES)))
def test_observers_hear_what_is_known_and_no_more(mix: int):
    groups = MIXES[mix](6)
    scheduler = make_group_scheduler(
        groups, [14] * len(groups), block_size=3, max_model_len=24, max_num_batched_tokens=12, max_num_seqs=4
    )
    followed = scheduler.block_manager.observer = Followed()
    loop, rng = Loop(scheduler), random.Random(mix)
    for number in range(40):
        loop.add([number % 3, *range(rng.randint(1, 12))], max_tokens=rng.randint(1, 10))
        for _ in range(rng.randint(0, 6)):
            if loop.launch() is not None and rng.random() < 0.1:
                loop.fail()
            elif loop.in_flight:
                loop.read()
        assert list(followed.hashes) == list(scheduler.block_manager.entries)
    assert followed.hashes
    loop.drain()
    loop.manager.reset_prefix_cache()
    assert not followed.hashes


def batches_of(scheduler: Scheduler, seed: int) -> list[object]:
    """Every decision of a random walk: who computes what, in which blocks."""
    decisions: list[object] = []
    schedule = scheduler.schedule

    def noted() -> object:
        batch = schedule()
        if batch is not None:
            decisions.append([(e.sequence.request_id, *e[1:4], tuple(e.block_table)) for e in batch.entries])
        return batch

    scheduler.schedule = noted
    walk_at_random(Loop(scheduler), random.Random(seed), 200)
    return decisions


@pytest.mark.costly
@pytest.mark.parametrize("seed", range(8))
def test_one_full_group_decides_what_a_block_manager_does(seed: int):
    limits = {"max_model_len": 24, "max_num_batched_tokens": 12, "max_num_seqs": 4, "long_prefill_token_threshold": 8}
    plain = make_scheduler(num_kv_blocks=10, block_size=3, **limits)
    assert batches_of(make_group_scheduler([FULL], [10], block_size=3, **limits), seed) == batches_of(plain, seed)
