"""K and V as 8-bit floats (e4m3): a head's row of a token is rounded by its own largest number.

So a row is the same in a chunk, after a cached prefix, after a preemption and alone, and nothing is calibrated. The
cache of K, or of V, is [num_slots, num_kv_heads, head_dim + 4] bytes. Of each 16 slots the elements come first, then
the scales, so that kernels read both in whole sectors; blocks are multiples of 16::

    bytes of 16 slots   of K: [16, num_kv_heads, head_dim] e4m3     scales [num_kv_heads, 16] float32
                        of V: [num_kv_heads, value_dim, 16] e4m3

An attention kernel sums products over elements of K, and over slots of V: these lie side by side, since threads read no
less than four bytes.

fast/kernels/fp8_rows.py has the same for a GPU.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanovllm.attention import LayerCache, kv_formats
from nanovllm.device import find_kernel
from nanovllm.features import option_checks
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.extras import is_installed

CACHE_DTYPE = torch.uint8
SLOTS = 16  # slots with values next to each other
SCALE_BYTES = 4
LARGEST = 448.0  # largest number of e4m3
LEAST = 2.0**-100  # a row without larger numbers is zero

logger = logging.getLogger("nanovllm")


class Fp8Format:
    """See `KVFormat`.

    Args:
        store: `store_rounded` of fast/kernels/fp8_rows.py; None where there is none.
    """

    extra = SCALE_BYTES

    def __init__(self, store: Any = None) -> None:
        self._store = store

    def write(self, key: Tensor, value: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
        if self._store is None or not key.is_cuda:
            write_rows(key[0].transpose(0, 1), cache[0], slot_mapping)
            write_rows(value[0].transpose(0, 1), cache[1], slot_mapping, is_value=True)
        elif isinstance(cache, Tensor):
            self._store(key, value, cache, None, slot_mapping)
        else:
            self._store(key, value, *cache, slot_mapping)

    def read(self, cache: Tensor, dtype: torch.dtype, is_value: bool) -> Tensor:
        values, scales = parts_of(cache, is_value=is_value)
        widened = values.view(torch.float8_e4m3fn).float() * scales.transpose(1, 2)[..., None]
        return widened.to(dtype).flatten(0, 1)


def parts_of(cache: Tensor, *, is_value: bool = False) -> tuple[Tensor, Tensor]:
    """Views of a cache: elements [num_slots / 16, 16, num_kv_heads, head_dim], scales [..., num_kv_heads, 16]."""
    num_slots, num_heads, width = cache.shape
    head_dim = width - SCALE_BYTES
    rows = cache.view(num_slots // SLOTS, SLOTS * num_heads * width)
    num_bytes = SLOTS * num_heads * head_dim
    if is_value:
        values = rows[:, :num_bytes].unflatten(1, (num_heads, head_dim, SLOTS)).permute(0, 3, 1, 2)
    else:
        values = rows[:, :num_bytes].unflatten(1, (SLOTS, num_heads, head_dim))
    return values, rows[:, num_bytes:].view(torch.float32).unflatten(1, (num_heads, SLOTS))


def write_rows(rows: Tensor, cache: Tensor, slot_mapping: Tensor, *, is_value: bool = False) -> None:
    """Write rows [num_tokens, num_kv_heads, head_dim] of K, or of V, to their slots."""
    values, scales = parts_of(cache, is_value=is_value)
    rows = rows.float()
    largest = rows.abs().amax(-1).clamp(min=LEAST)
    # Tensor by tensor and a product: a number divided by a tensor, or a tensor by one, is rounded otherwise on a GPU.
    rounded = (rows * (torch.full_like(largest, LARGEST) / largest)[..., None]).to(torch.float8_e4m3fn)
    group = slot_mapping // SLOTS
    slot = slot_mapping % SLOTS
    values[group, slot] = rounded.view(torch.uint8)
    scales[group, :, slot] = largest * (1 / LARGEST)


def use_format(binding: Any, config: EngineConfig) -> None:
    """Keep the K and V of a hooked model in this format; its caches are not allocated yet.

    Raises ValueError for another device, and for a model without K and V.
    """
    option_checks.check_kv_cache_dtype(config, binding.device)
    if config.attention_backend == "flex" and not is_installed("nanovllm.fast.attention"):
        raise ValueError(
            "attention_backend is 'flex', which in this installation reads plain K and V alone, and kv_cache_dtype is "
            "'fp8'. Use 'auto' or 'sdpa', or install the whole package."
        )
    if not binding.layers:
        raise ValueError(
            f"kv_cache_dtype is 'fp8', but no layer of {type(binding.model).__name__} attends, so that it has no K "
            "and V. Leave it out."
        )
    before = binding.caches.num_bytes(1)
    store = find_kernel("fp8_rows", "store_rounded") if binding.device.type == "cuda" else None
    kv_formats[CACHE_DTYPE] = Fp8Format(store)
    binding.layers[:] = [replace(layer, cache_dtype=CACHE_DTYPE) for layer in binding.layers]
    binding.caches.choice = f":{config.kv_cache_dtype}"
    logger.info(
        "K and V are kept in 8-bit floats: %d bytes a token in place of %d in %s",
        binding.caches.num_bytes(1), before, binding.dtype,
    )  # fmt: skip
