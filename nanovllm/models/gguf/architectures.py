"""Maps names of GGUF files to `transformers`, per supported architecture; without torch.

The mappings of `transformers` omit keys that change the result (head sizes, rotary scaling, soft-caps) and differ among
its releases. Here every key and tensor is mapped, or refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Metadata key without the architecture's prefix -> field of the config.
_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
# Keys that special rules of `config.py` read, or that have no effect on the result.
KEYS_WITH_RULES = frozenset(
    {
        "vocab_size",
        "attention.key_length",
        "attention.value_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.attn_factor",
        "rope.scaling.finetuned",
        "rope.scale_linear",
        "classifier.output_labels",  # names of a reranker's answers
    }
)
# Keys without effect at these values, which llama.cpp's converter writes; other values are refused.
NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "nextn_predict_layers": (0,),
    "expert_shared_count": (0,),
    "leading_dense_block_count": (0,),
    "pooling_type": (0, 3),  # none, or the last token's, as in `LLM.embed`
    "attention.sliding_window": (0,),  # no window
    "rope.scaling.yarn_ext_factor": (1.0,),  # YaRN's own values, which transformers has too
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_beta_fast": (32.0,),
    "rope.scaling.yarn_beta_slow": (1.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (1.0,),
    "embedding_scale": (1.0,),
    "residual_scale": (1.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "use_parallel_residual": (False,),
    "tensor_data_layout": ("Meta AI original pth",),  # old files permute rows of q and k
}
# Name of a layer's tensor without "blk.N." -> module of the layer.
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_NORMS_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_SOFTCAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}


@dataclass(frozen=True, slots=True)
class Architecture:
    """Mapping of one architecture's files.

    model_type, class_name: names in `transformers`.
    keys: metadata key -> field of the config.
    special: keys that `config.py` reads only for this architecture.
    layer: tensor of a layer -> its module.
    fixed: fields of the config without a key.
    permutes_heads: rows of q and k are in the order of llama.cpp's rotary embedding.
    norms_from_zero: modules add 1 to norm weights; the file's weights include it.
    """

    model_type: str
    class_name: str
    keys: Mapping[str, str] = field(default_factory=lambda: _KEYS)
    special: frozenset[str] = frozenset()
    layer: Mapping[str, str] = field(default_factory=lambda: _LAYER)
    fixed: Mapping[str, object] = field(default_factory=dict)
    permutes_heads: bool = False
    norms_from_zero: bool = False


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", permutes_heads=True),
    "granite": Architecture(
        "granite",
        "GraniteForCausalLM",
        keys=_KEYS
        | {
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "attention.scale": "attention_multiplier",
            "logit_scale": "logits_scaling",
        },
        permutes_heads=True,
    ),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", layer=_LAYER | _HEAD_NORMS),
    "qwen3moe": Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        keys=_KEYS
        | {
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        layer=_LAYER | _HEAD_NORMS | {"ffn_gate_inp": "mlp.gate"},
        fixed={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "gemma": Architecture("gemma", "GemmaForCausalLM", norms_from_zero=True),
    "gemma2": Architecture(
        "gemma2",
        "Gemma2ForCausalLM",
        keys=_KEYS | _WINDOW | _SOFTCAPS,
        layer=_LAYER | _NORMS_AFTER,
        norms_from_zero=True,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        keys=_KEYS | _WINDOW | _SOFTCAPS,
        special=frozenset(
            {"rope.freq_base_swa", "attention.sliding_window_pattern", "mm.tokens_per_image"}  # the last: of pictures
        ),
        layer=_LAYER | _HEAD_NORMS | _NORMS_AFTER,
        norms_from_zero=True,
    ),
    "phi3": Architecture(
        "phi3",
        "Phi3ForCausalLM",
        keys=_KEYS | _WINDOW,
        layer=_LAYER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    ),
}
