"""Reads a model's config from the metadata of a GGUF file; no key is ignored; without torch."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from typing import Any

from nanovllm.errors import ModelLoadError, UnsupportedModelError
from nanovllm.models.gguf.architectures import ARCHITECTURES, KEYS_WITH_RULES, NEUTRAL_VALUES, Architecture
from nanovllm.models.gguf.file import GGUFFile
from nanovllm.sampling_params import FILTERS

TOKEN_IDS = {"bos": "bos_token_id", "eos": "eos_token_id", "pad": "padding_token_id", "unk": "unknown_token_id"}
# Control tokens that end a turn or a text in any vocabulary, as in llama.cpp: a file names only one of them, the
# original checkpoint often several.
_ENDS = frozenset(
    {
        "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>",
        "<|end_of_role|>", "<EOT>",
    }
)  # fmt: skip
_CONTROL = 3  # token type
READ_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
_SAMPLING = {"temp": "temperature", "penalty_repeat": "repetition_penalty"} | {name: name for name in FILTERS}
# Keys with positive values. A scaling factor of 0 means none, as in llama.cpp.
_POSITIVE = (
    "context_length", "embedding_length", "block_count", "attention.head_count", "attention.head_count_kv",
    "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon", "rope.dimension_count",
    "rope.freq_base", "rope.freq_base_swa", "rope.scaling.original_context_length", "rope.scaling.attn_factor",
)  # fmt: skip
_NOT_NEGATIVE = ("rope.scaling.factor", "rope.scale_linear")
# Number of layers of a family's largest model, which scales queries by hidden_size / num_heads, not by head_dim.
_LARGEST = {"gemma2": 46, "gemma3": 62}


def architecture_of(file: GGUFFile) -> Architecture:
    """The mapping for the file's architecture; raises UnsupportedModelError if there is none."""
    name = file.architecture
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path} is a model of the architecture {name!r}, which is not read from GGUF files; these are: "
            f"{', '.join(ARCHITECTURES)}. Take the checkpoint in the format of transformers."
        )
    return ARCHITECTURES[name]


def refuse_types(file: GGUFFile) -> None:
    """Raise UnsupportedModelError for tensor types without a kernel."""
    of_type: defaultdict[str, list[str]] = defaultdict(list)
    for tensor in file.tensors.values():
        if tensor.kind not in READ_TYPES:
            of_type[tensor.kind].append(tensor.name)
    if of_type:
        listed = "; ".join(f"{kind}: {some(names)}" for kind, names in of_type.items())
        raise UnsupportedModelError(
            f"{file.path} has tensors of types without a kernel ({listed}). Take a file of {', '.join(READ_TYPES)}, "
            "such as Q4_K_M or Q8_0 of the same model, or quantise it so with llama-quantize."
        )


def some(names: list[str]) -> str:
    """The first four names as text, and the number of further ones."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def read_config(file: GGUFFile) -> dict[str, Any]:
    """Fields of the `transformers` config, including model_type and architectures.

    Raises UnsupportedModelError for an unknown architecture or key, ModelLoadError for a missing key.
    """
    architecture = architecture_of(file)
    _refuse_unknown_keys(file, architecture)
    _check_numbers(file)
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "architectures": [architecture.class_name],
        **architecture.fixed,
    }
    for key, name in architecture.keys.items():
        if (value := file.of_architecture(key)) is not None:
            config[name] = _one_for_all_layers(file, key, value)
    if config.get("sliding_window") == 0:
        config["sliding_window"] = None
    _set_heads(file, config)
    config["rope_parameters"] = _rope(file, config)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{file.path} has no token embedding (token_embd.weight): it holds no language model.")
    config["vocab_size"] = embedding.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    if architecture.model_type.startswith("gemma"):
        _set_gemma(file, config)
    # None if the file has no such token: the config classes' defaults belong to one checkpoint.
    return config | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")) | token_ids(file)


def token_ids(file: GGUFFile) -> dict[str, int]:
    """bos_token_id, eos_token_id and pad_token_id, as far as the file has them."""
    found = {f"{role}_token_id": file.metadata.get(f"tokenizer.ggml.{key}") for role, key in TOKEN_IDS.items()}
    return {name: value for name, value in found.items() if value is not None and name != "unk_token_id"}


def generation_defaults(file: GGUFFile) -> dict[str, Any]:
    """Fields of a generation config: end-of-sequence tokens and sampling options."""
    metadata = file.metadata
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    kinds = metadata.get("tokenizer.ggml.token_type", ())
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    typed = enumerate(zip(tokens, kinds, strict=False))  # the tokenizer refuses unequal lengths
    ends = [index for index, (token, kind) in typed if kind == _CONTROL and token in _ENDS]
    eos = list(dict.fromkeys([token for token in named if token is not None] + ends))
    sampling = {name: metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    given = {name: value for name, value in sampling.items() if value is not None}
    return token_ids(file) | ({"eos_token_id": eos} if eos else {}) | given


def _refuse_unknown_keys(file: GGUFFile, architecture: Architecture) -> None:
    prefix = f"{file.architecture}."
    known = {*architecture.keys, *architecture.special, *KEYS_WITH_RULES}
    for key, value in file.metadata.items():
        name = key.removeprefix(prefix)
        if name == key or name in known or value in NEUTRAL_VALUES.get(name, ()):
            continue
        raise UnsupportedModelError(
            f"{file.path} sets {key} to {str(value)[:60]}, which is not read from GGUF files of the architecture "
            f"{file.architecture!r}, and the answers could be others without it. Take the checkpoint in the format of "
            "transformers."
        )
    for key in ("context_length", "embedding_length", "block_count", "attention.head_count"):
        if file.of_architecture(key) is None:
            raise ModelLoadError(f"{file.path} is incomplete: its metadata lack {prefix}{key}.")


def _check_numbers(file: GGUFFile) -> None:
    """Check numbers before they are computed with, and the layer count before that many layers are built."""
    for key in (*_POSITIVE, *_NOT_NEGATIVE):
        value = file.of_architecture(key)
        for each in value if isinstance(value, list) else [] if value is None else [value]:
            is_number = type(each) in (int, float) and math.isfinite(each)
            if not is_number or each < 0 or (each == 0 and key in _POSITIVE):
                raise ModelLoadError(f"{file.path} is damaged: its metadata set {key} to {str(value)[:60]}.")
    layers = {found[1] for name in file.tensors if (found := re.match(r"blk\.(\d+)\.", name))}
    if (count := file.of_architecture("block_count")) > len(layers):
        raise ModelLoadError(f"{file.path} is incomplete: of {count} layers (block_count) it has {len(layers)}.")


def _one_for_all_layers(file: GGUFFile, key: str, value: Any) -> Any:
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise UnsupportedModelError(
            f"{file.path}: {file.architecture}.{key} differs among layers ({str(value)[:60]}), which is not read."
        )
    return value[0]


def _set_heads(file: GGUFFile, config: dict[str, Any]) -> None:
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    width = file.of_architecture("attention.key_length")
    if width is None:
        width = config["hidden_size"] // config["num_attention_heads"]
    value_width = file.of_architecture("attention.value_length", width)
    if value_width != width:
        raise UnsupportedModelError(f"{file.path} has keys of {width} and values of {value_width} numbers a head.")
    config["head_dim"] = width
    rotary = file.of_architecture("rope.dimension_count", width)
    if rotary != width and config["model_type"] != "phi3":
        raise UnsupportedModelError(
            f"{file.path} rotates {rotary} of {width} numbers of a head (rope.dimension_count), which is not read from "
            f"GGUF files of the architecture {file.architecture!r}."
        )


def _rope(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """rope_parameters; factors of a tensor rope_freqs (Llama 3.1) are applied to the loaded model instead."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": file.of_architecture("rope.freq_base", 10000.0)}
    if config["model_type"] == "phi3":
        return rope | _phi3_rope(file, config)
    kind = file.of_architecture("rope.scaling.type", "none")
    factor = file.of_architecture("rope.scaling.factor", file.of_architecture("rope.scale_linear")) or 1.0
    if kind == "none" and file.of_architecture("rope.scale_linear") is not None:
        kind = "linear"
    attention_factor = file.of_architecture("rope.scaling.attn_factor", 1.0)
    if kind not in ("none", "linear", "yarn") or (attention_factor != 1.0 and kind != "yarn"):
        raise UnsupportedModelError(
            f"{file.path} scales rotary embeddings as {kind!r} with the attention factor {attention_factor:g}, which "
            f"is not read from GGUF files of the architecture {file.architecture!r}."
        )
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return rope
    rope |= {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        original = file.of_architecture("rope.scaling.original_context_length", config["max_position_embeddings"])
        rope["original_max_position_embeddings"] = original
        rope["attention_factor"] = attention_factor * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    return rope


def _phi3_rope(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    rotary = file.of_architecture("rope.dimension_count", config["head_dim"])
    rope: dict[str, Any] = {"partial_rotary_factor": rotary / config["head_dim"]}
    tensors = {kind: file.tensors.get(f"rope_factors_{kind}.weight") for kind in ("long", "short")}
    if all(tensor is None for tensor in tensors.values()):
        return rope
    original = file.of_architecture("rope.scaling.original_context_length")
    if original is None or any(tensor is None or tensor.kind != "F32" for tensor in tensors.values()):
        raise ModelLoadError(
            f"{file.path} is incomplete: longrope needs rope_factors_long, rope_factors_short in F32, and "
            "phi3.rope.scaling.original_context_length."
        )
    config["original_max_position_embeddings"] = original
    rope |= {"rope_type": "longrope", "original_max_position_embeddings": original}
    rope["factor"] = config["max_position_embeddings"] / original
    if (attention_factor := file.of_architecture("rope.scaling.attn_factor")) is not None:
        rope["attention_factor"] = attention_factor
    for kind, tensor in tensors.items():
        assert tensor is not None
        rope[f"{kind}_factor"] = tensor.data.view("<f4").tolist()
    return rope


def _set_gemma(file: GGUFFile, config: dict[str, Any]) -> None:
    """Set fields of Gemma that llama.cpp hard-codes, so that files do not contain them."""
    config["hidden_activation"] = "gelu_pytorch_tanh"
    if file.architecture in _LARGEST:
        is_largest = config["num_hidden_layers"] == _LARGEST[file.architecture]
        per_head = config["hidden_size"] // config["num_attention_heads"]
        config["query_pre_attn_scalar"] = per_head if is_largest else config["head_dim"]
    if file.architecture == "gemma3":
        local = {"rope_type": "default", "rope_theta": file.of_architecture("rope.freq_base_swa", 10000.0)}
        config["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": local}
        pattern = file.of_architecture("attention.sliding_window_pattern", 6)
        layers = range(config["num_hidden_layers"])
        slides = pattern if isinstance(pattern, list) else [(layer + 1) % pattern != 0 for layer in layers]
        config["layer_types"] = ["sliding_attention" if slides[layer] else "full_attention" for layer in layers]
