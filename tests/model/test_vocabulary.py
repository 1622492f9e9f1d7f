"""Embedding and head of different sizes: no token id reaches another row's logits or fails the step."""

import math

import pytest
import torch
from torch import nn

from nanovllm import LLM, SamplingParams
from tests.support import llms
from tests.support.class_cases import own_answers
from tests.support.llms import greedy, token_ids
from tests.support.refusals import assert_names
from tests.support.serving import serving
from tests.support.tiny_models import VOCAB_SIZE, random_prompts, tiny_model, tiny_tokenizer, widen

OPTIONS = {"enforce_eager": True, "block_size": 16, "num_kv_blocks": 65, "max_model_len": 128}
SMALL_HEAD, LARGE_HEAD = VOCAB_SIZE - 112, VOCAB_SIZE + 64
HEADS = pytest.mark.parametrize("num_rows", [SMALL_HEAD, LARGE_HEAD], ids=["small head", "large head"])
PROMPTS = random_prompts(3, low=10, high=40)
GREEDY = greedy(10)


def model_with_head(num_rows):
    """A tiny Llama with an embedding of VOCAB_SIZE rows and a head of `num_rows`."""
    model = tiny_model()
    model.lm_head = nn.Linear(model.config.hidden_size, num_rows, bias=False)
    widen(model)
    return model.eval()


def generate(model, params=GREEDY, prompts=PROMPTS, **options):
    with LLM(model, tokenizer=tiny_tokenizer(), **(OPTIONS | options)) as llm:
        outputs = llms.generate(llm, prompts, params)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * len(prompts)
    return token_ids(outputs)


def by_transformers(model):
    beyond = range(VOCAB_SIZE, model.lm_head.out_features)
    options = {"suppress_tokens": [*beyond]} if beyond else {}
    return own_answers(model, PROMPTS, 10, **options)


def refused(model, **params):
    with LLM(model, tokenizer=tiny_tokenizer(), **OPTIONS) as llm:
        with pytest.raises(ValueError) as caught:
            llms.generate(llm, PROMPTS, SamplingParams(**params))
        assert [len(tokens) for tokens in token_ids(llms.generate(llm, PROMPTS, GREEDY))] == [10, 10, 10]
    return str(caught.value)


@HEADS
@pytest.mark.parametrize("options", [{}, {"enforce_eager": False}], ids=str)
def test_answers_are_those_of_transformers_over_tokens_that_can_be_embedded(num_rows, options):
    model = model_with_head(num_rows)
    assert generate(model, **options) == by_transformers(model)


@HEADS
@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids", "allowed_token_ids"])
def test_parameters_with_a_token_that_cannot_be_drawn_are_refused_with_the_limit(name, num_rows):
    limit = min(num_rows, VOCAB_SIZE)
    value = {limit + 3: 100.0} if name == "logit_bias" else [limit + 3]
    assert_names(refused(model_with_head(num_rows), **{name: value}), name, limit + 3, f"vocabulary of {limit} tokens")


def test_more_logprobs_than_tokens_that_can_be_drawn_are_refused():
    assert_names(refused(model_with_head(SMALL_HEAD), logprobs=SMALL_HEAD + 1), "logprobs", f"at most {SMALL_HEAD}")


def test_a_prompt_with_a_token_beyond_the_embedding_is_refused():
    llm = LLM(model_with_head(LARGE_HEAD), **OPTIONS)
    with pytest.raises(ValueError, match=f"token id {VOCAB_SIZE}, outside the vocabulary of {VOCAB_SIZE}"):
        llms.generate(llm, [[1, VOCAB_SIZE]])


def test_penalties_count_what_has_logits_and_leave_the_neighbours_alone():
    model = model_with_head(SMALL_HEAD)
    assert any(token >= SMALL_HEAD for token in PROMPTS[0])
    penalised = greedy(10, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.5)
    alone = generate(model, penalised, PROMPTS[:1])
    assert generate(model, [penalised, GREEDY, GREEDY]) == alone + by_transformers(model)[1:]


def test_the_repetition_penalty_over_a_prompt_without_logits_is_that_of_its_other_tokens():
    model = model_with_head(SMALL_HEAD)
    with torch.no_grad():
        model.model.embed_tokens.weight[SMALL_HEAD + 1] = model.model.embed_tokens.weight[7]
    penalised = greedy(10, repetition_penalty=1.5)
    prompt = [3, 7, 9, 11]
    expected = generate(model, penalised, [prompt, [*prompt, 7]])
    assert generate(model, penalised, [prompt, [*prompt, SMALL_HEAD + 1]]) == expected


def test_a_bad_word_that_cannot_be_drawn_forbids_nothing_of_the_neighbours():
    word = tiny_tokenizer().decode([SMALL_HEAD + 12])
    assert tiny_tokenizer().encode(word, add_special_tokens=False) == [SMALL_HEAD + 12]
    # In a flat view of the logits, the place of the word is that of token 12 in the row behind.
    params = [greedy(10, bad_words=[word]), greedy(10, logit_bias={12: 100.0}), GREEDY]
    answers = generate(model_with_head(SMALL_HEAD), params)
    assert answers[1] == [12] * 10


def test_an_end_of_sequence_token_that_cannot_be_drawn_is_no_stop_token():
    model = model_with_head(SMALL_HEAD)
    model.generation_config.eos_token_id = [SMALL_HEAD + 5]
    expected = by_transformers(model)
    assert generate(model, greedy(10, min_tokens=5)) == expected


@HEADS
def test_logprobs_are_of_the_distribution_over_tokens_that_can_be_drawn(num_rows):
    model, limit = model_with_head(num_rows), min(num_rows, VOCAB_SIZE)
    params = greedy(1, logprobs=2, prompt_logprobs=2)
    prompt = [*PROMPTS[0], SMALL_HEAD + 3, 5]
    with LLM(model, **OPTIONS) as llm:
        (output,) = llms.generate(llm, [prompt], params)
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, :, :limit].float().log_softmax(dim=-1)
    [report] = output.outputs[0].logprobs
    token = output.outputs[0].token_ids[0]
    assert report[token].logprob == pytest.approx(float(expected[-1].max()), abs=1e-4)
    assert output.prompt_logprobs[0] is None
    for position in range(1, len(prompt)):
        told, row = output.prompt_logprobs[position][prompt[position]], expected[position - 1]
        if prompt[position] >= limit:
            assert told.logprob == -math.inf
            assert told.rank == limit + 1
        else:
            assert told.logprob == pytest.approx(float(row[prompt[position]]), abs=1e-4)
            assert told.rank == 1 + int((row > row[prompt[position]]).sum())


def test_the_server_describes_the_tokens_that_can_be_sampled():
    with serving(model=model_with_head(SMALL_HEAD)) as running, running.http() as http:
        schemas = http.get("/openapi.json").json()["components"]["schemas"]
        fields = schemas["CompletionRequest"]["properties"]
        for token_id, status in ((SMALL_HEAD - 1, 200), (SMALL_HEAD, 400)):
            body = {"prompt": [VOCAB_SIZE - 1], "max_tokens": 1, "logit_bias": {str(token_id): 1.0}}
            assert http.post("/v1/completions", json=body).status_code == status
    assert fields["stop_token_ids"]["items"]["maximum"] == SMALL_HEAD - 1
