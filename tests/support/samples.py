"""Requests with several samples, and their answers in a form to compare."""

import torch

from nanovllm import SamplingParams
from tests.support.tiny_models import sharing_prompts


def tilted(token_ids, row):
    return row - 0.1 * torch.arange(len(row), device=row.device) * (len(token_ids) % 3)


def requests():
    options = [
        {"n": 3, "top_p": 0.9},
        {"bad_words": ["e", "the", "question"], "logprobs": 2},
        {"logits_processors": tilted, "n": 2},
        {"prompt_logprobs": 1, "frequency_penalty": 1.0, "min_p": 0.01},
        {"truncate_prompt_tokens": 30, "stop": ["o"], "include_stop_str_in_output": True, "n": 2},
    ]
    return sharing_prompts(10, seed=4), [SamplingParams(seed=n, max_tokens=12, **options[n % 5]) for n in range(10)]


def answers(outputs):
    return [[(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in output.outputs] for output in outputs]
