"""A block manager may cut chunks where a state is kept, and sequences return there; as recurrent layers will need."""

import random

import pytest

from nanovllm.block_manager import BlockManager
from nanovllm.features.policies.walk import walk_at_random
from nanovllm.scheduler import Scheduler
from tests.engine.loops import chunks
from tests.support.public_options import make_config
from tests.support.scheduling import Loop

GRID = 12  # tokens between the states that are kept: three blocks


class StatesOnAGrid(BlockManager):
    def cut(self, sequence, start, end):
        return min(end, (start // GRID + 1) * GRID)

    def rewindable(self, sequence, num_tokens):
        return num_tokens // GRID * GRID


def make_loop(num_kv_blocks=65, **limits):
    return Loop(Scheduler(make_config(num_kv_blocks=num_kv_blocks, **limits), StatesOnAGrid(num_kv_blocks, 4)))


@pytest.mark.parametrize("threshold", [8, 1024])
def test_no_chunk_passes_a_cut_even_where_budget_is_left(threshold):
    loop = make_loop(long_prefill_token_threshold=threshold)
    loop.add(range(40), max_tokens=1)
    placed = []
    while loop.unfinished:
        placed += chunks(loop.step()).values()
    assert placed == [(0, 12), (12, 24), (24, 36), (36, 40)]


def test_a_token_in_flight_is_read_before_its_position_is_computed_again():
    loop = make_loop()
    sequence = loop.add(range(14), max_tokens=20)
    loop.steps(3)
    loop.launch()
    loop.launch()
    loop.fail(1)
    assert loop.launch() is None
    loop.read()
    loop.finish(2)
    assert len(sequence.output_token_ids) == 20


@pytest.mark.costly
@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_calls_ends_every_request_with_exactly_its_tokens(seed):
    limits = {"max_model_len": 44, "max_num_batched_tokens": 20, "max_num_seqs": 5, "long_prefill_token_threshold": 16}
    loop = walk_at_random(make_loop(num_kv_blocks=17, **limits), random.Random(seed), 200)
    assert loop.scheduler.stats.num_failed_steps > 0
