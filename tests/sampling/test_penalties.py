"""Penalties and allowed tokens, against the processors of `transformers` and against the formulas written out."""

import functools

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from nanovllm import SamplingParams
from nanovllm.features.penalties.penalties import LatestTokens, change_logits, penalty_entries, write_tokens
from tests.support.class_cases import own_answers
from tests.support.llms import OVERLAP, POOLS, generate, greedy, open_llm, token_ids
from tests.support.nuclei import random_logits
from tests.support.public_options import make_sequence
from tests.support.tiny_models import VOCAB_SIZE, random_prompts, tiny_model

VOCAB = 50


def request(prompt, output, **params):
    sequence = make_sequence(prompt, **params)
    sequence.token_ids.extend(output)
    return sequence


def changed(logits, sequences, latest=None):
    waits = [0] * len(sequences) if latest is None else (latest.token_ids < 0).tolist()
    positions = [len(sequence.token_ids) + int(waiting) for sequence, waiting in zip(sequences, waits, strict=True)]
    return change_logits(logits.clone(), sequences, positions, latest)


def logits_of(num_rows, dtype=torch.float32):
    return random_logits(num_rows, VOCAB, seed=1).to(dtype)


def test_the_repetition_penalty_is_that_of_transformers():
    logits = logits_of(3)
    seen = [([1, 2, 2, 3], [7, 7, 9]), ([4], []), ([5, 5], [5, 6])]
    sequences = [request(*tokens, repetition_penalty=p) for tokens, p in zip(seen, (1.3, 0.7, 2.0), strict=True)]
    ours = changed(logits, sequences)
    for row, sequence in enumerate(sequences):
        processor = RepetitionPenaltyLogitsProcessor(sequence.params.repetition_penalty)
        expected = processor(torch.tensor([sequence.token_ids]), logits[row : row + 1])
        torch.testing.assert_close(ours[row : row + 1], expected)


def test_frequency_and_presence_count_the_output_alone():
    logits = logits_of(2)
    first = request([1, 2, 8], [7, 7, 7, 9], frequency_penalty=0.5, presence_penalty=0.25)
    second = request([1], [3], frequency_penalty=-1.0)
    expected = logits.clone()
    expected[0, 7] -= 3 * 0.5 + 0.25
    expected[0, 9] -= 0.5 + 0.25
    expected[1, 3] += 1.0
    torch.testing.assert_close(changed(logits, [first, second]), expected)


def test_a_token_in_flight_counts_like_one_that_is_known():
    logits, params = logits_of(3), {"frequency_penalty": 0.5, "presence_penalty": 0.25, "repetition_penalty": 1.5}
    known = [request([1, 2], [5, 6], **params), request([3], [], **params), request([4], [8], **params)]
    waiting = [request([1, 2], [5], **params), request([3], [], **params), request([4], [], **params)]
    latest = LatestTokens(np.array([-3, 3, -1]), torch.tensor([8, 40, 6]))
    torch.testing.assert_close(changed(logits, waiting, latest), changed(logits, known))


def test_only_allowed_tokens_are_left_and_what_is_not_finite_still_shows():
    logits = logits_of(3)
    logits[1, 30] = torch.nan
    sequences = [request([1], [], allowed_token_ids=[3, 9]), request([1], [], allowed_token_ids=[3]), request([1], [])]
    ours = changed(logits, sequences)
    assert ours[0].isfinite().nonzero().flatten().tolist() == [3, 9]
    assert torch.equal(ours[0, [3, 9]], logits[0, [3, 9]])
    assert ours[1, 30].isnan()
    assert torch.equal(ours[2], logits[2])


def test_biases_are_added_before_penalties():
    logits = logits_of(3)
    first = request([1], [7], logit_bias={7: 4.0, 9: -100.0}, presence_penalty=0.5)
    second = request([1], [5], logit_bias={"3": 1.5, "5": 9.0}, repetition_penalty=2.0)
    expected = logits.clone()
    expected[1, 7] += 4.0 - 0.5
    expected[1, 9] -= 100.0
    expected[2, 3] += 1.5
    expected[2, 5] += 9.0
    for token in (1, 5):
        expected[2, token] = expected[2, token] / 2 if expected[2, token] > 0 else expected[2, token] * 2
    torch.testing.assert_close(changed(logits, [request([1], []), first, second]), expected)


def test_rows_that_ask_for_nothing_stay_what_they_are():
    logits = logits_of(2, torch.bfloat16)
    assert changed(logits, [request([1], [2]), request([3], [])]).dtype == torch.bfloat16
    ours = changed(logits, [request([1], [2]), request([3], [4], presence_penalty=1.0)])
    assert ours.dtype == torch.float32  # where something is added, bfloat16 would round it away
    assert torch.equal(ours[0], logits[0].float())


PENALISED = random_prompts(8, low=3, high=90, seed=2)
REPETITIONS = [1.1, 1.5, 0.8, 1.0] * 2


@functools.cache
def by_transformers():
    model, pairs = tiny_model("qwen3"), zip(PENALISED, REPETITIONS, strict=True)
    return [own_answers(model, [prompt], 30, repetition_penalty=penalty)[0] for prompt, penalty in pairs]


@pytest.mark.costly
@OVERLAP
@pytest.mark.parametrize("pool", ["roomy pool", "tiny pool"])
def test_greedy_tokens_under_a_repetition_penalty_equal_those_of_transformers(pool, overlap):
    params = [greedy(30, repetition_penalty=p) for p in REPETITIONS]
    with open_llm(tiny_model("qwen3"), overlap=overlap, **POOLS[pool]) as llm:
        assert token_ids(generate(llm, PENALISED, params)) == by_transformers()


@pytest.mark.full
def test_penalised_samples_are_the_same_in_every_way_of_stepping():
    prompts = random_prompts(12, low=3, high=90, seed=3)
    options = [{"presence_penalty": 1.5}, {"frequency_penalty": 0.7, "top_p": 0.9}, {"allowed_token_ids": range(9, 99)}]
    params = [SamplingParams(seed=n, max_tokens=30, **options[n % 3]) for n in range(12)]
    answers = []
    for overlap, pool in ((True, "roomy pool"), (False, "tiny pool"), (True, "tiny pool")):
        with open_llm(overlap=overlap, **POOLS[pool]) as llm:
            answers.append(token_ids(generate(llm, prompts, params)))
    with open_llm() as llm:
        alone = [token_ids(generate(llm, [p], s))[0] for p, s in zip(prompts, params, strict=True)]
    assert answers == [alone] * 3
    assert all(set(tokens) <= set(range(9, 99)) for tokens in alone[2::3])
    assert any(len(set(tokens)) < 30 for tokens in alone[0::3])  # a presence penalty forbids nothing


REFUSED = [
    ({"presence_penalty": 2.5}, "presence_penalty is 2.5"),
    ({"frequency_penalty": -2.1}, "frequency_penalty is -2.1"),
    ({"repetition_penalty": 0}, "repetition_penalty is 0"),
    ({"repetition_penalty": float("inf")}, "repetition_penalty is inf"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids is -1"),
    ({"logit_bias": {3: 101}}, "logit_bias is 101"),
    ({"logit_bias": {-3: 1}}, "a token id of logit_bias is -3"),
    ({"bad_words": [""]}, "bad_words holds an empty string"),
    ({"bad_words": [" "]}, "bad_words holds ' ', which holds only whitespace"),
    ({"logprobs": -1}, "logprobs "),
    ({"prompt_logprobs": -1}, "prompt_logprobs "),
    ({"prompt_logprobs_start": 3}, "prompt_logprobs_start is 3 without prompt_logprobs"),
    ({"prompt_logprobs": 0, "prompt_logprobs_start": -1}, "prompt_logprobs_start is -1; it must be at least 0"),
]
OF_ANOTHER_KIND = [
    ("logit_bias", [[3], {"x": 1}, {3: "much"}], "logit_bias"),
    ("bad_words", [[3]], "bad_words must hold strings, not 3"),
    ("bad_words", [3], "bad_words must be a string or a list of them, not 3"),
    ("logits_processors", [3, "name", [3]], "logits_processors must"),
    ("logprobs", [1.5, True], "logprobs "),
    ("prompt_logprobs", [1.5, True], "prompt_logprobs "),
]


@pytest.mark.parametrize("options, message", REFUSED, ids=str)
def test_values_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize("name, values, message", OF_ANOTHER_KIND, ids=str)
def test_values_of_another_kind_are_refused(name, values, message):
    for value in values:
        with pytest.raises(TypeError, match=message):
            SamplingParams(**{name: value})


def test_parameters_stay_hashable():
    assert len({SamplingParams(logit_bias={3: 1.0}), SamplingParams(logit_bias={3: 1.0}), SamplingParams()}) == 2


def test_an_allowed_token_outside_of_the_vocabulary_is_refused_before_anything_runs():
    with open_llm() as llm:
        for option, value in (("allowed_token_ids", (VOCAB_SIZE,)), ("logit_bias", {VOCAB_SIZE: 1.0})):
            with pytest.raises(ValueError, match=f"{option} holds {VOCAB_SIZE}"):
                generate(llm, [[1]], SamplingParams(**{option: value}))
        assert llm.stats().num_steps == 0


def test_what_the_kernel_reads_are_the_tokens_that_its_entries_point_to():
    sequences = [
        request([1, 2, 8], [7, 9], repetition_penalty=1.5),
        request([4, 5], []),
        request([6], [3, 3, 2], presence_penalty=0.5),
    ]
    latest = LatestTokens(np.array([-3, 5, 2]), torch.zeros(4, dtype=torch.int64))
    entries, num_tokens = penalty_entries([0, 2], sequences, [6, 2, 4], latest)
    tokens = np.zeros(num_tokens, np.int32)
    write_tokens(entries, [0, 2], sequences, tokens)
    assert tokens.tolist() == [1, 2, 8, 7, 9, 3, 3, 2]
    assert entries[:, :5].tolist() == [[0, 0, 5, 3, 2], [2, 5, 3, 0, -1]]  # row, start, length, prompt, in flight
    assert entries[:, 5:].view(np.float32).tolist() == [[1.5, 0.0, 0.0], [1.0, 0.0, 0.5]]
    sequences[0].token_ids.append(1)  # nothing holds the array
