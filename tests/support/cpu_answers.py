"""Greedy answers on the CPU's own kernels, and those of `transformers`."""

import torch

from nanovllm import SamplingParams
from tests.support.tiny_models import random_prompts

OPTIONS = {"block_size": 16, "num_kv_blocks": 129, "max_model_len": 512}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = random_prompts(6, low=1, high=200, seed=5)


def tokens(llm):
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def by_transformers(model):
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        full = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        answers.append(full[0, len(prompt) :].tolist())
    return answers
