"""A tiny random model of any causal language model class of `transformers`, by shrinking its default configuration.

Sizes shrink by the names of their fields; lists with an entry a layer keep one layer of each kind. So a class of a
later release is built without a line here, unless it names its sizes in a way of its own.
"""

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB_SIZE = 64
HIDDEN_SIZE = 64
NUM_HEADS = 4
HEAD_DIM = 16
WINDOW = 16
MAX_POSITIONS = 512
MAX_LAYERS = 4

# What a field becomes, where the default configuration has it; None there stays None.
_SIZES = {
    name: size
    for size, names in (
        (HIDDEN_SIZE, """hidden_size n_embd d_model embed_dim attention_hidden_size embedding_size input_embedding_size
            output_embedding_size dim_model_base word_embed_proj_dim embedding_dim emb_dim lru_width input_size
            backbone_hidden_size hidden_size_global"""),
        (64, """intermediate_size n_inner ffn_dim d_ff dim_ff dff d_inner decoder_ffn_dim encoder_ffn_dim
            intermediate_size_mlp moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size
            shared_experts_intermediate_size dense_intermediate_size expert_ffn_hidden_size ffn_hidden_size
            feed_forward_size moe_shared_expert_intermediate_size dense_ffn_hidden_size router_hidden_size
            mamba_d_ssm"""),
        (NUM_HEADS, """num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads
            encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads
            linear_num_heads linear_num_value_heads conf_num_attention_heads"""),
        (2, """num_key_value_heads kv_n_heads swa_num_key_value_heads num_global_key_value_heads linear_num_key_heads
            num_kv_heads num_experts_per_tok num_experts_per_token moe_k moe_topk moe_top_k encoder_layers
            num_encoder_layers index_n_heads zero_expert_num"""),
        (HEAD_DIM, """head_dim dim_head d_head swa_head_dim v_head_dim kv_channels qk_nope_head_dim d_kv
            attention_head_size attention_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim
            index_head_dim ssm_state_size state_size mamba_d_state mamba_head_dim mamba_d_head mamba_headdim
            swa_v_head_dim qk_rope_head_dim"""),
        (32, """q_lora_rank kv_lora_rank o_lora_rank gated_norm_rank adapter_rank laurel_rank
            hidden_size_per_layer_input ple_embed_dim hc_lowrank d_rel"""),
        (4, "num_local_experts num_experts n_routed_experts moe_num_experts"),
        (1, """n_group topk_group num_expert_group n_shared_experts num_shared_experts moe_num_shared_experts
            first_k_dense_replace num_dense_layers depth conf_num_hidden_layers num_global_layers"""),
        (WINDOW, """sliding_window attention_chunk_size sliding_window_size window_size local_attention
            keep_window_size local_attention_window_len attention_window_size index_topk"""),
        (MAX_POSITIONS, """max_position_embeddings n_positions n_ctx max_sequence_length max_seq_len model_max_length
            max_target_positions context_length"""),
        (VOCAB_SIZE, "vocab_size decoder_vocab_size vocab_size_per_layer_input unpadded_vocab_size"),
        (8, "chunk_size mamba_chunk_size rotary_dim"),
    )
    for name in names.split()
}  # fmt: skip
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")


def tiny_config(model_class):
    """A configuration of a class's own type, shrunk; raises what its class raises for sizes that do not fit."""
    config_class = model_class.config_class
    return config_class(**_tiny_fields(_default(config_class)))


def _default(config_class):
    return config_class(**_NEEDED.get(config_class.model_type, {}))


def _tiny_fields(default):
    given = vars(default)
    fields = {name: size for name, size in _SIZES.items() if _is_size(given.get(name))}
    fields |= {name: 0 for name in fields if name.endswith("per_layer_input") and given[name] == 0}
    fields |= {"tie_word_embeddings": False} if "tie_word_embeddings" in given else {}
    fields |= {name: None for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in given}
    if given.get("pad_token_id") == 1:  # positions may begin behind it
        fields["pad_token_id"] = 1
    num_layers = next((given[name] for name in _NUM_LAYERS if _is_size(given.get(name))), None)
    if num_layers is not None:
        indices, by_layer = _layers_of_each_kind(given, num_layers)
        fields |= {name: [values[i] for i in indices] for name, values in by_layer.items()}
        fields |= {name: len(indices) for name in _NUM_LAYERS if _is_size(given.get(name))}
        if given.get("num_kv_shared_layers") == num_layers:
            fields["num_kv_shared_layers"] = len(indices)
    if _is_size(given.get("qk_rope_head_dim")) and given.get("head_dim") == given["qk_rope_head_dim"]:
        fields["head_dim"] = fields["qk_rope_head_dim"]
    if "kv_lora_rank" in given and given.get("num_key_value_heads") == given.get("num_attention_heads"):
        fields["num_key_value_heads"] = NUM_HEADS
    if "is_decoder" in given:
        fields["is_decoder"] = True
    for name, value in given.items():
        if isinstance(value, PreTrainedConfig):
            fields[name] = _tiny_fields(value) | {"model_type": value.model_type}
    return _NEEDED.get(default.model_type, {}) | fields | _OWN.get(default.model_type, {})


def _is_size(value):
    return isinstance(value, int) and not isinstance(value, bool)


def _layers_of_each_kind(given, num_layers):
    """The first layer of each kind, at least two, in their order; and the fields that say something of each layer."""
    by_layer = {
        name: list(values)
        for name, values in given.items()
        if isinstance(values, (list, tuple)) and len(values) == num_layers
    }
    kinds = {}
    for index in range(num_layers):
        kinds.setdefault(str([values[index] for values in by_layer.values()]), index)
    indices = sorted(kinds.values())[:MAX_LAYERS]
    indices += [index for index in range(num_layers) if index not in indices][: max(0, 2 - len(indices))]
    return sorted(indices), by_layer


# Sizes that follow from each other in a class's own way.
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(HEAD_DIM // 2)],
    "long_factor": [4.0 - 0.2 * i for i in range(HEAD_DIM // 2)],
    "short_mscale": 1.1,
    "long_mscale": 1.2,
    "original_max_position_embeddings": MAX_POSITIONS // 2,
}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_ZAMBA = {
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "num_hidden_layers": 4,
    "attention_hidden_size": 2 * HIDDEN_SIZE,
    "attention_head_dim": 2 * HEAD_DIM,
}
_SHARED_LAYERS = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
}
# Fields without which the default configuration itself fails.
_NEEDED = {
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
}
_OWN = {
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "bamba": {"mamba_n_heads": 8, "attn_layer_indices": [1]},
    "beam": {"n_group": 2, "topk_group": 1},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "cwm": {"bos_token_id": 1, "eos_token_id": 2},
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "dots3_note_text": {"num_key_value_heads": NUM_HEADS},
    "emu3_text_model": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_ssm": 128},
    "gemma3n_text": _SHARED_LAYERS
    | {
        "intermediate_size": [64] * 4,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4_text": _SHARED_LAYERS | {"global_head_dim": 2 * HEAD_DIM, "pad_token_id": 0},
    "gemma4_unified_text": {"global_head_dim": 2 * HEAD_DIM, "pad_token_id": 0},
    "granitemoehybrid": {"mamba_n_heads": 8, "layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_dense": {"head_dim": HEAD_DIM},
    "hunyuan_v1_moe": {"head_dim": HEAD_DIM, "num_experts": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": HEAD_DIM},
    "mllama_text_model": {"bos_token_id": 1, "cross_attention_layers": [1]},
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": None, "num_hidden_layers": 2},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "modernbert-decoder": dict.fromkeys(["pad_token_id", "bos_token_id", "eos_token_id"], 0),
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "roc_bert": {"pronunciation_vocab_size": VOCAB_SIZE, "shape_vocab_size": VOCAB_SIZE},
    "phi3": {"rope_parameters": _LONG_ROPE, "original_max_position_embeddings": MAX_POSITIONS // 2},
    "phimoe": {"rope_parameters": _LONG_ROPE},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD_DIM,
        "indexer_budget": WINDOW,
        "indexer_compress_ratio": 2,
    },
    "zamba": _ZAMBA,
    "zamba2": _ZAMBA,
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_class_model(class_name, *, seed=0):
    """A random model in eval mode, float32, whose weights vary enough that greedy tokens depend on the prompt."""
    model_class = getattr(transformers, class_name)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(tiny_config(model_class)).eval()
        _draw_weights(model)
    model.generation_config.eos_token_id = None  # some configs want one
    return model


@torch.no_grad()
def _draw_weights(model):
    head = model.get_output_embeddings()
    for module in model.modules():
        is_norm, is_embedding = "Norm" in type(module).__name__, isinstance(module, nn.Embedding)
        for name, parameter in module.named_parameters(recurse=False):
            noise = torch.randn_like(parameter)
            if parameter.dim() < 2:  # norms, biases, sinks
                parameter.copy_(float(is_norm and name == "weight") + (1.0 if "sink" in name else 0.1) * noise)
            elif is_embedding and module is not head:
                parameter.copy_(noise)
            else:  # wide, so that attention is sharp and experts differ
                parameter.copy_((3.0 if module is head else 2.0) * noise / parameter.shape[-1] ** 0.5)


def class_names():
    """The causal language model classes of the installed `transformers`."""
    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()))


def routed(module, num_rows, dtype, device="cpu"):
    """Rows for routed experts, their experts and weights; one expert gets none."""
    generator = torch.Generator().manual_seed(num_rows)
    states = torch.randn(num_rows, HIDDEN_SIZE, generator=generator)
    scores = torch.rand(num_rows, module.num_experts - 1, generator=generator)
    weights, indices = scores.softmax(dim=-1).topk(2)
    return states.to(device, dtype), indices.to(device), weights.to(device, dtype)
