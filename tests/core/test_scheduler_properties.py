"""Any order of calls, any lateness, any failure: every request ends with exactly its tokens, and nothing leaks.

Two drivers of the same rules: hypothesis, which shrinks what it finds, and a seeded walk of thousands of steps.
"""

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanovllm.block_manager import BlockManager
from nanovllm.sequence import Sequence
from tests.support.scheduling import Loop, make_scheduler

MAX_IN_FLIGHT = 3
AGEING = (None, None, 0.5, 4.0)  # powers of two, so that times over them are exact

# Prompts begin with one of these, cut anywhere, so that prefixes are shared, and end inside a block as often as not.
STEMS = ([0] * 24, [1, 2, 3, 4, 5, 6, 7, 0] * 3, [1, 2, 3, 4, 5, 6, 7, 1] * 3)


def make_prompt(stem: int, length: int, tail: list[int]) -> list[int]:
    return STEMS[stem][:length] + tail


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
    )
    if num_hash_bits < 128:
        mask = (1 << num_hash_bits) - 1
        digest = BlockManager._digest
        scheduler.block_manager._digest = lambda data: bytes([digest(data)[0] & mask])
    return Loop(scheduler)


def reset_prefix_cache(loop: Loop) -> None:
    loop.manager.reset_prefix_cache()
    loop.check()


def drop_computed(loop: Loop) -> None:
    """What the engine does when the weights changed."""
    while loop.in_flight:
        loop.read()
    loop.scheduler.preempt_all()
    loop.manager.reset_prefix_cache()
    loop.check()


def end(loop: Loop, depth: int) -> None:
    """Run to the end; Loop.drain bounds the number of steps, so that starvation is an error."""
    loop.drain(depth)
    loop.check_outputs()
    loop.manager.reset_prefix_cache()
    loop.check()
    assert loop.launch() is None
    assert not loop.unfinished


# ------------------------------------------------------------------------------------------------------ hypothesis


class SchedulerMachine(RuleBasedStateMachine):
    """Loop checks every invariant after each call, and the mock model every read of every step."""

    @initialize(
        block_size=st.sampled_from([1, 2, 3, 4]),
        max_model_len=st.integers(6, 28),
        num_spare_blocks=st.integers(0, 5),
        num_spare_tokens=st.integers(0, 12),
        max_num_seqs=st.integers(1, 6),
        threshold_blocks=st.integers(1, 6),
        max_num_partial_prefills=st.integers(1, 3),
        max_long_partial_prefills=st.integers(1, 2),
        enable_prefix_caching=st.sampled_from([True, True, True, False]),
        num_hash_bits=st.sampled_from([128, 128, 2, 0]),
        priority_ageing_s=st.sampled_from(AGEING),
    )
    def start(self, **limits: int) -> None:
        self.loop = make_tiny_loop(**limits)
        self.max_model_len = limits["max_model_len"]

    @rule(
        stem=st.integers(0, len(STEMS) - 1),
        length=st.integers(0, 24),
        tail=st.lists(st.integers(0, 7), min_size=1, max_size=3),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        cache_salt=st.sampled_from(["", "", "", "salt"]),
        max_tokens=st.one_of(st.none(), st.integers(1, 12)),
        stop_token_ids=st.sampled_from([(), (), (0,), (3, 5)]),
    )
    def add(self, stem: int, length: int, tail: list[int], **options: object) -> None:
        self.loop.add(make_prompt(stem, length, tail)[: self.max_model_len - 1], **options)

    @rule(seconds=st.integers(1, 9))
    def let_time_pass(self, seconds: int) -> None:
        self.loop.now += seconds

    @precondition(lambda self: len(self.loop.in_flight) < MAX_IN_FLIGHT)
    @rule()
    def launch(self) -> None:
        self.loop.launch()

    @precondition(lambda self: self.loop.in_flight)
    @rule()
    def read(self) -> None:
        self.loop.read()

    @rule(num_steps=st.integers(1, 8), depth=st.integers(1, MAX_IN_FLIGHT))
    def run_for_a_while(self, num_steps: int, depth: int) -> None:
        while len(self.loop.in_flight) >= depth:
            self.loop.read()
        for _ in range(num_steps):
            self.loop.launch()
            if len(self.loop.in_flight) >= depth:
                self.loop.read()

    @precondition(lambda self: self.loop.in_flight)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        self.loop.fail(data.draw(st.integers(0, len(self.loop.in_flight) - 1)))

    @precondition(lambda self: self.loop.unfinished)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.loop.abort(data.draw(st.sampled_from(self.loop.unfinished)))

    @precondition(lambda self: self.loop.unfinished and len(self.loop.in_flight) < MAX_IN_FLIGHT)
    @rule(data=st.data())
    def turn_non_finite(self, data: st.DataObject) -> None:
        victims = data.draw(st.sets(st.sampled_from(self.loop.unfinished), min_size=1, max_size=2))
        self.loop.launch(non_finite={sequence.request_id for sequence in victims})

    @rule()
    def reset_prefix_cache(self) -> None:
        reset_prefix_cache(self.loop)

    @rule()
    def drop_computed(self) -> None:
        drop_computed(self.loop)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "loop"):
            self.loop.check()

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            end(self.loop, depth=2)


TestAnyOrderOfCalls = SchedulerMachine.TestCase
TestAnyOrderOfCalls.settings = settings(
    max_examples=400, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


# ----------------------------------------------------------------------------------------------------- seeded walk


def walk(seed: int, num_calls: int) -> Loop:
    """`num_calls` calls in random order on a random tiny engine, then to the end."""
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
        max_long_partial_prefills=rng.randint(1, 2),
        enable_prefix_caching=rng.random() < 0.9,
        num_hash_bits=rng.choice((128, 128, 128, 2)),
        priority_ageing_s=rng.choice(AGEING),
    )
    depth = rng.randint(1, MAX_IN_FLIGHT)

    def add() -> None:
        if len(loop.unfinished) < 12:
            tail = [rng.randrange(8) for _ in range(rng.randint(1, 3))]
            loop.add(
                make_prompt(rng.randrange(len(STEMS)), rng.randint(0, 24), tail)[: max_model_len - 1],
                priority=rng.choice((0, 0, 0, 1, -1)),
                cache_salt=rng.choice(("", "", "", "salt")),
                max_tokens=rng.choice((None, rng.randint(1, 12))),
                stop_token_ids=rng.choice(((), (), (0,), (3, 5))),
            )

    def launch(non_finite: tuple[str, ...] = ()) -> None:
        loop.now += rng.choice((0, 0, 1, 3))
        if len(loop.in_flight) >= depth:
            loop.read()
        loop.launch(non_finite)

    def read() -> None:
        if loop.in_flight:
            loop.read()

    def one_of_the_unfinished() -> list[Sequence]:
        return [rng.choice(loop.unfinished)] if loop.unfinished else []

    def fail() -> None:
        if loop.in_flight:
            loop.fail(rng.randrange(len(loop.in_flight)))

    def abort() -> None:
        for sequence in one_of_the_unfinished():
            loop.abort(sequence)

    def turn_non_finite() -> None:
        launch(tuple(sequence.request_id for sequence in one_of_the_unfinished()))

    calls = {add: 30, launch: 100, read: 10, fail: 5, abort: 4, turn_non_finite: 4}
    calls |= {lambda: reset_prefix_cache(loop): 1, lambda: drop_computed(loop): 1}
    for call in rng.choices(list(calls), list(calls.values()), k=num_calls):
        call()
    end(loop, depth)
    return loop


NUM_WALKS = 60


@pytest.fixture(scope="module")
def walks() -> list[Loop]:
    return [walk(seed, num_calls=200) for seed in range(NUM_WALKS)]


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
        "evictions",
        "failed steps",
        "late registrations",
        "preempted in flight",
        "aborted in flight",
        "dropped in flight",
        "non-finite",
        "ordered by age",
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
        met["evictions"] += loop.manager.num_evictions
        met["failed steps"] += stats.num_failed_steps
    assert met[situation] > 20
