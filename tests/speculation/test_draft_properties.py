"""Any order of calls with drafts of any quality: every request ends with the tokens that it has without drafts."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from nanovllm.batch import NON_FINITE, NOTHING_LEFT, ScheduledBatch
from nanovllm.features.groups.state_kinds import FULL, StateKind
from nanovllm.features.policies.walk import AGEING, WEIGHTS, walk_at_random
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Sequence
from tests.support.mock_drafts import GuessingDrafter, with_drafts
from tests.support.scheduler_fuzz import SchedulerRules
from tests.support.scheduling import Loop, make_group_scheduler, make_scheduler

WINDOWS = [[FULL, StateKind(window=5)], [StateKind(window=3), StateKind(window=8)], [FULL, StateKind(chunk=6)]]
STATE = StateKind.record(5000)
STATES = ([FULL, STATE], [FULL, StateKind(window=5), STATE])


def make_drafted_loop(rng: random.Random, choices: tuple[list[StateKind] | None, ...] = (None, None, *WINDOWS)) -> Loop:
    """A tiny pool and budget, and drafts that are right as often as not."""
    max_model_len, block_size = rng.randint(8, 28), rng.choice((1, 2, 3, 4))
    max_num_seqs = rng.randint(2, 8)
    num_blocks = 1 + -(-max_model_len // block_size) + rng.randint(0, 6)
    limits = {
        "max_model_len": max_model_len,
        "max_num_batched_tokens": max_num_seqs + block_size + rng.randint(0, 16),
        "max_num_seqs": max_num_seqs,
        "long_prefill_token_threshold": rng.randint(1, 6) * block_size,
        "max_num_partial_prefills": rng.randint(1, 3),
        "max_long_partial_prefills": 1,
        "priority_ageing_s": rng.choice(AGEING),
        "client_weights": rng.choice(WEIGHTS),
    }
    scheduler: Scheduler
    if kinds := rng.choice(choices):
        counts = [num_blocks] * len(kinds)
        if kinds[-1] == STATE:
            counts[-1] = 3 + rng.randint(0, 2 * max_num_seqs)
        scheduler = make_group_scheduler(kinds, counts, block_size=block_size, **limits)
    else:
        caches = rng.random() < 0.9
        scheduler = make_scheduler(
            block_size=block_size, num_kv_blocks=num_blocks, enable_prefix_caching=caches, **limits
        )
    drafter = GuessingDrafter(rng, share_right=rng.choice((0.0, 0.5, 0.9, 1.0)), share_of_steps=rng.choice((0.5, 1.0)))
    return Loop(with_drafts(scheduler, drafter, max_drafts=rng.randint(1, 7)))


class DraftMachine(SchedulerRules):
    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed: int) -> None:
        self.loop = make_drafted_loop(random.Random(seed), (None, None, *WINDOWS, *STATES))
        self.max_model_len = self.loop.scheduler.config.max_model_len


TestAnyOrderOfCallsWithDrafts = DraftMachine.TestCase
TestAnyOrderOfCallsWithDrafts.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.fixture(scope="module", params=[(60, (None, None, *WINDOWS)), (60, STATES)], ids=["paged", "states"])
def walks(request: pytest.FixtureRequest) -> list[Loop]:
    count, kinds = request.param
    return [walk_at_random(make_drafted_loop(rng, kinds), rng, 200) for rng in map(random.Random, range(count))]


def test_thousands_of_random_steps_end_every_request_with_its_tokens(walks: list[Loop]):
    assert sum(loop.scheduler.stats.num_steps for loop in walks) > 2000
    reasons = Counter(sequence.finish_reason for loop in walks for sequence in loop.sequences)
    assert set(reasons) == {"stop", "length", "abort", "error"}


def test_the_walks_meet_drafts_in_every_situation(walks: list[Loop]):
    met: Counter[str] = Counter()
    for loop in walks:
        stats, counts = loop.scheduler.stats, loop.scheduler.proposer.counts
        met.update(loop.seen)
        met["drafted"] += sum(counts.drafted)
        met["accepted"] += sum(counts.accepted)
        met["preemptions"] += stats.num_preemptions
        met["failed steps"] += stats.num_failed_steps
    assert met["drafted"] - met["accepted"] > 300
    for situation in ("accepted", "preemptions", "failed steps", "preempted in flight"):
        assert met[situation] > 5, situation
    assert met["drafted again"] > 0  # rare: logits that are not finite in a run of drafts


def drafted_step() -> tuple[Scheduler, Sequence, ScheduledBatch]:
    """A step with right drafts for a sequence of one output token."""
    scheduler = with_drafts(make_scheduler(), GuessingDrafter(random.Random(0), share_right=1.0))
    loop = Loop(scheduler)
    sequence = loop.add(range(6), max_tokens=12)
    loop.step()
    batch = scheduler.schedule()
    assert len(batch.drafted) == 1 and len(batch.sampling) > 2
    return scheduler, sequence, batch


def test_a_row_that_is_not_finite_leaves_no_token_beside_it_and_no_drafts_behind_it():
    scheduler, sequence, batch = drafted_step()
    sequence.logprobs = [{}, {}]  # of the first token, and of a row of this step
    draws = [*sequence.draft, 0]
    draws[1] = NON_FINITE
    scheduler.update(batch, draws)
    assert not sequence.is_running and len(sequence.logprobs) == sequence.num_output_tokens == 1
    assert scheduler.block_manager.num_findable_blocks == 0
    assert [entry.draft for entry in scheduler.schedule().entries] == [()]
    scheduler.update(scheduler.in_flight[0], [0])
    assert not scheduler.schedule().drafted


def test_an_error_of_a_rejected_row_is_none_of_its_request():
    scheduler, sequence, batch = drafted_step()
    sequence.error = "of the second row"
    scheduler.update(batch, [(sequence.draft[0] + 1) % 8, *[NOTHING_LEFT] * len(sequence.draft)])
    assert sequence.is_running and sequence.error is None and sequence.num_output_tokens == 2
