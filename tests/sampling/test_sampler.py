"""The sampler: exact distributions, and noise that depends on seed, position and token id alone."""

import itertools
import math

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nanovllm.fast.fast_draws import NUCLEUS_WIDTH, fast_sampler, keep_likely
from nanovllm.features.request_options import RequestOptions
from nanovllm.features.sampling_params import SamplingParams
from nanovllm.sampler import FILTERS as FILTER_STAGES
from nanovllm.sampler import gumbel_noise, noise_keys, token_counters
from nanovllm.sampling_params import mix64, sample_seeds
from tests.support.chi_squared import SIGNIFICANCE, p_value, temperature_p_value
from tests.support.nuclei import nuclei_that_end_exactly, random_logits
from tests.support.public_options import make_sequence
from tests.support.tiny_models import DTYPES

GAMMA = 0x9E3779B97F4A7C15  # SplitMix64's
GAMMA_32, MIX_32 = 0x9E3779B9, ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1))


def request(seed=0, **params):
    return make_sequence([1], seed=seed, **params)


def draw(logits, requests, positions=None):
    positions = positions or list(range(1, len(requests) + 1))
    return fast_sampler(build_stage=RequestOptions).sample(logits.clone(), requests, positions).tolist()


def keys_of(seeds, positions=None):
    """A key of each seed and position, by default of one position."""
    return torch.from_numpy(noise_keys(list(seeds), positions or [5] * len(seeds)))


def noise_of(keys, vocab_size):
    return gumbel_noise(keys, token_counters(vocab_size, keys.device))


def signed(value):
    return value - 2**64 if value >= 2**63 else value


# --------------------------------------------------------------------------------------------------------------- greedy


@pytest.mark.parametrize("vocab_size", [2, 7, 64, 1000, 49_152])
@DTYPES
def test_greedy_gives_ties_to_the_lowest_id(vocab_size, dtype):
    logits = torch.zeros(3, vocab_size, dtype=dtype)
    logits[1, vocab_size // 2 :] = 1.0
    logits[2, [vocab_size - 2, vocab_size - 1]] = 1.0
    assert draw(logits, [request(temperature=0.0)] * 3) == [0, vocab_size // 2, vocab_size - 2]


def test_greedy_and_sampled_rows_mix_without_touching_each_other():
    logits = random_logits(6, 100)
    requests = [request(seed, temperature=float(seed % 2)) for seed in range(6)]
    alone = [draw(logits[row : row + 1], [requests[row]], [row + 1])[0] for row in range(6)]
    assert draw(logits, requests) == alone
    assert [alone[row] for row in (0, 2, 4)] == logits[[0, 2, 4]].argmax(dim=-1).tolist()


def test_a_tiny_temperature_is_greedy_and_overflows_nowhere():
    logits = 1e4 * random_logits(20, 100)
    tokens = draw(logits, [request(seed, temperature=1e-6) for seed in range(20)])
    assert tokens == logits.argmax(dim=-1).tolist()


# --------------------------------------------------------------------------------------- the distribution that is drawn


def by_transformers(logits, params):
    """Probabilities by the library's own warpers, in the documented order."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers(None, logits.clone()).softmax(dim=-1)


def by_us(logits, params):
    return filtered(logits / params.temperature, [params] * len(logits)).softmax(dim=-1)


def filtered(logits, params):
    columns = {name: np.array([getattr(p, name) for p in params], np.float64) for name in FILTER_STAGES}
    inputs = [stage.encode(columns[name]).astype(stage.dtype) for name, stage in FILTER_STAGES.items()]
    return keep_likely(logits, inputs)


FILTERS = [
    {},
    {"temperature": 0.3},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 10},
    {"top_k": 10_000},
    {"top_p": 0.01},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 0.9999},
    {"min_p": 0.01},
    {"min_p": 0.3},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.7},
    {"top_k": 20, "min_p": 0.1},
    {"top_p": 0.9, "min_p": 0.05},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 1.8, "top_k": 50, "top_p": 0.8, "min_p": 0.02},
]


@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("scale", [0.5, 2.0, 8.0])
def test_the_filters_leave_the_distribution_that_transformers_leaves(options, scale):
    params = SamplingParams(**options)
    logits = random_logits(16, 300, scale=scale)
    expected, ours = by_transformers(logits, params), by_us(logits, params)
    assert torch.equal(ours > 0, expected > 0)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


def test_each_row_is_filtered_by_its_own_params():
    logits = random_logits(len(FILTERS), 200)
    params = [SamplingParams(**options) for options in FILTERS]
    temperatures = torch.tensor([p.temperature for p in params])[:, None]
    ours = filtered(logits / temperatures, params).softmax(dim=-1)
    for row, p in enumerate(params):
        torch.testing.assert_close(ours[row], by_transformers(logits[row : row + 1], p)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.9999])
def test_a_nucleus_of_any_size_is_the_one_of_a_full_sort(scale, top_p):
    logits = random_logits(6, 5 * NUCLEUS_WIDTH, scale=scale) + torch.linspace(0, 1e-2, 5 * NUCLEUS_WIDTH)
    logits[0] *= 50  # a row that needs few tokens among some that need many
    expected, ours = by_transformers(logits, SamplingParams(top_p=top_p)), by_us(logits, SamplingParams(top_p=top_p))
    # Sums of thousands of nearly equal float32 numbers differ in their last digits, so by a token or two.
    assert ((ours > 0) ^ (expected > 0)).sum(dim=-1).max() <= 3
    torch.testing.assert_close(ours, expected, atol=1e-3, rtol=0)


def support(logits, **params):
    return by_us(logits[None], SamplingParams(**params))[0].nonzero().flatten().tolist()


@pytest.mark.parametrize(
    "probabilities, params, kept",
    [
        ([0.4, 0.3, 0.2, 0.1], {"top_p": 0.5}, [0, 1]),
        ([0.4, 0.3, 0.2, 0.1], {"top_p": 0.75}, [0, 1, 2]),
        ([0.4, 0.2, 0.2, 0.2], {"top_p": 0.5}, [0, 1, 2, 3]),  # tokens that tie with the one that crosses
        ([0.1, 0.7, 0.2], {"top_p": 0.0001}, [1]),
        ([1.0, 1e-35, 0.006], {"top_p": 1.0}, [0, 1, 2]),
        ([0.5, 0.1, 0.1, 0.1, 0.05], {"top_k": 2}, [0, 1, 2, 3]),  # and with the last of the most probable ones
    ],
    ids=str,
)
def test_filters_keep_the_token_that_crosses_and_all_that_tie_with_it(probabilities, params, kept):
    assert support(torch.tensor(probabilities).log(), **params) == kept


@pytest.mark.parametrize("logits", nuclei_that_end_exactly(), ids=["next to it", "far from it"])
def test_a_token_whose_mass_is_top_p_exactly_is_the_whole_nucleus(logits):
    assert support(logits, top_p=0.5) == [0]
    assert support(logits, top_p=0.50001) == list(range(len(logits)))
    many = NUCLEUS_WIDTH + 6  # more than are looked at first
    assert support(logits.repeat_interleave(many), top_p=0.5) == list(range(many))


def test_min_p_is_relative_to_the_most_probable_token():
    logits = torch.tensor([0.6, 0.29, 0.11]).log()
    assert support(logits, min_p=0.5) == [0]
    assert support(logits, min_p=0.4) == [0, 1]


@pytest.mark.costly
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 2.5}, {"top_k": 8}, {"top_p": 0.8, "temperature": 1.5}, {"min_p": 0.3, "temperature": 0.8}],
    ids=str,
)
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_tokens_are_drawn_with_their_exact_probabilities(options, vary):
    """Over seeds at one position (as over requests) and over positions of one seed (as along one request)."""
    logits = random_logits(1, 20, scale=1.1)
    count = 4000
    numbers = list(range(count))
    one = [request(12345, **options)]
    requests = [request(n, **options) for n in numbers] if vary == "seed" else one * count
    positions = [7] * count if vary == "seed" else [n + 1 for n in numbers]
    counts = torch.bincount(torch.tensor(draw(logits.expand(count, 20), requests, positions)), minlength=20)
    expected = by_transformers(logits, SamplingParams(**options))[0]
    kept = expected > 0
    assert kept.sum() > 2
    assert counts[~kept].sum() == 0
    assert p_value(counts[kept], expected[kept]) > SIGNIFICANCE
    assert temperature_p_value(counts[kept], expected[kept]) > SIGNIFICANCE  # 7 % are found


@pytest.mark.full
def test_successive_tokens_of_one_request_are_drawn_independently():
    logits = torch.zeros(8001, 8)
    tokens = torch.tensor(draw(logits, [request(3)] * 8001))
    pairs = torch.bincount(tokens[:-1] * 8 + tokens[1:], minlength=64)
    assert p_value(pairs, torch.full((64,), 1 / 64)) > SIGNIFICANCE


@pytest.mark.full
def test_requests_of_neighbouring_seeds_draw_independently():
    logits = torch.zeros(4000, 4)
    first, second = (torch.tensor(draw(logits, [request(seed)] * 4000)) for seed in (100, 101))
    pairs = torch.bincount(first * 4 + second, minlength=16)
    assert p_value(pairs, torch.full((16,), 1 / 16)) > SIGNIFICANCE


# ------------------------------------------------------------------------------------------------------------ the noise


def test_the_noise_of_a_token_does_not_depend_on_the_size_of_the_vocabulary():
    keys = keys_of(range(4))
    assert torch.equal(noise_of(keys, 1000)[:, :77], noise_of(keys, 77))


def test_a_requests_token_is_the_same_in_any_row_of_any_batch():
    logits = random_logits(9, 500)
    requests = [request(seed, top_p=0.9) for seed in range(9)]
    positions = list(range(20, 29))
    together = draw(logits, requests, positions)
    order = [5, 2, 8, 0, 7, 1, 3, 6, 4]
    shuffled = draw(logits[order], [requests[n] for n in order], [positions[n] for n in order])
    assert shuffled == [together[n] for n in order]
    assert [draw(logits[n : n + 1], [requests[n]], [positions[n]])[0] for n in range(9)] == together


def test_noise_goes_with_the_token_id_and_not_with_the_rank_among_the_sorted():
    """Among equally probable tokens the one with the largest noise wins, whichever tokens a filter took away."""
    noise = noise_of(keys_of(range(1)), 6)[0]
    kept = torch.tensor([5, 1, 3])
    logits = torch.full((1, 6), -50.0)
    logits[0, kept] = 0.0
    expected = int(kept[noise[kept].argmax()])
    assert draw(logits, [request(0, top_k=3)], [5]) == [expected]


@pytest.mark.parametrize("position", [1, 2, 1000, 2**31])
@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_noise_is_finite_for_every_seed_and_position(seed, position):
    noise = noise_of(keys_of([seed], [position]), 1000)
    assert noise.isfinite().all()
    assert noise.dtype is torch.float32


def test_keys_of_all_seeds_and_positions_are_distinct():
    places = [*itertools.product(range(200), repeat=2)]
    assert len(keys_of(*zip(*places, strict=True)).unique()) == len(places)


def test_the_mixer_is_splitmix64():
    """The first output of the authors' reference code from seed 0; with another mixer every seeded sample changes."""
    assert mix64(GAMMA) == 0xE220A8397B1DCDAF


def test_unseeded_requests_get_distinct_seeds_from_engine_seed_and_number():
    seeds = {
        sample_seeds(None, 1, engine_seed=engine_seed, request_number=number)[0]
        for engine_seed in range(50)
        for number in range(50)
    }
    assert len(seeds) == 50 * 50


def test_noise_has_the_mean_variance_and_quantiles_of_the_standard_gumbel_distribution():
    noise = noise_of(keys_of(range(400)), 5000).double().flatten()  # two million
    assert abs(noise.mean() - 0.5772156649) < 0.005  # five standard errors are 0.0045
    assert abs(noise.var() - math.pi**2 / 6) < 0.02
    for probability in (0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999, 0.9999):
        share = (noise <= -math.log(-math.log(probability))).double().mean()
        standard_error = math.sqrt(probability * (1 - probability) / len(noise))
        assert abs(share - probability) < 5 * standard_error


@pytest.mark.parametrize("first, second", [((0, 1), (0, 2)), ((0, 1), (1, 1)), ((7, 9), (9, 7)), ((0, 5), (1, 4))])
def test_noise_of_different_seeds_or_positions_is_uncorrelated(first, second):
    noise = noise_of(keys_of(*zip(first, second, strict=True)), 100_000)
    assert abs(torch.corrcoef(noise)[0, 1]) < 5 / math.sqrt(100_000)


@pytest.mark.parametrize("lag", [1, 2, 64])
def test_noise_of_neighbouring_tokens_is_uncorrelated(lag):
    noise = noise_of(keys_of(range(1)), 100_000)[0]
    assert abs(torch.corrcoef(torch.stack([noise[lag:], noise[:-lag]]))[0, 1]) < 5 / math.sqrt(100_000)


def unmixed_32(value):
    """The inverse of the mixer of 32 bits, to reach any output that we want to see."""
    for shift, factor in reversed(MIX_32):
        value = value * pow(factor, -1, 2**32) % 2**32
        unshifted = value
        for _ in range(32 // shift + 1):
            unshifted = value ^ (unshifted >> shift)
        value = unshifted
    return value


def noise_of_bits(bits, *, token_id=3, low=0x12345678):
    """The noise of a token whose 32 random bits are these."""
    halfway = (low + (token_id + 1) * GAMMA_32) % 2**32
    for shift, factor in MIX_32:
        halfway = (halfway ^ (halfway >> shift)) * factor % 2**32
    key = ((unmixed_32(bits) - halfway) % 2**32) << 32 | low
    return float(noise_of(torch.tensor([signed(key)]), token_id + 1)[0, token_id])


def test_the_largest_noise_lies_far_beyond_what_a_24_bit_uniform_reaches():
    assert noise_of_bits(0) == pytest.approx(-math.log(0.5 * 2**-31), rel=1e-6)  # 22.2
    assert noise_of_bits(0) > 16.7


@pytest.mark.parametrize("step", [1, 2, 3, 1000, 2**16, 2**24, 2**30])
def test_large_noise_is_exact_where_it_decides(step):
    uniform = (step + 0.5) * 2.0**-31
    assert noise_of_bits(step << 1) == pytest.approx(-math.log(-math.log1p(-uniform)), rel=1e-5, abs=1e-6)


def test_keys_that_differ_in_one_half_alone_give_unrelated_noise():
    keys = torch.tensor([5 << 32 | 7, 5 << 32 | 8, 6 << 32 | 7, 5 << 32 | (7 + 2**31), (5 + 2**31 - 2**32) << 32 | 7])
    related = torch.corrcoef(noise_of(keys, 100_000)) - torch.eye(len(keys))
    assert related.abs().max() < 5 / math.sqrt(100_000)


def test_the_smallest_noise_is_finite():
    smallest = noise_of_bits(2**32 - 1)
    assert smallest == pytest.approx(-math.log(24 * math.log(2)), rel=1e-3)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_p": 0.9}], ids=str)
def test_a_token_of_minus_infinity_is_never_drawn_and_poisons_nothing(options):
    logits = torch.zeros(200, 4)
    logits[:, 0] = -math.inf
    tokens = draw(logits, [request(seed, **options) for seed in range(200)])
    assert min(tokens) >= 1


# ----------------------------------------------------------------------------------------------------------- min_tokens


def draw_after(num_output_tokens, logits, **options):
    sequence = request(min_tokens=3, eos_token_ids=(1,), **options)
    sequence.token_ids.extend([1] * num_output_tokens)
    return draw(logits, [sequence], [1 + num_output_tokens])[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_tokens_are_suppressed_until_min_tokens_are_there(temperature):
    logits = torch.tensor([[0.0, 20.0, 20.0, 0.0]])
    options = {"temperature": temperature, "stop_token_ids": [2]}
    assert all(draw_after(n, logits, **options) in (0, 3) for n in range(3))
    assert draw_after(3, logits, **options) in (1, 2)


def test_a_function_cannot_raise_a_stop_token_before_min_tokens():
    raises = {"logits_processors": [lambda ids, row: torch.tensor([0.0, 9.0, 8.0, 1.0])]}
    found = [draw_after(n, torch.zeros(1, 4), temperature=0.0, stop_token_ids=[2], **raises) for n in (2, 3)]
    assert found == [3, 1]


def test_min_tokens_of_one_request_suppresses_nothing_for_its_neighbour():
    logits = torch.tensor([[0.0, 20.0, 0.0, 0.0]] * 2)
    requests = [request(temperature=0.0, eos_token_ids=(1,), min_tokens=count) for count in (3, 0)]
    assert draw(logits, requests) == [0, 1]


def test_an_ignored_end_of_sequence_token_is_not_suppressed_by_min_tokens():
    assert draw_after(0, torch.tensor([[0.0, 20.0, 0.0, 0.0]]), temperature=0.0, ignore_eos=True) == 1


def test_a_top_p_that_float32_rounds_to_0_keeps_the_most_probable_token_alone():
    logits = random_logits(64, 100)
    assert draw(logits, [request(seed, top_p=1e-50) for seed in range(64)]) == logits.argmax(dim=-1).tolist()
