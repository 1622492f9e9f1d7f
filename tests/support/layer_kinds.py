"""Tiny random models with layers of several kinds, and what `transformers` generates with them."""

import functools
import random

import torch

from tests.support.other_models import small
from tests.support.tiny_models import VOCAB_SIZE, widen

WINDOW = 24
_TWO_TYPES = ["sliding_attention", "full_attention"]
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {
    "Mistral": {"sliding_window": WINDOW},
    "Gemma2": {"head_dim": 32, "sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "layer_types": _TWO_TYPES},
    "Gemma3Text": {"head_dim": 32, "sliding_window": WINDOW, "layer_types": _TWO_TYPES},
    "GptOss": {"head_dim": 32, "sliding_window": WINDOW, "layer_types": _TWO_TYPES, **_EXPERTS},
    "Cohere2": {"head_dim": 32, "sliding_window": WINDOW, "layer_types": _TWO_TYPES},
    "Olmo3": {"sliding_window": WINDOW, "layer_types": _TWO_TYPES},
    "Llama4Text": {
        "head_dim": 32, "attention_chunk_size": WINDOW, "num_local_experts": 2, "intermediate_size_mlp": 64,
        "no_rope_layers": [1, 0], "attn_temperature_tuning": False,
    },
    "Gemma3nText": {
        "head_dim": 32, "sliding_window": WINDOW, "num_hidden_layers": 6, "num_kv_shared_layers": 3,
        "layer_types": 3 * _TWO_TYPES, "vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 16,
        "laurel_rank": 8, "activation_sparsity_pattern": 6 * [0.0], "intermediate_size": 6 * [64],
        "altup_num_inputs": 2,
    },
    "Gemma4Text": {
        "head_dim": 32, "global_head_dim": 64, "sliding_window": WINDOW, "num_hidden_layers": 4,
        "num_kv_shared_layers": 2, "layer_types": 2 * _TWO_TYPES, "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 16,
    },
    "DeepseekV2": {
        "num_key_value_heads": 2, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "kv_lora_rank": 16,
        "q_lora_rank": None, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    },
}  # fmt: skip


@functools.cache
def model(family):
    torch.manual_seed(3)
    module = small(family, **MODELS[family])
    widen(module)
    for name, parameter in module.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(parameter, std=2.0)
    return module


@functools.cache
def prompts():
    """Of half a window, one, one and a half and four; two begin alike, far beyond a window."""
    choice = random.Random(1)
    own = [
        [choice.randrange(VOCAB_SIZE) for _ in range(length)]
        for length in (WINDOW // 2, WINDOW, 3 * WINDOW // 2, 4 * WINDOW)
    ]
    return [*own, own[3][:70] + own[0], own[3][:70] + own[1]]


@functools.cache
def expected(family, num_new_tokens):
    """What `generate` of `transformers` answers."""
    return [own_answer(model(family), prompt, num_new_tokens) for prompt in prompts()]


def own_answer(module, prompt, num_new_tokens, **options):
    ids = torch.tensor([prompt], device=module.device)
    # Without a mask, it treats the padding token within a prompt as padding.
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0} | options
    return module.generate(ids, max_new_tokens=num_new_tokens, **options)[0, len(prompt) :].tolist()
