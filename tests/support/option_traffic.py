"""Random requests that use every option of a draw, in steps of many sizes, and what is compared of their answers."""

import random

from nanovllm import SamplingParams
from tests.support.llms import check_engine
from tests.support.structured import FORMS, form
from tests.support.tiny_models import VOCAB_SIZE

OPTIONS = [
    {}, {"temperature": 0.0}, {"top_k": 20, "top_p": 0.9}, {"min_p": 0.02},
    {"repetition_penalty": 1.3}, {"frequency_penalty": 0.4, "top_k": 40}, {"presence_penalty": 0.5, "logprobs": 2},
    {"repetition_penalty": 0.8, "logprobs": 12, "top_p": 0.9}, {"logprobs": 0}, {"logprobs": 5}, {"logprobs": 30},
    {"logit_bias": {9: 2.0}}, {"allowed_token_ids": (5, 6, 7, 8)}, {"min_tokens": 4}, {"prompt_logprobs": 1},
    {"bad_words": ("a",)}, {"n": 3, "repetition_penalty": 1.1}, {"logprobs": 3, "n": 2},
    *({"structured_output": form(kind)} for kind in FORMS),
    {"structured_output": form("regex"), "repetition_penalty": 1.2, "top_p": 0.9},
    {"structured_output": form("choice"), "logprobs": 4},
]  # fmt: skip

_OF_TEXTS = "structured_output", "bad_words"


def random_traffic(seed, *, longest, vocab_size=VOCAB_SIZE, has_text=True):
    """Prompts up to `longest` tokens and their parameters: some calls use every option, some a single one.

    Args:
        has_text: whether there is a tokenizer, which some options need.
    """
    choice = random.Random(seed)
    usable = [options for options in OPTIONS if has_text or options.keys().isdisjoint(_OF_TEXTS)]
    count = choice.choice([1, 3, 8, 20])
    chosen = choice.choice([choice.choices(usable, k=count), [choice.choice(usable)] * count])
    lengths = [choice.choice([1, choice.randint(2, 20), choice.randint(2, longest)]) for _ in chosen]
    prompts = [[choice.randrange(4, vocab_size) for _ in range(length)] for length in lengths]
    params = [
        SamplingParams(**({"temperature": 0.9, "seed": number, "max_tokens": choice.randint(1, 25)} | options))
        for number, options in enumerate(chosen)
    ]
    return prompts, params


def answers(llm, seed, **sizes):
    """Each sample's tokens, end and reported tokens, whose log-probabilities depend on a device's rounding."""
    outputs = llm.generate(*random_traffic(seed, **sizes), use_tqdm=False)
    check_engine(llm)
    return [
        [
            (sample.token_ids, sample.finish_reason, [set(reported) for reported in sample.logprobs or ()])
            for sample in output.outputs
        ]
        for output in outputs
    ]
