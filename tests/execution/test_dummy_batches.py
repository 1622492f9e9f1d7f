"""Batches of no request that compare forms of a model at start-up."""

import itertools

import pytest

from nanovllm.features.costs.dummy_batches import comparison_spans
from nanovllm.features.engine_config import EngineConfig


def spans(**options):
    limits = {"max_model_len": 8192, "block_size": 32, "max_num_seqs": 64, "max_num_batched_tokens": 1024}
    return comparison_spans(EngineConfig(**limits | options))


def test_one_batch_has_rows_of_both_ends_of_the_positions():
    assert spans() == ([[(0, 8), (8183, 8)]], [[(0, 8), (8190, 1)]])


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 16},  # the far rows would write to slots of the near ones
        {"max_model_len": 8200},
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 15, "max_num_seqs": 2},
    ],
)
def test_the_ends_are_batches_of_their_own_where_one_cannot_hold_both(options):
    far = options.get("max_model_len", 8192) - 9
    assert spans(**options)[0] == [[(0, 8)], [(far, 8)]]


@pytest.mark.parametrize("length", [2, 5, 9])
def test_a_model_of_few_positions_has_one_end(length):
    assert spans(max_model_len=length)[0] == [[(0, length - 1)]]


@pytest.mark.costly
@pytest.mark.parametrize("length", range(10, 80))
def test_no_slot_takes_two_rows_of_a_batch(length):
    for batch in itertools.chain(*spans(max_model_len=length)):
        slots = [(start + row) % 32 for start, count in batch for row in range(count)]
        assert len(slots) == len(set(slots))
        assert all(start >= 0 and start + count < length for start, count in batch)
