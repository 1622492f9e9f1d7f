"""Tiny random models of every image-text class that runs here, by the form of a picture's tensors."""

import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from nanovllm.features.media.pictures import placeholder_of

FAMILIES = {
    "pixels": "aya_vision cohere2_vision deepseek_vl got_ocr2 internvl janus llava ovis2 qianfan_ocr "
    "video_llava vipllava",
    "sizes": "lighton_ocr mistral3",
    "tiles": "llava_next llava_next_video llava_onevision",
    "frames": "idefics2 idefics3 smolvlm",
    "grid": "cosmos3_edge cosmos3_omni exaone4_5 glm4v glm4v_moe glm_ocr glmga hyperclovax_vision_v2 lfm3_vl "
    "qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe",
    "pairs": "muse_glimmer muse_spark",
    "patches": "kimi_k25 paddleocr_vl",
    "padded": "lfm2_vl",
}
FORMS = {family: form for form, families in FAMILIES.items() for family in families.split()}
SIDE = 64  # pixels of a picture
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300, "max_position_embeddings": 512, "num_experts": 4,
    "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_routed_experts": 4,
    "depth": 1, "num_heads": 4, "embed_dim": 64, "out_hidden_size": 64, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "image_size": SIDE, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "image_token_id": 264, "image_token_index": 264, "video_token_id": 265,
    "deepstack_visual_indexes": [0], "vision_feature_layers": (-1, -2), "projection_dim": 64,
    "projector_hidden_size": 64, "projection_hidden_size": 64,
}  # fmt: skip
OWN_SIZES = {
    "kimi_k25": {"num_key_value_heads": 4},
    "intermediate_size": 256,
    "muse_glimmer": {"out_hidden_size": 256},
    "muse_spark": {"out_hidden_size": 256},
}


def picture_class_model(family):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family]()
    text = config.get_text_config()
    kinds = list(dict.fromkeys(getattr(text, "layer_types", None) or ()))
    for part in (config, *(each for each in vars(config).values() if hasattr(each, "to_dict"))):
        for name, value in (SIZES | OWN_SIZES.get(family, {})).items():
            before = getattr(part, name, None)
            if name == "image_size" and isinstance(before, (list, tuple)):
                setattr(part, name, [value] * len(before))
            elif (
                isinstance(before, type(value))
                or (before and name.startswith("deepstack"))
                or (name.endswith("token_id") and hasattr(part, name))
            ):
                setattr(part, name, value)
    if kinds:
        text.layer_types = (kinds * 2)[:2]
    rotary = getattr(text, "rope_parameters", None)
    if isinstance(rotary, dict) and ("mrope_section" in rotary or "rope_type" in rotary):
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        half = int(head_dim * rotary.get("partial_rotary_factor", 1.0)) // 2
        rotary["mrope_section"] = [half // 4, (half - half // 4) // 2, half - half // 4 - (half - half // 4) // 2]
    if getattr(config, "image_grid_pinpoints", None):
        config.image_grid_pinpoints = [[SIDE, SIDE], [SIDE, 2 * SIDE]]
    return AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float().eval()


def tensors_of(family, model, seed):
    """A picture as the encoder takes it."""
    generator = torch.Generator().manual_seed(seed)

    def random(*sizes):
        return torch.randn(*sizes, generator=generator)

    vision = getattr(model.config, "vision_config", model.config)
    patch, height, width = vision.patch_size, 4, 8
    grid = torch.tensor([[1, height, width]])
    flat = getattr(vision, "temporal_patch_size", 1) * 3 * patch * patch if isinstance(patch, int) else 0
    pixels = {
        "pixels": lambda: {"pixel_values": random(1, 3, SIDE, SIDE)},
        "sizes": lambda: {"pixel_values": random(1, 3, SIDE, SIDE), "image_sizes": torch.tensor([[SIDE, SIDE]])},
        "tiles": lambda: {"pixel_values": random(1, 3, 3, SIDE, SIDE), "image_sizes": torch.tensor([[SIDE, 2 * SIDE]])},
        "frames": lambda: {"pixel_values": random(1, 1, 3, SIDE, SIDE)},
        "grid": lambda: {"pixel_values": random(height * width, flat), "image_grid_thw": grid},
        "pairs": lambda: {"pixel_values": random(height * width, 2 * flat), "image_grid_thw": grid},
        "patches": lambda: {"pixel_values": random(height * width, 3, patch, patch), "image_grid_thw": grid},
        "padded": lambda: {
            "pixel_values": random(1, height * width, flat), "spatial_shapes": grid[:, 1:],
            "pixel_attention_mask": torch.ones(1, height * width, dtype=torch.int64),
        },
    }  # fmt: skip
    return pixels[FORMS[family]]()


def num_features(model, inputs):
    with torch.no_grad():
        rows = model.base_model.get_image_features(**inputs, return_dict=True).pooler_output
    rows = torch.cat(list(rows)) if isinstance(rows, (list, tuple)) else rows
    return rows.numel() // rows.shape[-1]


def own_answer(model, token_ids, pictures, num_new_tokens):
    """The tokens of the model's own `generate`."""
    ids = torch.tensor([token_ids])
    inputs = {}
    for name, first in pictures[0].items():
        of_frames = name == "pixel_values" and first.dim() == 5 and "image_sizes" not in pictures[0]
        inputs[name] = torch.cat([picture[name] for picture in pictures], dim=int(of_frames))
    if hasattr(model.base_model, "get_rope_index"):
        inputs["mm_token_type_ids"] = (ids == placeholder_of(model.config)).int()
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new_tokens, do_sample=False,
        eos_token_id=None, pad_token_id=0, **inputs,
    )  # fmt: skip
    return output[0, ids.shape[1] :].tolist()
