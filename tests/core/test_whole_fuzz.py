"""Everything at once under any order of calls; `tests.support.whole_fuzz` runs the same walks at any size."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.scheduling import Loop
from tests.support.tiers import TieredLoop
from tests.support.whole_fuzz import walk

NUM_WALKS = 80


@pytest.fixture(scope="module")
def walks() -> list[Loop]:
    return [walk(seed) for seed in range(NUM_WALKS)]


def test_whatever_is_called_requests_advance_and_end_with_their_tokens(walks: list[Loop]):
    assert sum(loop.scheduler.stats.num_steps for loop in walks) > 2000
    reasons = Counter(sequence.finish_reason for loop in walks for sequence in loop.sequences)
    assert set(reasons) == {"stop", "length", "abort", "error"}


def test_the_walks_meet_each_feature(walks: list[Loop]):
    met = sum((loop.seen for loop in walks), Counter())
    for loop in walks:
        met["preemptions"] += loop.scheduler.stats.num_preemptions
        met["failed steps"] += loop.scheduler.stats.num_failed_steps
        met["samples"] += loop.model.num_forked
        met["goals"] += loop.scheduler.budget.stats() is not None
        met["tiers"] += isinstance(loop, TieredLoop)
        met["drafts"] += 0 if (stats := loop.scheduler.proposer.stats()) is None else stats.num_accepted_tokens
    for situation in ("forked", "samples", "preemptions", "failed steps", "slots taken", "bounds checked", "stores"):
        assert met[situation] > 4, situation
    assert min(met["goals"], met["tiers"], met["drafts"], met["idle beside queued copies"]) > 4


@pytest.mark.parametrize("seed", [2000297, 5000901, 8000603])
def test_a_prompt_in_progress_is_not_starved_by_another_client_whose_requests_are_older(seed: int):
    """Walks in which it lacked a slot for its state, or lost its blocks, while the other's requests started anew."""
    assert walk(seed).seen["blocks taken"] > 0
