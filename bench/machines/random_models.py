"""Models with random weights in the shape of real ones, the bytes that their steps read, and a device's rates."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

SHAPES = {
    "135m": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
             "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49_152, "tie_word_embeddings": True,
             "max_position_embeddings": 8192},
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True,
             "max_position_embeddings": 40_960},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128_256, "tie_word_embeddings": True,
           "max_position_embeddings": 8192},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True,
           "max_position_embeddings": 40_960},
    "8b": {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": False,
           "max_position_embeddings": 40_960},
    "32b": {"hidden_size": 5120, "intermediate_size": 25_600, "num_hidden_layers": 64, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": False,
            "max_position_embeddings": 40_960},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "tie_word_embeddings": True,
             "max_position_embeddings": 2048},
}  # fmt: skip
SHAPES["0.6b-128k"] = SHAPES["0.6b"] | {"max_position_embeddings": 131_072}
BYTES_PER_VALUE = 2  # bfloat16


class NoText:
    """Stands for a tokenizer: the ids are random, and their text has no meaning."""

    def __call__(self, text: str) -> Any:
        raise NotImplementedError

    def decode(self, *_: Any, **__: Any) -> str:
        return ""


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def random_model(shape: str) -> Any:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device()):
            return Qwen3ForCausalLM(Qwen3Config(**SHAPES[shape], dtype=torch.bfloat16)).eval()
    finally:
        torch.set_default_dtype(before)


def checkpoint(shape: str) -> Path:
    """Folder of a model with random weights, written once a machine."""
    folder = Path(tempfile.gettempdir()) / f"nanovllm-random-{shape}"
    if not (folder / "config.json").exists():
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}-", dir=folder.parent) as partial:
            random_model(shape).save_pretrained(Path(partial) / "model")
            try:  # at once, since another process may look for the folder meanwhile
                os.rename(Path(partial) / "model", folder)
            except OSError:
                if not (folder / "config.json").exists():
                    raise
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return folder


def gguf_file(shape: str, kind: str) -> Path:
    """GGUF file with random weights of kind "Q4_K" or "BF16", written once a machine, readable by llama.cpp too.

    Q4_K wants sizes that are multiples of 256.
    """
    import gguf

    if kind not in ("Q4_K", "BF16"):
        raise ValueError(f"a random GGUF file has weights of Q4_K or BF16, not {kind}")
    path, sizes = Path(tempfile.gettempdir()) / f"nanovllm-random-{shape}-no-vocab.{kind}.gguf", SHAPES[shape]
    if path.exists():
        return path
    hidden, inner, dim = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    queries, keys = sizes["num_attention_heads"] * dim, sizes["num_key_value_heads"] * dim
    partial = path.with_suffix(f".{os.getpid()}")
    writer, numbers = gguf.GGUFWriter(partial, "qwen3", use_temp_file=True), np.random.default_rng(0)
    writer.add_context_length(sizes["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(sizes["num_hidden_layers"])
    writer.add_feed_forward_length(inner)
    writer.add_head_count(sizes["num_attention_heads"])
    writer.add_head_count_kv(sizes["num_key_value_heads"])
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_vocab_size(sizes["vocab_size"])
    writer.add_tokenizer_model("no_vocab")

    def add(name: str, rows: int, columns: int) -> None:
        if kind == "BF16":  # a random sign, an absolute value in [2^-6, 2^-5)
            bits = numbers.integers(0, 2**16, (rows, columns), np.uint16)
            data = (bits & 0x807F | 0x3C80).view(np.uint8)
        else:
            blocks = numbers.integers(0, 256, (rows, columns // 256, 144), np.uint8)
            blocks[..., :4] = np.array([1e-4, 7.5e-4], np.float16).view(np.uint8)  # scales: the mean is about 0
            data = blocks.reshape(rows, -1)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType[kind])

    add("token_embd", sizes["vocab_size"], hidden)
    norms = {"output_norm": hidden}
    for layer in range(sizes["num_hidden_layers"]):
        at = f"blk.{layer}"
        norms |= {f"{at}.{name}_norm": hidden for name in ("attn", "ffn")}
        norms |= {f"{at}.attn_{name}_norm": dim for name in "qk"}
        for name, rows, columns in (
            ("attn_q", queries, hidden), ("attn_k", keys, hidden), ("attn_v", keys, hidden),
            ("attn_output", hidden, queries), ("ffn_gate", inner, hidden), ("ffn_up", inner, hidden),
            ("ffn_down", hidden, inner),
        ):  # fmt: skip
            add(f"{at}.{name}", rows, columns)
    for name, size in norms.items():
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(partial, path)
    return path


def weight_bytes(shape: str) -> int:
    """Bytes of the weights that each step reads: all layers and the output projection."""
    sizes = SHAPES[shape]
    heads = (sizes["num_attention_heads"] * 2 + sizes["num_key_value_heads"] * 2) * sizes["head_dim"]
    per_layer = sizes["hidden_size"] * (heads + 3 * sizes["intermediate_size"])
    numbers = sizes["num_hidden_layers"] * per_layer + sizes["vocab_size"] * sizes["hidden_size"]
    return BYTES_PER_VALUE * numbers


def token_bytes(shape: str) -> int:
    """Bytes of one token's keys and values over all layers."""
    sizes = SHAPES[shape]
    return sizes["num_hidden_layers"] * 2 * sizes["num_key_value_heads"] * sizes["head_dim"] * BYTES_PER_VALUE


def copy_rate(num_bytes: int = 2**31, *, repeats: int = 6) -> float:
    """Bytes per second that a copy within the device's memory reads and writes; the fastest of several."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device())
    target = torch.empty_like(source)
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        target.copy_(source)
        if source.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return 2 * num_bytes / min(seconds)
