"""Greedy answers on the CPU's own kernels, and those of `transformers`."""

import pytest
import torch

from nanovllm import SamplingParams
from tests.support.layer_kinds import own_answer
from tests.support.tiny_models import random_prompts

ON_A_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels and the packed weights are a CPU's own")
OPTIONS = {"block_size": 16, "num_kv_blocks": 129, "max_model_len": 512}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = random_prompts(6, low=1, high=200, seed=5)


def tokens(llm):
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def by_transformers(model):
    return [own_answer(model, prompt, 12, min_new_tokens=12) for prompt in PROMPTS]
