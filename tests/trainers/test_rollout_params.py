"""Numbers of a draw: those of torch's softmax over the filtered logits, in any company and schedule."""

import pytest
import torch
from transformers import GenerationConfig, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.logits_process import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from nanovllm import LLM, SamplingParams
from nanovllm.trainers import DrawnLogprob, RolloutParams, install, uninstall
from tests.support.llms import generate
from tests.support.tiny_models import random_prompts, tiny_model

SIZES = {"num_kv_blocks": 129, "max_num_seqs": 8, "max_model_len": 160, "max_num_batched_tokens": 64}
PROMPTS = random_prompts(3, low=3, high=70, seed=3)
DRAWS = [
    {}, {"temperature": 0.6}, {"temperature": 1.7}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.02}, {"temperature": 0.01}, {"temperature": 0.0},
    {"temperature": 0.0, "top_k": 3}, {"repetition_penalty": 1.5}, {"temperature": 0.0, "repetition_penalty": 1.5},
    {"logit_bias": {7: 20.0, 9: -100.0}, "top_k": 3}, {"allowed_token_ids": (3, 4, 5, 6), "temperature": 0.8},
    {"top_k": 1},
]  # fmt: skip


def expected_numbers(model, prompt, tokens, params):
    """(drawn, log of the kept mass) of each token [num_tokens, 2], from the model's logits by torch alone."""
    given = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        rows = model(given).logits[0, len(prompt) - 1 : -1].float()
    numbers = []
    for place, token in enumerate(tokens):
        row = rows[place : place + 1].clone()
        if params.allowed_token_ids:
            row[:, [t for t in range(row.shape[1]) if t not in params.allowed_token_ids]] = -torch.inf
        for other, bias in params.logit_bias.items():
            row[:, other] += bias if bias > -100 else -torch.inf
        if params.repetition_penalty != 1:
            row = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(given[:, : len(prompt) + place], row)
        if params.temperature:
            row /= params.temperature
        filtered = row
        if params.temperature:
            filtered = TopKLogitsWarper(params.top_k)(given, filtered) if params.top_k else filtered
            filtered = TopPLogitsWarper(params.top_p)(given, filtered) if params.top_p < 1 else filtered
            filtered = MinPLogitsWarper(params.min_p)(given, filtered) if params.min_p else filtered
        drawn = filtered.log_softmax(dim=-1)[0, token]
        numbers.append([drawn.item(), (row.log_softmax(dim=-1)[0, token] - drawn).item()])
    return torch.tensor(numbers)


def reported_numbers(output):
    (completion,) = output.outputs
    entries = [next(iter(entry.values())) for entry in completion.logprobs]
    assert all(type(entry) is DrawnLogprob for entry in entries)
    return torch.tensor([[entry.drawn, entry.log_kept] for entry in entries])


def close_to(numbers, expected, temperature):
    tolerance = 2e-5 if temperature >= 0.5 or temperature == 0 else 2e-3  # a division by 0.01 makes errors larger
    torch.testing.assert_close(numbers, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("options", DRAWS, ids=str)
def test_numbers_are_the_softmax_of_the_filtered_logits(options):
    model = tiny_model()
    params = RolloutParams(max_tokens=8, seed=4, **options)
    plain = SamplingParams(max_tokens=8, seed=4, logprobs=0, **options)
    with LLM(model, **SIZES) as llm:
        outputs = generate(llm, PROMPTS, params)
        llm.reset_prefix_cache()  # the same steps again
        others = generate(llm, PROMPTS, plain)
    for prompt, output, other in zip(PROMPTS, outputs, others, strict=True):
        tokens = output.outputs[0].token_ids
        assert tokens == other.outputs[0].token_ids
        assert output.outputs[0].logprobs == other.outputs[0].logprobs  # log-probability and rank of the model itself
        close_to(reported_numbers(output), expected_numbers(model, prompt, tokens, params), params.temperature)


@pytest.mark.parametrize("options", [{}, {"speculation": "suffix"}, {"overlap": False}], ids=str)
def test_numbers_do_not_depend_on_the_company(options):
    """All draws in one batch, with requests that report nothing or tops between them, chunks and decodes."""
    model = tiny_model()
    prompt = PROMPTS[0] * 2
    rollouts = [RolloutParams(max_tokens=8, seed=4, logprobs=index % 3, **own) for index, own in enumerate(DRAWS)]
    company = [SamplingParams(max_tokens=5, top_k=2), SamplingParams(max_tokens=9, logprobs=2, top_p=0.5)]
    mixed = [own for params in rollouts for own in (params, *company)]
    with LLM(model, **SIZES | options) as llm:
        outputs = generate(llm, [prompt] * len(mixed), mixed)
    for params, output in zip(rollouts, outputs[::3], strict=True):
        tokens = output.outputs[0].token_ids
        close_to(reported_numbers(output), expected_numbers(model, prompt, tokens, params), params.temperature)
        assert all(len(entry) in (params.logprobs, 1 + params.logprobs) for entry in output.outputs[0].logprobs)
    plain = (entry for output in outputs[2::3] for entry in output.outputs[0].logprobs)
    assert not any(isinstance(value, DrawnLogprob) for entry in plain for value in entry.values())


def test_the_slot_reports_the_draws_and_the_model_and_the_kept_mass():
    model = tiny_model()
    install(model, **SIZES)
    config = GenerationConfig(max_new_tokens=8, do_sample=True, temperature=0.8, top_k=6, top_p=0.9)
    params = RolloutParams(temperature=0.8, top_k=6, top_p=0.9)
    for result in model.generate_batch(PROMPTS, generation_config=config, seed=1).values():
        expected = expected_numbers(model, result.prompt_ids, result.generated_tokens, params)
        close_to(torch.tensor([result.logprobs, result.log_kept]).T, expected, 0.8)
        free = expected_numbers(model, result.prompt_ids, result.generated_tokens, RolloutParams())
        close_to(torch.tensor(result.model_logprobs), free[:, 0], 1.0)
    uninstall(model)
