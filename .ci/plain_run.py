"""Prints how many modules of the package the plainest run imports: one Llama layer, `sdpa`, eager, no option.

python .ci/plain_run.py [--list]
"""

from __future__ import annotations

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nanovllm import LLM, SamplingParams


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
    )
    options = {
        "attention_backend": "sdpa",
        "enforce_eager": True,
        "max_model_len": 64,
        "num_kv_blocks": 16,
        "block_size": 16,
    }
    with LLM(LlamaForCausalLM(config).eval(), **options) as llm:
        llm.generate([[1, 2, 3], [4, 5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=3), use_tqdm=False)
    names = sorted(name for name in sys.modules if name.split(".")[0] == "nanovllm")
    print(len(names))
    if "--list" in sys.argv[1:]:
        print(*names, sep="\n")


if __name__ == "__main__":
    main()
