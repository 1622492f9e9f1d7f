"""A draw has the distribution that a dense float64 reference gives, by noise that is the request's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nanovllm.batch import NON_FINITE
from nanovllm.sampler import Sampler
from nanovllm.sampling_params import sample_seeds
from nanovllm.sequence import Sequence
from tests.engine.blocks import MoreParams, make_sequence

OPTIONS = [
    {}, {"temperature": 0.3}, {"temperature": 3.0}, {"top_k": 1}, {"top_k": 5}, {"top_k": 10_000}, {"top_p": 0.05},
    {"top_p": 0.6}, {"top_p": 0.95}, {"min_p": 0.02}, {"min_p": 0.4}, {"top_k": 12, "top_p": 0.7},
    {"temperature": 1.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
]  # fmt: skip
NUM_DRAWS = 3000


def logits_of(num_rows: int, vocab_size: int, *, scale: float = 2.0) -> torch.Tensor:
    return scale * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(1))


def probabilities(logits: torch.Tensor, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """What may be drawn from one row, in float64: each filter keeps tokens as probable as the last one it keeps."""
    scores = logits.double().numpy() / temperature
    if top_k:
        scores[scores < np.sort(scores)[::-1][min(top_k, len(scores)) - 1]] = -np.inf
    if top_p < 1.0:
        ordered = np.sort(scores)[::-1]
        reached = np.cumsum(np.exp(ordered - ordered[0])) / np.exp(ordered - ordered[0]).sum()
        scores[scores < ordered[np.searchsorted(reached, top_p)]] = -np.inf
    if min_p:
        scores[scores < scores.max() + np.log(min_p)] = -np.inf
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def sample(logits: torch.Tensor, sequences: list[Sequence], positions: list[int] | None = None) -> list[int]:
    return Sampler().sample(logits.clone(), sequences, positions or [7] * len(sequences)).tolist()


def many(num: int, **options) -> list[Sequence]:
    return [make_sequence([1], arrival=seed, seed=seed, **options) for seed in range(num)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_tokens_are_drawn_as_often_as_they_are_probable(options):
    (row,) = logits_of(1, 40)
    expected = probabilities(row, **options)
    tokens = sample(row.expand(NUM_DRAWS, 40), [make_sequence([1], seed=5, **options)] * NUM_DRAWS, [*range(NUM_DRAWS)])
    counts = np.bincount(tokens, minlength=40)
    assert counts[expected == 0].sum() == 0
    deviation = np.sqrt(NUM_DRAWS * expected * (1 - expected))
    assert (np.abs(counts - NUM_DRAWS * expected) <= 5 * deviation + 1e-6).all()


def test_greedy_rows_take_the_most_probable_token_and_ties_go_to_the_lowest_id():
    logits = logits_of(20, 100)
    logits[0, [30, 60]] = logits[0].max() + 1
    assert sample(logits, many(20, temperature=0.0)) == [30, *logits[1:].argmax(dim=-1).tolist()]


def test_a_row_draws_the_same_token_in_any_batch_and_in_any_place():
    logits, sequences = logits_of(9, 200), many(9, top_p=0.9)
    sequences[4] = make_sequence([1], temperature=0.0)
    positions = list(range(20, 29))
    together = sample(logits, sequences, positions)
    order = [5, 2, 8, 0, 7, 1, 3, 6, 4]
    shuffled = sample(logits[order], [sequences[n] for n in order], [positions[n] for n in order])
    assert shuffled == [together[n] for n in order]
    assert together == [sample(logits[n : n + 1], [sequences[n]], [positions[n]])[0] for n in range(9)]


def test_another_seed_or_position_is_another_draw():
    logits = torch.zeros(300, 50)
    by_seed = sample(logits, many(300))
    by_position = sample(logits, [make_sequence([1], seed=5)] * 300, [*range(300)])
    assert len({*by_seed}) == len({*by_position}) == 50


def test_a_nucleus_wider_than_what_is_searched_first_is_whole():
    logits = 0.01 * logits_of(40, 5000, scale=1.0)
    expected = probabilities(logits[0], top_p=0.9)
    tokens = sample(
        logits[:1].expand(NUM_DRAWS, 5000), [make_sequence([1], top_p=0.9)] * NUM_DRAWS, [*range(NUM_DRAWS)]
    )
    assert (expected[tokens] > 0).all() and len({*tokens}) > 1024


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_p": 0.5}], ids=str)
def test_a_row_that_is_not_finite_is_reported_and_the_others_are_drawn(bad, options):
    logits = logits_of(3, 50)
    expected = sample(logits, many(3, **options))
    logits[1, 20] = bad
    assert sample(logits, many(3, **options)) == [expected[0], NON_FINITE, expected[2]]


def test_no_rows_have_no_tokens():
    assert sample(torch.zeros(0, 50), []) == []


def test_samples_of_a_request_and_requests_without_a_seed_have_seeds_of_their_own():
    seeds = [seed for number in range(50) for seed in sample_seeds(None, 4, engine_seed=3, request_number=number)]
    assert len({*seeds}) == 200 and all(0 <= seed < 2**64 for seed in seeds)
    assert sample_seeds(9, 3, engine_seed=0, request_number=0)[0] == 9
    assert (
        sample_seeds(9, 2, engine_seed=0, request_number=1) == sample_seeds(9, 3, engine_seed=1, request_number=0)[:2]
    )


def test_options_that_need_another_stage_are_refused():
    with pytest.raises(ValueError, match=r"request '0' has options besides temperature and filters"):
        sample(torch.zeros(1, 50), [make_sequence([1], MoreParams(is_plain=False))])
