"""Everything at once under any order of calls; `tests.support.whole_fuzz` runs the same walks at any size."""

from collections import Counter
from functools import cache, partial

import pytest

from nanovllm.block_manager import BlockManager, BlockPool
from nanovllm.engine import Engine
from nanovllm.features.groups.state_blocks import StateBlocks
from nanovllm.features.speculation.speculation import Speculation
from nanovllm.features.tiers.books import TierBooks
from nanovllm.sequence import Sequence
from tests.support.whole_fuzz import walk

NUM_WALKS = 48

SITUATIONS = (
    "num_preemptions", "prefix_cache_hits", "blocks shared within a step", "samples", "prefix_cache_evictions",
    "num_failed_steps", "interrupts", "late draws", "preempted in flight", "aborted in flight", "non-finite",
    "ordered by age", "clients beside each other", "bounds checked", "slots taken", "refused", "streamed",
    "dropped streams", "forked", "resumed", "beam searches", "num_accepted_tokens", "num_failures", "goals", "states",
    "updates under way", "deaths", "closed early", "num_stored_blocks", "num_loaded_blocks", "idle work",
    "idle beside queued copies", "num_host_evictions", "num_written_blocks", "num_read_blocks", "num_failed_reads",
    "files given up", *(f"ends by {reason}" for reason in ("stop", "length", "abort", "error", "timeout")),
)  # fmt: skip


@cache
def met(first):
    """What the walks from one seed on meet."""
    return sum((walk(seed) for seed in range(first, first + NUM_WALKS)), Counter())


@pytest.mark.costly
@pytest.mark.parametrize("first", range(0, 8 * NUM_WALKS, NUM_WALKS))
def test_whatever_is_called_every_request_ends_with_its_tokens_and_nothing_is_left(first):
    assert met(first)["num_steps"] > 1500


def test_the_walks_meet_each_feature():
    assert not [situation for situation in SITUATIONS if not met(0)[situation]], met(0)


def test_a_seed_decides_a_walk():
    assert walk(1) == walk(1)


def early_free(real, pool, blocks):
    real(pool, blocks)
    if blocks and pool.ref_counts[blocks[0]]:
        real(pool, blocks[:1])


def early_name(real, manager, sequence, first, end, step_id):
    real(manager, sequence, first, min(end + 1, len(sequence.block_table)), step_id)


def one_draft_more(real, speculation, entry, drawn, *others):
    for index, draft in enumerate(entry.draft):
        if drawn[index] != draft and min(drawn) >= 0:
            drawn[index] = draft
            break
    return real(speculation, entry, drawn, *others)


def early_state(real, states, table, first, end, junctions):
    real(states, table, first, min(end + 1, len(table)), junctions)


def fork_without_copy(real, manager, *arguments):
    num_copies = len(manager.copies)
    table = real(manager, *arguments)
    del manager.copies[num_copies:]
    return table


def block_left(real, manager, sequence, num_kept=0):
    if not num_kept:
        del sequence.block_table[:1]
    real(manager, sequence, num_kept)


FAULTS = {
    "a block freed too early": (BlockPool, "unpin", early_free),
    "a block named before it is full": (BlockManager, "register", early_name),
    "a tier that keeps its content at a reset": (TierBooks, "clear", lambda real, books: None),
    "a draft accepted too many": (Speculation, "_accept", one_draft_more),
    "a state's slot reused too early": (StateBlocks, "free_unseen", early_state),
    "a fork without its copy": (BlockManager, "_shared", fork_without_copy),
    "a failed step that stays findable": (BlockManager, "withdraw", lambda real, manager, step_id: None),
    "a block that an end leaves": (BlockManager, "release", block_left),
    "a deadline that an end leaves": (Engine, "_end_overdue", lambda real, engine: engine.clock()),
    "text behind a stop string": (Sequence, "cut", lambda real, sequence, num_tokens: None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, monkeypatch):
    owner, name, faulty = FAULTS[fault]
    real = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *arguments, **more: partial(faulty, real)(*arguments, **more))
    for seed in range(NUM_WALKS):
        try:
            walk(seed)
        except Exception:
            return
    raise AssertionError(f"{NUM_WALKS} walks do not find {fault}")
