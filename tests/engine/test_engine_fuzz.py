"""Any order of calls, any lateness, any failure: every request ends with exactly its tokens, and nothing leaks.

`Loop` checks every invariant of scheduler and block manager after every call, and the mock model every read.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from nanovllm.block_manager import BlockManager
from tests.engine.loops import MAX_IN_FLIGHT, Loop, make_scheduler

NUM_WALKS, NUM_CALLS = 60, 160
STEMS = ([0] * 24, [1, 2, 3, 4, 5, 6, 7, 0] * 3, [1, 2, 3, 4, 5, 6, 7, 1] * 3)  # prompts begin alike


def tiny_loop(rng: random.Random) -> Loop:
    """A pool hardly larger than one sequence, a budget hardly larger than allowed, and hashes that may collide."""
    block_size, max_model_len, max_num_seqs = rng.randint(1, 4), rng.randint(8, 28), rng.randint(1, 6)
    max_long = rng.choice((1, 2, 6))
    scheduler = make_scheduler(
        block_size=block_size,
        enable_prefix_caching=rng.random() < 0.9,
        max_model_len=max_model_len,
        num_kv_blocks=1 + -(-max_model_len // block_size) + rng.randint(0, 6),
        max_num_batched_tokens=max_num_seqs + block_size + rng.randint(0, 16),
        max_num_seqs=max_num_seqs,
        long_prefill_token_threshold=rng.randint(1, 6) * block_size,
        max_long_partial_prefills=max_long,
        max_num_partial_prefills=max(max_long, rng.randint(1, 3)),
        priority_ageing_s=rng.choice((None, 0.5, 4.0)),
    )
    if rng.random() < 0.25:
        digest = BlockManager._digest
        scheduler.block_manager._digest = lambda data: bytes([digest(data)[0] & 3])
    return Loop(scheduler)


def walk(seed: int) -> Loop:
    """Calls in random order, then to the end."""
    rng = random.Random(seed)
    loop = tiny_loop(rng)
    depth = rng.randint(1, MAX_IN_FLIGHT)
    max_model_len = loop.scheduler.config.max_model_len

    def add() -> None:
        if len(loop.unfinished) < 12:
            prompt = rng.choice(STEMS)[: rng.randint(0, 24)] + [rng.randrange(8) for _ in range(rng.randint(1, 3))]
            loop.add_samples(
                rng.choice((1, 1, 1, 2, 4)),
                prompt[: max_model_len - 1],
                priority=rng.choice((0, 0, 0, 1, -1)),
                cache_salt=rng.choice(("", "", "", "salt")),
                max_tokens=rng.choice((None, rng.randint(1, 12))),
                stop_token_ids=rng.choice(((), (), (0,), (3, 5))),
            )

    def launch(non_finite: tuple[str, ...] = ()) -> None:
        loop.now += rng.choice((0, 1, 3))
        if len(loop.in_flight) >= depth:
            loop.read()
        loop.launch(non_finite)

    def turn_non_finite() -> None:
        launch(tuple(sequence.request_id for sequence in rng.sample(loop.unfinished, min(1, len(loop.unfinished)))))

    def read() -> None:
        if loop.in_flight:
            loop.read()

    def fail() -> None:
        if loop.in_flight:
            loop.fail(rng.randrange(len(loop.in_flight)), has_failed=rng.random() < 0.7)

    def abort() -> None:
        if loop.unfinished:
            loop.abort(rng.choice(loop.unfinished))

    def forget() -> None:
        """As an engine whose weights changed, or whose user resets the cache."""
        if rng.random() < 0.5:
            while loop.in_flight:
                loop.read()
            loop.scheduler.preempt_all()
        loop.manager.reset_prefix_cache()
        loop.check()

    calls = {add: 30, launch: 100, read: 10, fail: 6, abort: 4, turn_non_finite: 4, forget: 2}
    for call in rng.choices(list(calls), list(calls.values()), k=NUM_CALLS):
        call()
    loop.drain(depth)
    loop.check_outputs()
    return loop


@pytest.fixture(scope="module")
def walks() -> list[Loop]:
    return [walk(seed) for seed in range(NUM_WALKS)]


def test_thousands_of_steps_end_every_request_with_exactly_its_tokens(walks: list[Loop]):
    assert sum(loop.scheduler.stats.num_steps for loop in walks) > 4000
    reasons = Counter(sequence.finish_reason for loop in walks for sequence in loop.sequences)
    assert set(reasons) == {"stop", "length", "abort", "error"} and min(reasons.values()) > 10


def test_the_walks_meet_every_situation(walks: list[Loop]):
    met: Counter[str] = Counter()
    for loop in walks:
        stats = loop.scheduler.stats
        met.update(loop.seen)
        met["preemptions"] += stats.num_preemptions
        met["prefix-cache hits"] += stats.prefix_cache_hits
        met["blocks shared within a step"] += loop.model.num_shared_in_step
        met["forked samples"] += loop.model.num_forked
        met["evictions"] += loop.manager.num_evictions
        met["failed steps"] += stats.num_failed_steps
    assert len(met) == 11 and min(met.values()) > 10, met
