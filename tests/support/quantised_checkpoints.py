"""Quantised checkpoints of tiny random models, in the formats that people download, made by the formats' own producers.

`compressed-tensors` computes scales and packs, `transformers` quantises to FP8 blocks. MXFP4 of GPT-OSS is packed by
`compressed-tensors` and laid out after the reader of `transformers`, whose own quantiser needs a GPU.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from tests.support.tiny_models import MAX_POSITIONS, VOCAB_SIZE, tiny_model, widen

_FP8_TENSOR = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
# form: (preset scheme or the weights' arguments, format in the files)
_COMPRESSED = {
    "ct-fp8-tensor": ({"weights": _FP8_TENSOR}, "naive-quantized"),
    "ct-fp8-static": ("FP8", "float-quantized"),
    "ct-fp8-channel": ("FP8_DYNAMIC", "float-quantized"),
    "ct-fp8-block": ("FP8_BLOCK", "float-quantized"),
    "ct-int8-channel": ("W8A8", "int-quantized"),
    "ct-w4a16": ("W4A16", "pack-quantized"),
    "ct-w4a16-asym": ("W4A16_ASYM", "pack-quantized"),
    "ct-w3a16": ("W3A16", "pack-quantized"),
    "ct-w8a16": ("W8A16", "pack-quantized"),
    "ct-nvfp4": ("NVFP4A16", "nvfp4-pack-quantized"),
    "ct-nvfp4-a4": ("NVFP4", "nvfp4-pack-quantized"),
    "ct-mxfp4": ("MXFP4A16", "mxfp4-pack-quantized"),
    "ct-mxfp8": ("MXFP8A16", "mxfp8-quantized"),
}
_FP8 = {
    "fp8-block": {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "float"},
    "fp8-block-ue8m0": {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
    "fp8-tensor": {"quant_method": "fp8", "weight_block_size": None, "scale_fmt": "float"},
    "mxfp8": {"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"},
}
LLAMA_FORMS = (*(form for form in _COMPRESSED if form != "ct-w3a16"), *_FP8)
_OF_EXPERTS = {
    "vocab_size": VOCAB_SIZE, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_experts_per_tok": 2, "max_position_embeddings": MAX_POSITIONS, "tie_word_embeddings": False,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}  # fmt: skip
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "model.embed_tokens"]}


def small_llama(**overrides):
    """A Llama whose linear layers have whole blocks of 128 x 128, in bfloat16."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
    return tiny_model(**(sizes | overrides), dtype=torch.bfloat16)


def small_moe(width=128):
    """A Qwen3 with four experts of this width a layer, two of them for each token, in bfloat16."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": width, "head_dim": 64}
    return _widened(Qwen3MoeForCausalLM(Qwen3MoeConfig(**_OF_EXPERTS, **sizes, num_experts=4)))


def small_gpt_oss():
    """A GPT-OSS with four experts a layer, in bfloat16."""
    sizes = {"hidden_size": 128, "intermediate_size": 64, "head_dim": 32, "sliding_window": 16}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return _widened(GptOssForCausalLM(GptOssConfig(**_OF_EXPERTS, **sizes, num_local_experts=4, rope_parameters=rope)))


def _widened(model):
    widen(model)
    return model.to(torch.bfloat16).eval()


def save_quantised(folder, form, model=None, *, is_quantised=lambda name: True):
    """Save a model, `small_llama()` by default, quantised in one of `LLAMA_FORMS`; returns the folder.

    Args:
        is_quantised: of the name of a module; the others, and what is no projection, stay plain.
    """
    folder = Path(folder)
    (small_llama() if model is None else model).save_pretrained(folder)
    scheme, settings = settings_of(form)

    def quantised(name, tensor):
        module = name.removesuffix(".weight")
        if not name.endswith("_proj.weight") or tensor.dim() != 2 or not is_quantised(module):
            return {name: tensor}
        if scheme is None:
            return Fp8Quantize(SimpleNamespace(quantization_config=SimpleNamespace(**settings))).convert({name: tensor})
        parts = compressed(tensor, scheme)
        return {f"{module}.{part}": value for part, value in parts.items()}

    rewrite(folder, quantised, settings)
    return folder


def save_mxfp4(folder):
    """Save `small_gpt_oss()` with experts in MXFP4, as its checkpoints have them; returns the folder."""
    folder = Path(folder)
    small_gpt_oss().save_pretrained(folder)
    scheme = _scheme("MXFP4A16", "mxfp4-pack-quantized")

    def quantised(name, tensor):
        if not name.endswith(("gate_up_proj", "down_proj")):
            return {name: tensor}
        experts = [compressed(each, scheme) for each in tensor.transpose(1, 2).contiguous()]  # [out, in] of each
        blocks = torch.stack([each["weight_packed"].unflatten(1, (-1, 16)) for each in experts])
        return {f"{name}_blocks": blocks, f"{name}_scales": torch.stack([each["weight_scale"] for each in experts])}

    rewrite(folder, quantised, MXFP4)
    return folder


def compressed(weight, scheme):
    """The tensors of a weight [out_features, in_features] by `compressed-tensors`, by the ends of their names."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    arguments = scheme.weights
    weight = weight.float()
    least, largest = _ranges(weight, arguments)
    whole = generate_gparam(weight.amin(), weight.amax()) if arguments.strategy == "tensor_group" else None
    scale, zero = calculate_qparams(least, largest, arguments, global_scale=whole)
    parts = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    if whole is not None:
        parts["weight_global_scale"] = whole
    packed = BaseCompressor.get_value_from_registry(scheme.format).compress(parts, scheme)
    static = scheme.input_activations is not None and not scheme.input_activations.dynamic
    packed |= {"input_scale": torch.tensor([0.5])} if static else {}
    return {name: part.detach().contiguous() for name, part in packed.items()}


def _ranges(weight, arguments):
    """(least, largest) value for each scale of a weight, shaped as the scales are."""
    if arguments.strategy in ("group", "tensor_group"):
        groups = weight.unflatten(1, (-1, arguments.group_size))
        return groups.amin(2), groups.amax(2)
    if arguments.strategy == "block":
        rows, columns = arguments.block_structure
        blocks = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    if arguments.strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    return weight.amin(), weight.amax()


def _scheme(preset, form):
    # Not at the top: machines with a GPU may lack it, and read what transformers writes.
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme

    if isinstance(preset, str):
        scheme = preset_name_to_scheme(preset, ["Linear"])
    else:
        scheme = QuantizationScheme(targets=["Linear"], **preset)
    scheme.format = form
    return scheme


def settings_of(form):
    """(scheme of `compressed-tensors` or None, the config's quantization_config) of a form."""
    if form in _FP8:
        return None, _FP8[form] | {"activation_scheme": "dynamic", "fmt": "e4m3"}
    scheme = _scheme(*_COMPRESSED[form])
    group = json.loads(scheme.model_dump_json())
    return scheme, {
        "quant_method": "compressed-tensors", "format": _COMPRESSED[form][1], "quantization_status": "compressed",
        "ignore": ["lm_head"], "config_groups": {"group_0": group},
    }  # fmt: skip


def rewrite(folder, change, settings):
    """Replace each tensor of a saved model by those that `change` of its name and value gives, and write `settings`."""
    file = Path(folder) / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(file).items():
        tensors |= change(name, tensor)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    configure(folder, settings)


def configure(folder, settings):
    """Write the quantization_config of a saved model; None takes it out."""
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text())
    config.pop("quantization_config", None)
    path.write_text(json.dumps(config | ({} if settings is None else {"quantization_config": settings})))


def by_library(folder, dtype=torch.float32, auto_class=AutoModelForCausalLM):
    """The model of `transformers`, dequantised by itself."""
    config = AutoConfig.from_pretrained(folder)
    config.quantization_config["dequantize"] = True
    return auto_class.from_pretrained(folder, config=config, dtype=dtype).eval()


def by_producer(folder, form, model, dtype=torch.float32):
    """The model with weights that compressed-tensors widens one by one, saved plain and loaded by `transformers`."""
    scheme, _ = settings_of(form)

    def widened(name, tensor):
        if not name.endswith("_proj.weight"):
            return {name: tensor}
        parts = {role: part for role, part in compressed(tensor, scheme).items() if role != "input_scale"}
        return {name: decompressed(parts, scheme).float()}

    model.save_pretrained(folder)
    rewrite(folder, widened, None)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def decompressed(parts, scheme):
    """The weight of such tensors, by `compressed-tensors`."""
    from compressed_tensors.compressors import BaseCompressor

    return BaseCompressor.get_value_from_registry(scheme.format).decompress(parts, scheme)["weight"]


def as_modelopt(folder):
    """Rewrite NVFP4 of `compressed-tensors` as modelopt does, whose global scales are the other's reciprocals."""
    ends = {"weight_packed": "weight", "weight_global_scale": "weight_scale_2"}

    def renamed(name, value):
        module, _, suffix = name.rpartition(".")
        return {f"{module}.{ends.get(suffix, suffix)}": 1 / value if suffix == "weight_global_scale" else value}

    rewrite(folder, renamed, {"quant_method": "modelopt", "quant_algo": "NVFP4"})
