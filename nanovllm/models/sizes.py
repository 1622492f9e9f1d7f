"""Bytes of a stored model's weights and of its KV cache per token, by its files and config alone; without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovllm.config import positions_of
from nanovllm.errors import ModelLoadError
from nanovllm.models.headers import read_headers
from nanovllm.models.quantised.stored_config import Checkpoint, checkpoint_of, keeps
from nanovllm.models.source import WEIGHT_PATTERNS, is_gguf

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
QUANTISED_BYTES = {"int8": 1.0, "int4": 20 / 32, "fp8": 1.0}  # a weight, scales included
PICTURE_BYTES = 2**30  # most bytes of the features that an engine keeps of pictures
KV_BYTES = {"fp8": (1, 4)}  # a value, and the scale of a head's row
WINDOWED = ("sliding_attention", "chunked_attention")


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a model in memory.

    num_weights: parameters; 0 for a GGUF file.
    weight_bytes: bytes of the weights in memory, in `dtype` or quantised; for a GGUF file, its bytes on disk.
    stored: format and bits of a quantised checkpoint; empty for plain weights. stored_bytes: bytes of its files.
    kv_layers: (window or chunk in tokens, None for full attention; bytes per token) of each layer with its own K and V.
    picture_bytes: most bytes of features of pictures, on top of the KV cache.
    """

    architecture: str
    dtype: str
    num_weights: int
    weight_bytes: int
    max_position_embeddings: int
    kv_layers: tuple[tuple[int | None, int], ...]
    stored: str = ""
    stored_bytes: int = 0
    picture_bytes: int = 0

    @property
    def kv_token_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.kv_layers)

    def kv_bytes(self, num_tokens: int) -> int:
        """K and V that a sequence of `num_tokens` keeps: layers with a window keep its tokens alone."""
        return sum(num_bytes * min(num_tokens, window or num_tokens) for window, num_bytes in self.kv_layers)


def read_sizes(
    source: str,
    *,
    dtype: str = "auto",
    quantization: str | None = None,
    device: str = "cpu",
    kv_cache_dtype: str = "auto",
) -> ModelSizes:
    """The sizes of a folder, a GGUF file, or a hub model in the cache.

    Args:
        dtype, quantization, kv_cache_dtype: options of `EngineConfig` of these names; the first as "auto" is the
            checkpoint's dtype.
        device: type of the device, by which a quantised checkpoint is kept or dequantised.

    Raises ModelLoadError for a hub model that is not in the cache, and for damaged files.
    """
    if is_gguf(source):
        return _sizes_of_gguf(source, dtype, quantization, kv_cache_dtype)
    folder = Path(source)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(source, "config.json")
        if not isinstance(cached, str):
            raise ModelLoadError(f"{source} is not in the hub's cache. Fetch it first: nanovllm pull {source}")
        folder = Path(cached).parent
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config") or config
    checkpoint = checkpoint_of(config)
    is_kept = keeps(source, config, quantization, device)
    num_weights, stored_bytes, kept = _stored_weights(source, folder, checkpoint)
    if not num_weights:
        raise ModelLoadError(
            f"{folder} has no weights ({' or '.join(WEIGHT_PATTERNS)}). Fetch it: nanovllm pull {source}"
        )
    if dtype == "auto":
        dtype = str(
            text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype") or ""
        )
        dtype = dtype if dtype in DTYPE_BYTES else "float32"
    each = QUANTISED_BYTES.get(quantization or "", DTYPE_BYTES[dtype])
    name = next(iter(config.get("architectures") or ()), str(config.get("model_type")))
    layers = kv_layers(text, *KV_BYTES.get(kv_cache_dtype, (DTYPE_BYTES[dtype],)))
    stored = "" if checkpoint is None else str(checkpoint)
    pictures = PICTURE_BYTES if "vision_config" in config else 0
    num_kept, kept_bytes = kept if is_kept else (0, 0)
    num_bytes = kept_bytes + math.ceil((num_weights - num_kept) * each)
    return ModelSizes(name, dtype, num_weights, num_bytes, _positions(text), layers, stored, stored_bytes, pictures)


def _sizes_of_gguf(source: str, dtype: str, quantization: str | None, kv_cache_dtype: str) -> ModelSizes:
    from nanovllm.models.gguf.config import read_config
    from nanovllm.models.gguf.file import open_gguf, parts_of

    file = open_gguf(source)
    config = read_config(file)
    dtype = "bfloat16" if dtype == "auto" else dtype
    num_bytes = sum(part.stat().st_size for part in parts_of(Path(source).expanduser()))
    layers = kv_layers(config, *KV_BYTES.get(kv_cache_dtype, (DTYPE_BYTES[dtype],)))
    name = config["architectures"][0]
    if quantization == "dequantize":
        num_weights = sum(math.prod(tensor.shape) for tensor in file.tensors.values())
        return ModelSizes(name, dtype, num_weights, num_weights * DTYPE_BYTES[dtype], _positions(config), layers)
    return ModelSizes(name, dtype, 0, num_bytes, _positions(config), layers)


def _positions(config: Mapping[str, Any]) -> int:
    class _Config:
        def __getattr__(self, name: str) -> Any:
            return config.get(name)

    return positions_of(_Config()) or 2048


def _stored_weights(source: str, folder: Path, checkpoint: Checkpoint | None) -> tuple[int, int, tuple[int, int]]:
    """(weights, bytes in files, (weights, bytes) that can stay quantised) of a folder; pickles are taken for float16.

    Raises MissingLibraryError for quantised weights with a missing library, and ModelLoadError for damaged files.
    """
    if checkpoint is not None and checkpoint.is_read:
        from nanovllm.models.quantised.stored import StoredWeights  # imports torch

        weights = StoredWeights(source, folder, checkpoint)
        return weights.num_weights, weights.num_stored_bytes, weights.kept
    headers = read_headers(folder)
    num_weights = sum(tensor.num_elements for tensor in headers.values())
    num_bytes = sum(tensor.num_bytes for tensor in headers.values())
    if not headers:
        num_bytes = sum(path.stat().st_size for path in folder.glob("*.bin"))
        num_weights = num_bytes // DTYPE_BYTES["float16"]
    return num_weights, num_bytes, (0, 0)


def kv_layers(config: Mapping[str, Any], value_bytes: int, row_bytes: int = 0) -> tuple[tuple[int | None, int], ...]:
    """(window, bytes per token) of each layer of a text model with its own K and V.

    Args:
        value_bytes, row_bytes: bytes of a value, and of other data in a head's row.
    """
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
    per_token = kv_heads * ((key_size + value_size) * value_bytes + 2 * row_bytes)
    return tuple(
        (window if kind in WINDOWED else None, per_token)
        for kind in types[: num_layers - shared]
        if "attention" in kind and "linear" not in kind
    )
