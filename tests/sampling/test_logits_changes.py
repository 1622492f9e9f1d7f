"""Bad words and logits processors against `transformers`, and rows with no token left to sample."""

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nanovllm import LLM, ErrorKind, SamplingParams
from nanovllm.batch import NON_FINITE, NOTHING_LEFT
from nanovllm.fast.fast_draws import fast_sampler
from nanovllm.features.intake.pieces import spellings_of
from nanovllm.features.logprobs.logprobs import StepLogprobs
from nanovllm.features.penalties.penalties import LatestTokens, change_logits
from nanovllm.features.request_options import RequestOptions
from nanovllm.sequence import NewRequest, Sequence
from tests.support.chi_squared import SIGNIFICANCE, p_value
from tests.support.class_cases import own_answers
from tests.support.llms import (
    OPTIONS,
    OVERLAP,
    POOLS,
    assert_idle_and_whole,
    check_engine,
    generate,
    greedy,
    open_llm,
    token_ids,
)
from tests.support.nuclei import random_logits
from tests.support.tiny_models import DTYPES, random_prompts, tiny_model, tiny_tokenizer

VOCAB = 50
EVERY_POOL = pytest.mark.parametrize("pool", ["roomy pool", "tiny pool"])


def request(tokens, words=None, *, seed=0, num_outputs=0, **params):
    prompt, output = tokens[: len(tokens) - num_outputs], tokens[len(tokens) - num_outputs :]
    own = SamplingParams(bad_words=["x"] if words else [], **params)
    request = NewRequest("r", prompt, own, bad_words=tuple(map(tuple, words or [])))
    sequence = Sequence(request, arrival=0, max_model_len=1000, seed=seed)
    sequence.token_ids.extend(output)
    return sequence


def random_rows(num_rows):
    return random_logits(num_rows, VOCAB, seed=1)


# ----------------------------------------------------------------------------------------------------------- bad words

WORDS = [[3], [7, 8], [7, 7], [8, 8, 9], [1, 2, 3, 4], [9]]
HISTORIES = [[1], [7], [5, 7], [7, 7], [8, 8], [9, 8, 8], [2, 3], [1, 2, 3], [5, 1, 2, 3], [8]]


def assert_forbidden(ours, logits, histories):
    for row, history in enumerate(histories):
        expected = NoBadWordsLogitsProcessor(WORDS)(torch.tensor([history]), logits[row : row + 1])
        assert torch.equal(ours[row : row + 1], expected)


def test_the_same_tokens_are_forbidden_as_in_transformers():
    logits = random_rows(len(HISTORIES))
    sequences = [request(history, WORDS, num_outputs=n % 2) for n, history in enumerate(HISTORIES)]
    ours = change_logits(logits.clone(), sequences, [len(history) for history in HISTORIES], None)
    assert_forbidden(ours, logits, HISTORIES)


def test_a_newest_token_that_only_the_device_knows_counts_too():
    histories = [history for history in HISTORIES if len(history) > 1]
    logits = random_rows(len(histories))
    in_flight = torch.tensor([history[-1] for history in histories])
    latest = LatestTokens(-1 - np.arange(len(histories))[::-1], in_flight.flip(0))
    sequences = [request(history[:-1], WORDS) for history in histories]
    ours = change_logits(logits.clone(), sequences, [len(history) for history in histories], latest)
    assert_forbidden(ours, logits, histories)


def test_what_is_not_finite_stays_so_behind_a_bad_word():
    logits = random_rows(1)
    logits[0, 3] = torch.inf
    assert change_logits(logits, [request([1], WORDS)], [1], None)[0, 3].isnan()


def test_a_word_is_spelt_with_and_without_a_space_in_front():
    tokenizer = tiny_tokenizer()
    spellings = spellings_of(["answer", " token", "answer"], tokenizer)
    texts = [tokenizer.decode(token_ids) for token_ids in spellings]
    assert texts == ["answer", " answer", "token", " token"]


@pytest.mark.full
@OVERLAP
@EVERY_POOL
def test_greedy_tokens_without_bad_words_are_those_of_transformers(pool, overlap):
    model, tokenizer = tiny_model("qwen3"), tiny_tokenizer()
    prompts = random_prompts(6, low=3, high=90, seed=2)
    with open_llm(model, overlap=overlap, **POOLS[pool]) as llm:
        # What they say without, in pieces of one token and of two: so that each of the words matters.
        said = token_ids(generate(llm, prompts, greedy(30)))
        words = [[tokenizer.decode(s[:1]), tokenizer.decode(s[4:6]), tokenizer.decode(s[9:12])] for s in said]
        words = [[word for word in ws if word.strip() and "\ufffd" not in word] for ws in words]
        found = token_ids(generate(llm, prompts, [greedy(30, bad_words=ws) for ws in words]))
    for prompt, tokens, ws in zip(prompts, found, words, strict=True):
        processor = NoBadWordsLogitsProcessor([list(spelling) for spelling in spellings_of(ws, tokenizer)])
        assert [tokens] == own_answers(model, [prompt], 30, logits_processor=LogitsProcessorList([processor]))
    assert sum(tokens != s for tokens, s in zip(found, said, strict=True)) >= 3


def test_a_text_never_holds_a_bad_word_of_several_tokens():
    tokenizer = tiny_tokenizer()
    (first, *_), length = spellings_of(["question"], tokenizer), 40
    assert len(first) > 1
    tempted = dict.fromkeys(first, 8.0)  # so that it would come all the time
    params = [
        SamplingParams(seed=n, max_tokens=length, logit_bias=tempted, bad_words=w)
        for n in range(8)
        for w in ([], ["question"])
    ]
    with open_llm(tiny_model()) as llm:
        texts = [output.outputs[0].text for output in generate(llm, [[5, 6, 7]] * 16, params)]
    assert any("question" in text for text in texts[0::2])
    assert not any("question" in text for text in texts[1::2])


def test_bad_words_without_a_tokenizer_are_refused_before_anything_runs():
    with LLM(tiny_model(), **OPTIONS) as llm:
        with pytest.raises(ValueError, match="bad_words need a tokenizer"):
            generate(llm, [[5]], SamplingParams(bad_words=["x"]))
        assert llm.stats().num_steps == 0


# ---------------------------------------------------------------------------------------------------------- processors


def counting(token_ids, row):
    """A token's logit falls with each time that it stands anywhere, most for the newest: every token counts."""
    for place, token_id in enumerate(token_ids):
        row[token_id] -= 0.5 + place / len(token_ids)
    return row


class Counting:
    """The same for `transformers`."""

    def __call__(self, input_ids, scores):
        return torch.stack([counting(ids, row.clone()) for ids, row in zip(input_ids.tolist(), scores, strict=True)])


@pytest.mark.costly
@OVERLAP
@EVERY_POOL
def test_a_processor_sees_every_token_and_acts_as_in_transformers(pool, overlap):
    model, prompts = tiny_model("qwen3"), random_prompts(6, low=3, high=90, seed=2)
    ours = [{"logits_processors": counting}, {"logits_processors": [counting], "repetition_penalty": 1.3}, {}]
    counts = {"logits_processor": LogitsProcessorList([Counting()])}
    theirs = [counts, counts | {"repetition_penalty": 1.3}, {}]
    with open_llm(model, overlap=overlap, **POOLS[pool]) as llm:
        found = token_ids(generate(llm, prompts, [greedy(25, **options) for options in ours * 2]))
        check_engine(llm)
    for prompt, tokens, options in zip(prompts, found, theirs * 2, strict=True):
        assert [tokens] == own_answers(model, [prompt], 25, **options)


def test_with_overlap_a_request_with_a_processor_gets_a_token_in_every_step():
    """The forward pass runs ahead; the draw waits for the host to read the step before."""
    with open_llm(overlap=True) as llm:
        plain = greedy(20, ignore_eos=True)
        slow = greedy(20, ignore_eos=True, logits_processors=counting)
        for params in ([plain], [slow], [plain, slow]):
            before = llm.stats().num_steps
            generate(llm, [[5, 6], [7, 8]][: len(params)], params)
            assert llm.stats().num_steps - before == 20


def test_processors_act_in_turn_and_a_copy_of_their_row_may_be_kept():
    kept = []

    def keep(_, row):
        kept.append(row)
        return row + 1

    def double(_, row):
        return row * 2

    logits = random_rows(2)
    ours = change_logits(logits.clone(), [request([1], logits_processors=[keep, double]), request([1])], [1, 1], None)
    torch.testing.assert_close(ours[0], (logits[0] + 1) * 2)
    assert torch.equal(kept[0], logits[0])
    assert torch.equal(ours[1], logits[1])


def fails(token_ids, row):
    if len(token_ids) > 5:
        raise KeyError("lost")
    return row


@OVERLAP
@pytest.mark.parametrize(
    "processor, message, num_tokens",
    [
        (fails, r"its logits processor failed \(KeyError: 'lost'\)", 3),
        (lambda ids, row: None, "it returned None; it must return logits of shape", 0),
        (lambda ids, row: row[:5], r"it returned a tensor of shape \[5\]", 0),
    ],
)
def test_a_processor_that_fails_ends_its_request_and_no_other(processor, message, num_tokens, overlap):
    prompt = [5, 6, 7]
    with open_llm(overlap=overlap) as llm:
        (alone,) = generate(llm, [prompt], greedy(8))
        bad, good = generate(llm, [prompt] * 2, [greedy(8, logits_processors=processor), greedy(8)])
        assert_idle_and_whole(llm)
    assert good.outputs[0].token_ids == alone.outputs[0].token_ids
    assert bad.outputs[0].finish_reason == "error"
    assert bad.error_kind is ErrorKind.REQUEST and good.error_kind is None
    assert len(bad.outputs[0].token_ids) == num_tokens
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(bad.error)


# -------------------------------------------------------------------------------------------------------- nothing left


@DTYPES
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "options",
    [
        {"allowed_token_ids": [3], "words": [[3]]},
        {"logits_processors": lambda _, row: torch.full_like(row, -torch.inf)},
        {"allowed_token_ids": [3], "stop_token_ids": [3], "min_tokens": 1},
    ],
    ids=["bad words", "logits processor", "min tokens"],
)
def test_a_row_without_allowed_tokens_is_distinguished_from_a_non_finite_one(options, temperature, dtype):
    logits = random_rows(3).to(dtype)
    logits[2, 9] = torch.nan
    sequences = [request([1], temperature=temperature, **own) for own in ({}, options, options)]
    sampler = fast_sampler(build_stage=RequestOptions)
    tokens = sampler.sample(logits, sequences, [1, 1, 1], None, StepLogprobs()).tolist()
    assert tokens[0] >= 0
    assert tokens[1:] == [NOTHING_LEFT, NON_FINITE]


@OVERLAP
def test_a_request_that_forbids_everything_ends_with_an_error_that_says_so(overlap):
    prompt = random_prompts(1, low=40, high=40)[0]
    params = SamplingParams(max_tokens=5, allowed_token_ids=[65], bad_words=[tiny_tokenizer().decode([65])], logprobs=1)
    with open_llm(overlap=overlap) as llm:
        (output,) = generate(llm, [prompt], params)
        assert output.outputs[0].finish_reason == "error"
        assert output.outputs[0].token_ids == output.outputs[0].logprobs == []
        assert "no token is left to draw after 40 tokens: allowed_token_ids, bad_words" in output.error
        # The prompt was computed well, so its blocks stay findable.
        (again,) = generate(llm, [prompt], greedy(1))
        assert again.num_cached_tokens == 32


# ---------------------------------------------------------------------------------------------------------- all at once


@pytest.mark.full
def test_all_of_it_together_draws_the_distribution_of_the_processors_of_transformers():
    """In the documented order; the allowed tokens and the frequency penalty, which they lack, are written out."""
    history, num_draws, size = [4, 9, 4, 7, 1], 6_000, 24
    logits = random_logits(1, size, scale=1.0, seed=4)
    allowed = list(range(20))
    sequences = [
        request(
            history, [[3], [7, 1, 5]], seed=seed, num_outputs=3, allowed_token_ids=allowed, temperature=0.8,
            logit_bias={2: 1.5, 6: -2.0}, repetition_penalty=1.4, frequency_penalty=0.3, presence_penalty=-0.5,
            top_k=15, top_p=0.95, min_p=0.02,
        )
        for seed in range(num_draws)
    ]  # fmt: skip
    sampler = fast_sampler(build_stage=RequestOptions)
    tokens = sampler.sample(logits.repeat(num_draws, 1), sequences, [len(history)] * num_draws)

    expected, ids = logits.clone(), torch.tensor([history])
    expected[:, [token for token in range(size) if token not in allowed]] = -torch.inf
    first = [
        NoBadWordsLogitsProcessor([[3], [7, 1, 5]]),
        SequenceBiasLogitsProcessor([[[2], 1.5], [[6], -2.0]]),
        RepetitionPenaltyLogitsProcessor(1.4),
    ]
    expected = LogitsProcessorList(first)(ids, expected)
    for token in history[2:]:
        expected[0, token] -= 0.3
    for token in set(history[2:]):
        expected[0, token] += 0.5
    last = [TemperatureLogitsWarper(0.8), TopKLogitsWarper(15), TopPLogitsWarper(0.95), MinPLogitsWarper(0.02)]
    probabilities = LogitsProcessorList(last)(ids, expected)[0].softmax(dim=-1)

    counts = torch.bincount(tokens, minlength=size)
    possible = probabilities > 0
    assert 3 < possible.sum() < size - 5
    assert counts[~possible].sum() == 0
    assert p_value(counts[possible], probabilities[possible]) > SIGNIFICANCE
