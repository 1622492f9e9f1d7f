"""Requests of every kind for one engine, to compare with and without overlap."""

import functools
import random

from nanovllm import SamplingParams
from tests.support.tiny_models import VOCAB_SIZE, sharing_prompts


@functools.cache
def requests():
    """Some share a prefix; they end by length at every slot of a block, by stop tokens and by stop strings."""
    choice = random.Random(3)
    prompts = sharing_prompts(24, seed=4)
    params = []
    for number in range(len(prompts)):
        options = {"temperature": 0.0 if number % 2 else 1.0, "max_tokens": choice.randint(1, 40)}
        if number % 4 == 1:
            options["stop_token_ids"] = tuple(choice.sample(range(VOCAB_SIZE), 40))
        if number % 4 == 2:
            options["stop"] = ("a", "e")
        if number % 5 == 0:
            options["min_tokens"] = min(5, options["max_tokens"])
        if number % 6 == 0:
            options["top_p"] = 0.9
        params.append(SamplingParams(seed=number, **options))
    return prompts, params
