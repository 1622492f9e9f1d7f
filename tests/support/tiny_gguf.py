"""GGUF files of tiny random models, written by the package `gguf`, beside the module that has the same weights."""

import json

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Format
from gguf.quants import dequantize, quantize

from tests.support.quantised import random_blocks
from tests.support.tiny_models import SPECIAL_TOKENS, tiny_tokenizer

PERMUTED = ("llama", "granite")
SHIFTED = ("gemma", "gemma2", "gemma3")
BY_PACKAGE = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")  # that the package quantises itself; blocks of others are random


def write_gguf(
    path,
    model,
    kind="Q8_0",
    *,
    architecture="llama",
    kinds=None,
    metadata=None,
    has_tokenizer=True,
    more=None,
):
    """Write a module's weights, and give the module what the file then holds.

    Args:
        kind: of all matrices.
        kinds: of those whose name in the file contains a key.
        metadata: keys after the architecture's name; None leaves one out.
        more: float32 tensors beside the model's.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (_metadata(config) | dict(metadata or {})).items():
        if value is not None:
            _add(writer, f"{architecture}.{key}", value)
    if has_tokenizer:
        add_tokenizer(writer)
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    tied = config.tie_word_embeddings
    for name, parameter in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        base, suffix = name.rsplit(".", 1) if name.endswith((".weight", ".bias")) else (name, "weight")
        for stored, part in _parts(f"{names.get_name(base)}.{suffix}", base, parameter):
            wanted = next((each for key, each in (kinds or {}).items() if key in stored), kind)
            _write(writer, stored, part, wanted if part.dim() > 1 else "F32", row_order(architecture, stored, config))
    for name, values in (more or {}).items():
        writer.add_tensor(name, np.asarray(values, dtype=np.float32))
    finish(writer)
    if architecture in SHIFTED:  # the file has 1 + w, rounded
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data = (parameter.data + 1) - 1
    return path


def write_header(path, architecture="llama", **fields):
    """Write a file without tensors; fields have the names of the writer's methods, without `add_`."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    return finish(writer)


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return writer.path


def _parts(stored, base, parameter):
    """The file's tensors of a parameter: gate and up of experts are two."""
    if base.endswith("experts.gate_up_proj"):
        layer = stored.split(".")[1] if stored.startswith("blk") else base.split(".")[2]
        gate, up = parameter.chunk(2, dim=1)
        return [(f"blk.{layer}.ffn_gate_exps.weight", gate), (f"blk.{layer}.ffn_up_exps.weight", up)]
    if base.endswith("experts.down_proj"):
        return [(f"blk.{base.split('.')[2]}.ffn_down_exps.weight", parameter)]
    return [(stored, parameter)]


def row_order(architecture, stored, config):
    """Row of the module for each row of the file, where llama.cpp's rotary embedding wants pairs."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    part = stored.split(".")[2] if stored.startswith("blk") else ""
    if architecture not in PERMUTED or part not in heads:
        return None
    count, width = heads[part], config.head_dim
    return np.array(
        [h * width + half * width // 2 + i for h in range(count) for i in range(width // 2) for half in (0, 1)]
    )


def _write(writer, name, parameter, kind, order):
    """Add the tensor, and set the parameter to its values."""
    is_shifted = "norm" in name and writer.arch in SHIFTED
    values = parameter.detach().numpy() + (1.0 if is_shifted else 0.0)
    rows = values if order is None else values[order]
    number = Format[kind]
    if kind in ("F32", "F16"):
        data = rows.astype(np.float32 if kind == "F32" else np.float16)
        held = data.astype(np.float32)
    elif kind in (*BY_PACKAGE, "BF16"):
        data = quantize(rows, number)
        held = dequantize(data, number)
    else:
        data = random_blocks(kind, rows.size // rows.shape[-1], rows.shape[-1], seed=len(name)).numpy()
        data = data.reshape(*rows.shape[:-1], -1)
        held = dequantize(data, number)
    writer.add_tensor(name, data, raw_dtype=number)
    if is_shifted:
        return
    if order is not None:
        held = held[np.argsort(order)]
    with torch.no_grad():
        parameter.copy_(torch.from_numpy(np.ascontiguousarray(held)))


def _metadata(config):
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rope["rope_theta"]),
    }


def _add(writer, key, value):
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def add_tokenizer(writer, pre="gpt-2"):
    """The vocabulary of `tiny_tokenizer`, whose last special token ends an answer."""
    own = tiny_tokenizer()
    vocab = own.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    state = own.backend_tokenizer.to_str()
    merges = [" ".join(pair) for pair in json.loads(state)["model"]["merges"]]
    control = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in SPECIAL_TOKENS else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(vocab[SPECIAL_TOKENS[-1]])
    writer.add_chat_template(own.chat_template)
