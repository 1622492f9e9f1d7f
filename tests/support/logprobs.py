"""Requests for log-probabilities, checked against a plain forward pass of `transformers`."""

import math

import torch

from nanovllm import SamplingParams
from tests.support.tiny_models import sharing_prompts


def log_softmax(model, token_ids):
    """[num_tokens, vocab_size]: row p is for the token at position p + 1."""
    with torch.no_grad():
        return model(torch.tensor([token_ids], device=model.device)).logits[0].log_softmax(dim=-1).cpu()


def assert_reports(report, expected, token_id, count, atol=1e-4):
    """The token first, then the `count` most probable ones, each with its value and rank in `expected` [vocab_size].

    Tokens nearer to each other than the two computations may change places.
    """
    assert next(iter(report)) == token_id
    assert len(report) in (count, count + 1)
    values = expected.numpy()
    ranks = [rank for _, rank in report.values()]
    assert set(range(1, count + 1)) <= set(ranks)
    for reported, (logprob, rank) in report.items():
        assert math.isclose(logprob, values[reported], rel_tol=1e-6, abs_tol=atol)
        assert 1 + (values > logprob + 2 * atol).sum() <= rank <= (values > logprob - 2 * atol).sum()


def assert_right(model, output, params, atol=1e-4):
    prompt = output.prompt_token_ids
    for completion in output.outputs:
        expected = log_softmax(model, prompt + completion.token_ids)
        if params.logprobs is None:
            assert completion.logprobs is None
        else:
            assert len(completion.logprobs) == len(completion.token_ids)
            for index, token_id in enumerate(completion.token_ids):
                row = expected[len(prompt) - 1 + index]
                assert_reports(completion.logprobs[index], row, token_id, params.logprobs, atol)
    if params.prompt_logprobs is None:
        assert output.prompt_logprobs is None
    else:
        assert len(output.prompt_logprobs) == len(prompt)
        first = max(1, params.prompt_logprobs_start)
        assert output.prompt_logprobs[:first] == [None] * first
        for index in range(first, len(prompt)):
            report, row = output.prompt_logprobs[index], expected[index - 1]
            assert_reports(report, row, prompt[index], params.prompt_logprobs, atol)


def assert_same_reports(reports, others, atol=1e-4):
    """Of the same tokens by two engines: the same ids and ranks, and nearly the same values; None where none is."""
    assert (reports is None) == (others is None)
    for report, other in zip(reports or (), others or (), strict=True):
        assert (report and report.keys()) == (other and other.keys())
        for token_id, (logprob, rank) in (report or {}).items():
            assert math.isclose(logprob, other[token_id].logprob, abs_tol=atol) and rank == other[token_id].rank


def mixed_requests():
    """Requests with and without log-probabilities, some with a shared prefix, with every change of logits."""
    options = [
        {"logprobs": 3, "prompt_logprobs": 2},
        {"temperature": 0.0},
        {"logprobs": 0, "temperature": 0.0},
        {"prompt_logprobs": 0, "top_p": 0.5},
        {"logprobs": 5, "repetition_penalty": 1.5, "presence_penalty": 1.0, "temperature": 0.5, "top_k": 7},
        {"logprobs": 1, "prompt_logprobs": 5, "min_tokens": 8, "stop_token_ids": range(100)},
        {"logprobs": 2, "n": 2, "prompt_logprobs": 1, "allowed_token_ids": range(50, 90)},
    ]
    return sharing_prompts(14, seed=6), [SamplingParams(seed=n, max_tokens=20, **options[n % 7]) for n in range(14)]
