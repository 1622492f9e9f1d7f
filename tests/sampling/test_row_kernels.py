"""The C++ forms of sampling against torch's: the same tokens, log-probabilities and logits to the last bit."""

import functools
import os

import numpy as np
import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.batch import NON_FINITE
from nanovllm.fast.fast_draws import best_on_cpu, draw_on_cpu, fast_sampler
from nanovllm.fast.kernels.cpp_sampling import MAX_VOCAB_SIZE, RowKernels, load_row_kernels
from nanovllm.features.logprobs.logprobs import Measured, StepLogprobs
from nanovllm.features.penalties.penalties import LatestTokens
from nanovllm.features.request_options import RequestOptions
from nanovllm.sampler import FILTERS as FILTER_STAGES
from nanovllm.sampler import DrawInputs, masses, noise_keys
from nanovllm.sequence import NewRequest, Sequence
from tests.support.nuclei import nuclei_that_end_exactly, random_logits
from tests.support.tiny_models import DTYPES

FILTERS = [
    {}, {"top_k": 1}, {"top_k": 50}, {"top_k": 3000}, {"top_p": 0.95}, {"top_p": 0.2}, {"top_p": 0.99999},
    {"min_p": 0.05}, {"top_p": 1e-38}, {"top_k": 40, "top_p": 0.7}, {"top_p": 0.9, "min_p": 0.02},
    {"top_k": 500, "top_p": 0.99, "min_p": 0.001},
]  # fmt: skip


@functools.cache
def kernels():
    return load_row_kernels()


def inputs_of(num_rows, temperature=1.0, **given):
    ones = np.ones(num_rows, np.float32)
    filters = [np.full(num_rows, given.get(name, 0), stage.dtype) for name, stage in FILTER_STAGES.items()]
    keys = noise_keys(list(range(num_rows)), [7] * num_rows)
    inverse = ones / np.float32(temperature or 1)
    return DrawInputs(keys, inverse, ones * (temperature > 0), *filters, np.zeros(num_rows, np.int32))


def assert_same_tokens(logits, inputs):
    expected = draw_on_cpu(logits, inputs).tolist()
    assert draw_on_cpu(logits, inputs, kernels()).tolist() == expected
    return expected


def hard_rows(vocab_size):
    """Ties, flat rows, one-hot ones, outliers, and values that filters cannot tell apart."""
    plain, steps = random_logits(1, vocab_size)[0], torch.arange(vocab_size) / vocab_size
    one_hot = torch.full((vocab_size,), -torch.inf)
    one_hot[vocab_size // 3] = -4.0
    few = plain.clone()
    few[vocab_size // 2 :] = -torch.inf
    outliers = plain.clone()
    outliers[::7] = -1e30
    return torch.stack([
        plain, plain.round(), torch.zeros(vocab_size), torch.full((vocab_size,), 3e38), one_hot, few, outliers,
        1e-7 * steps, -30 * steps, 1e-30 * steps, 80 * plain, torch.full((vocab_size,), -3e38), -1e37 * steps,
    ])  # fmt: skip


@pytest.mark.parametrize("logits", nuclei_that_end_exactly(), ids=["next to it", "far from it"])
def test_a_nucleus_that_ends_exactly_on_top_p_has_no_token_more(logits):
    for count in (1, 400):  # of each level: sorted at once, or narrowed down
        rows = logits.repeat_interleave(count).expand(64, -1).contiguous()
        assert max(assert_same_tokens(rows, inputs_of(64, top_p=0.5))) < count
        assert max(assert_same_tokens(rows, inputs_of(64, top_p=0.51))) >= count


def test_masses_are_those_of_torch_to_the_bit():
    levels = torch.cat([
        -40 * torch.rand(200_000), -1e-4 * torch.rand(10_000), torch.linspace(-24.4, -24.1, 10_000),
        torch.tensor([0.0, -0.0, -1e-45, -1e-30, -87.3, -1e30, -torch.inf]),
    ])  # fmt: skip
    ours = kernels().masses(levels)
    assert torch.equal(ours, masses(levels))
    torch.testing.assert_close(ours, levels.double().exp(), rtol=0, atol=1e-7)
    assert torch.equal(ours.sum(), ours.flip(0).sum()) and torch.equal(ours * 2**34, (ours * 2**34).round())


@DTYPES
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("vocab_size", [2, 15, 333, 4999])
def test_hard_rows_give_the_same_tokens(vocab_size, filters, dtype):
    logits = hard_rows(vocab_size).to(dtype)
    for temperature in (0.01, 1.0, 40.0):
        tokens = assert_same_tokens(logits, inputs_of(len(logits), temperature, **filters))
        assert min(tokens) >= 0


@pytest.mark.costly
@DTYPES
@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0])
def test_thousands_of_random_rows_give_the_same_tokens(scale, dtype):
    logits = random_logits(1800, 1111, scale=scale).to(dtype)
    for rows, filters in zip(logits.split(len(logits) // len(FILTERS)), FILTERS, strict=True):
        tokens = assert_same_tokens(rows, inputs_of(len(rows), 0.9, **filters))
        assert len(set(tokens)) > 20


@DTYPES
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite_give_no_token_and_harm_no_other(temperature, dtype):
    logits = random_logits(6, 100).to(dtype)
    logits[0, 99], logits[1, 0], logits[2, 17], logits[3] = torch.nan, torch.inf, -torch.inf, -torch.inf
    tokens = assert_same_tokens(logits, inputs_of(6, temperature, top_p=0.9))
    assert [token == NON_FINITE for token in tokens] == [True, True, False, True, False, False]


def test_rows_that_rounding_might_decide_are_drawn_by_torch():
    """Two tokens whose noise is made equal to 1e-6 by their logits: the kernel says that it does not know."""
    logits, inputs = torch.full((1, 40), -50.0), inputs_of(1)
    noise = []
    for token in (3, 30):
        alone = torch.full((1, 40), -torch.inf)
        alone[0, token] = 0.0
        noise.append(best_on_cpu(alone, inputs)[0].item())
    logits[0, 3], logits[0, 30] = 0.0, noise[0] - noise[1]
    least = torch.full((1,), -torch.inf)
    assert kernels().draw(logits, inputs, least).tolist() == [-2]
    assert assert_same_tokens(logits, inputs)[0] in (3, 30)
    logits[0, 30] -= 1e-3
    assert kernels().draw(logits, inputs, least).tolist() == [3]


def test_what_the_kernels_do_not_read_torch_draws():
    logits = random_logits(4, 64)
    assert not kernels().can_read(logits.double()) and not kernels().can_read(logits.T)
    assert not kernels().can_read(torch.empty(1, 1).expand(1, MAX_VOCAB_SIZE + 1))
    for rows in (logits.half(), logits.T.contiguous().T, logits[:, ::2], logits[:, 5:40]):
        assert_same_tokens(rows, inputs_of(4, top_p=0.8))


@DTYPES
@pytest.mark.parametrize("vocab_size", [5, 17, 2000])
@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_log_probabilities_are_the_same_to_the_bit(num_top, vocab_size, dtype):
    logits = hard_rows(vocab_size).to(dtype)
    token_ids = torch.arange(len(logits)) * 7 % (vocab_size + 2) - 1
    for rows in (
        logits,
        logits[:1].contiguous(),
        torch.cat([logits, torch.full((1, vocab_size), torch.nan, dtype=dtype)]),
    ):
        ids = torch.cat([token_ids, token_ids])[: len(rows)]
        ours = Measured.from_logits(rows, ids, num_top, row_kernels=kernels())
        theirs = Measured.from_logits(rows, ids, num_top)
        assert torch.equal(ours.token_ids, theirs.token_ids) and torch.equal(ours.ranks, theirs.ranks)
        torch.testing.assert_close(ours.logprobs, theirs.logprobs, rtol=0, atol=0, equal_nan=True)
    expected = logits.double().log_softmax(dim=-1).gather(1, theirs.token_ids[: len(logits), 1:])
    torch.testing.assert_close(theirs.logprobs[: len(logits), 1:].double(), expected, rtol=1e-6, atol=2e-6)


def test_equal_logits_are_reported_lowest_token_first():
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 3.0]])
    for row_kernels in (None, kernels()):
        measured = Measured.from_logits(logits, torch.tensor([4]), 5, row_kernels=row_kernels)
        assert measured.token_ids.tolist() == [[4, 1, 3, 6, 2, 4]]


OPTIONS = [
    {}, {"repetition_penalty": 1.3}, {"frequency_penalty": 0.7}, {"presence_penalty": -0.4, "top_p": 0.9},
    {"repetition_penalty": 0.7, "frequency_penalty": -0.2, "presence_penalty": 1.1, "logit_bias": {3: 2.5, 9: -8}},
    {"allowed_token_ids": list(range(0, 90, 3)), "repetition_penalty": 1.2, "logprobs": 4},
    {"min_tokens": 40, "logprobs": 2}, {"temperature": 0.0, "repetition_penalty": 1.1, "logprobs": 0},
    {"top_k": 9, "frequency_penalty": 2.0},
]  # fmt: skip


def sequences_of(vocab_size):
    sequences = []
    for number, options in enumerate(OPTIONS * 2):
        generator = np.random.default_rng(number)
        prompt = generator.integers(vocab_size + 20, size=30).tolist()  # some have no logit
        new = NewRequest(str(number), prompt, SamplingParams(**options), bad_words=((5,), (prompt[-1], 6)))
        sequence = Sequence(new, arrival=number, max_model_len=1000, eos_token_ids=(2,), seed=number)
        sequence.token_ids.extend(generator.integers(min(12, vocab_size), size=20 * (number % 3)).tolist())
        sequences.append(sequence)
    return sequences


@DTYPES
@pytest.mark.parametrize("in_flight", [False, True])
def test_requests_of_all_kinds_sample_the_same(dtype, in_flight):
    sequences = sequences_of(vocab_size := 100)
    logits = random_logits(len(sequences), vocab_size).to(dtype)
    positions = [len(sequence.token_ids) + in_flight for sequence in sequences]
    latest = None
    if in_flight:
        previous = torch.randint(0, 12, (len(sequences),), generator=torch.Generator().manual_seed(3))
        previous[1] = NON_FINITE  # its request ends when the step is read
        latest = LatestTokens(-1 - np.arange(len(sequences))[::-1], previous)
    results = []
    for row_kernels in (None, kernels()):
        report = StepLogprobs(row_kernels=row_kernels)
        sampler = fast_sampler(row_kernels=row_kernels, build_stage=RequestOptions)
        changed = sampler.stage.change_logits(logits.clone(), sequences, positions, latest, {})
        tokens = sampler.sample(logits.clone(), sequences, positions, latest, report).tolist()
        results.append((changed, tokens, report._sampled))
    (changed, tokens, measured), (own_changed, own_tokens, own_measured) = results
    assert torch.equal(own_changed, changed) and own_tokens == tokens
    assert torch.equal(own_measured.logprobs, measured.logprobs)
    assert torch.equal(own_measured.token_ids, measured.token_ids)


def test_threads_share_rows_and_change_no_answer():
    logits, inputs = random_logits(40, 3000), inputs_of(40, top_p=0.9)
    before = torch.get_num_threads()
    drawn = []
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            drawn.append(draw_on_cpu(logits, inputs, kernels()).tolist())
            assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)
    assert drawn[0] == drawn[1]


class WithoutMinP:
    """The kernels as they would be if none of them knew min-p."""

    filters = RowKernels.filters - {"min_p"}

    def can_read(self, logits):
        return kernels().can_read(logits)

    def draw(self, logits, inputs, least_levels):
        return kernels().draw(logits, inputs, torch.full_like(least_levels, -torch.inf))


def test_rows_with_a_filter_that_the_kernels_lack_are_drawn_by_torch():
    logits = random_logits(40, 500)
    inputs = inputs_of(40, top_p=0.95, min_p=0.3)
    inputs.min_p[::3] = 0
    expected = draw_on_cpu(logits, inputs).tolist()
    assert draw_on_cpu(logits, inputs, WithoutMinP()).tolist() == expected
    assert draw_on_cpu(logits, inputs._replace(min_p=0 * inputs.min_p)).tolist() != expected


def test_a_fork_draws_in_one_thread_and_does_not_wait_for_its_parents(monkeypatch):
    logits, inputs = random_logits(8, 500), inputs_of(8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    expected = draw_on_cpu(logits, inputs, kernels()).tolist()
    least = torch.full((8,), -torch.inf)
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:  # no assertion and no exit handler of the parent's may run here
        os.write(writer, kernels().draw(logits, inputs, least).tobytes())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert np.frombuffer(pipe.read(), np.int64).tolist() == expected
    os.waitpid(child, 0)
