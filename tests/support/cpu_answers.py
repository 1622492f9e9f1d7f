"""Greedy answers on the CPU's own kernels, and those of `transformers`."""

from __future__ import annotations

from typing import Any

import torch

from nanovllm import LLM, SamplingParams
from tests.support.tiny_models import random_prompts

OPTIONS: dict[str, Any] = {"block_size": 16, "num_kv_blocks": 129, "max_model_len": 512}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = random_prompts(6, low=1, high=200, seed=5)


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def by_transformers(model: Any) -> list[list[int]]:
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        full = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        answers.append(full[0, len(prompt) :].tolist())
    return answers
