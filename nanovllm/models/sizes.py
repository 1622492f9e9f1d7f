"""Bytes of a stored model's weights and of its KV cache per token, by its files and config alone; without torch."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovllm.config import positions_of
from nanovllm.errors import ModelLoadError
from nanovllm.models.source import WEIGHT_PATTERNS, is_gguf

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
STORED_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
QUANTISED_BYTES = {"int8": 1.0, "int4": 20 / 32, "fp8": 1.0}  # a weight, scales included
WINDOWED = ("sliding_attention", "chunked_attention")


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a model in memory.

    num_weights: parameters; 0 for a GGUF file.
    weight_bytes: bytes of the weights in `dtype`; for a GGUF file, its bytes on disk.
    kv_layers: (window or chunk in tokens, None for full attention; bytes per token) of each layer with its own K and V.
    """

    architecture: str
    dtype: str
    num_weights: int
    weight_bytes: int
    max_position_embeddings: int
    kv_layers: tuple[tuple[int | None, int], ...]

    @property
    def kv_token_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.kv_layers)

    def kv_bytes(self, num_tokens: int) -> int:
        """K and V that a sequence of `num_tokens` keeps: layers with a window keep its tokens alone."""
        return sum(num_bytes * min(num_tokens, window or num_tokens) for window, num_bytes in self.kv_layers)


def read_sizes(source: str, *, dtype: str = "auto", quantization: str | None = None) -> ModelSizes:
    """The sizes of a folder, a GGUF file, or a hub model in the cache.

    Args:
        dtype, quantization: options of `EngineConfig` of these names; "auto" is the checkpoint's dtype.

    Raises ModelLoadError for a hub model that is not in the cache, and for damaged files.
    """
    if is_gguf(source):
        return _sizes_of_gguf(source, dtype)
    folder = Path(source)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(source, "config.json")
        if not isinstance(cached, str):
            raise ModelLoadError(f"{source} is not in the hub's cache. Fetch it first: nanovllm pull {source}")
        folder = Path(cached).parent
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config") or config
    counts = _stored_weights(folder)
    if not counts:
        raise ModelLoadError(
            f"{folder} has no weights ({' or '.join(WEIGHT_PATTERNS)}). Fetch it: nanovllm pull {source}"
        )
    if dtype == "auto":
        dtype = str(
            text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype") or ""
        )
        dtype = dtype if dtype in DTYPE_BYTES else "float32"
    num_weights = sum(counts.values())
    each = QUANTISED_BYTES.get(quantization or "", DTYPE_BYTES[dtype])
    name = next(iter(config.get("architectures") or ()), str(config.get("model_type")))
    layers = kv_layers(text, DTYPE_BYTES[dtype])
    return ModelSizes(name, dtype, num_weights, math.ceil(num_weights * each), _positions(text), layers)


def _sizes_of_gguf(source: str, dtype: str) -> ModelSizes:
    from nanovllm.models.gguf.config import read_config
    from nanovllm.models.gguf.file import open_gguf, parts_of

    config = read_config(open_gguf(source))
    dtype = "bfloat16" if dtype == "auto" else dtype
    num_bytes = sum(part.stat().st_size for part in parts_of(Path(source).expanduser()))
    layers = kv_layers(config, DTYPE_BYTES[dtype])
    return ModelSizes(config["architectures"][0], dtype, 0, num_bytes, _positions(config), layers)


def _positions(config: Mapping[str, Any]) -> int:
    class _Config:
        def __getattr__(self, name: str) -> Any:
            return config.get(name)

    return positions_of(_Config()) or 2048


def _stored_weights(folder: Path) -> Counter[str]:
    """Number of weights by stored dtype; pickles count as float16."""
    counts: Counter[str] = Counter()
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            try:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            except (ValueError, OverflowError, MemoryError):
                raise ModelLoadError(f"{path} is damaged: its header is not JSON.") from None
        for name, tensor in header.items():
            if name != "__metadata__":
                counts[tensor["dtype"]] += math.prod(tensor["shape"])
    if not counts:
        counts["F16"] = sum(path.stat().st_size for path in folder.glob("*.bin")) // STORED_BYTES["F16"]
    return +counts


def kv_layers(config: Mapping[str, Any], dtype_bytes: int) -> tuple[tuple[int | None, int], ...]:
    """(window, bytes per token) of each layer of a text model with its own K and V."""
    num_layers = config.get("num_hidden_layers") or config.get("n_layer") or config.get("num_layers") or 0
    heads = config.get("num_attention_heads") or config.get("n_head") or 1
    kv_heads = config.get("num_key_value_heads") or (1 if config.get("multi_query") else heads)
    hidden = config.get("hidden_size") or config.get("n_embd") or config.get("d_model") or 0
    key_size = value_size = config.get("head_dim") or hidden // heads
    if config.get("qk_rope_head_dim") and config.get("v_head_dim"):  # latent attention, kept expanded: every head
        key_size = (config.get("qk_nope_head_dim") or 0) + config["qk_rope_head_dim"]
        value_size = config["v_head_dim"]
        kv_heads = heads
    types = list(config.get("layer_types") or [])
    window = config.get("sliding_window") or config.get("attention_chunk_size")
    if len(types) != num_layers:
        is_windowed = window and config.get("use_sliding_window", True) is not False
        types = ["sliding_attention" if is_windowed else "full_attention"] * num_layers
    shared = config.get("num_kv_shared_layers") or 0
    per_token = kv_heads * (key_size + value_size) * dtype_bytes
    return tuple(
        (window if kind in WINDOWED else None, per_token)
        for kind in types[: num_layers - shared]
        if "attention" in kind and "linear" not in kind
    )
