"""Storage of one rank's tiers: host memory, and a folder of files with a header."""

from __future__ import annotations

import json
import math
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import nanovllm
from nanovllm.device import find_kernel
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.groups.cache_pools import CachePools
from nanovllm.features.states.mixers import Mixers
from nanovllm.features.tiers.books import TierBooks
from nanovllm.features.tiers.directory import CacheDirectory, folder_of_rank
from nanovllm.features.tiers.host_memory import HostMemory
from nanovllm.model import ModelBinding

DEFAULT_HOST_BYTES = 2**30  # host memory that files are read into, where no host tier is asked for


@dataclass(frozen=True, slots=True)
class TierStorage:
    """Storage of one rank.

    books: index of stored blocks; rank 0's decides, other ranks find the blocks of their files by it.
    directory: None for host memory alone.
    seed: identity of all that KV depends on besides tokens and salt, as files name it; None without files.
    """

    memory: HostMemory
    books: TierBooks
    directory: CacheDirectory | None
    seed: str | None

    @classmethod
    def open(cls, binding: ModelBinding, config: EngineConfig, pools: CachePools, digest: str | None) -> TierStorage:
        """Open host memory and files. The caches are allocated.

        Args:
            digest: fingerprint of the model, or of this rank's shard, by `models.fingerprint`; None without files.

        Raises ValueError for bytes that hold no block or recurrent state, or that cannot be pinned.
        """
        memory = _host_memory(binding, config, pools)
        host_bytes = config.prefix_cache_host_bytes or max(DEFAULT_HOST_BYTES, _least_bytes(pools))
        books = TierBooks([group.block_bytes for group in pools.groups], host_bytes, _shares(pools))
        if digest is None or config.prefix_cache_dir is None:
            return cls(memory, books, None, None)
        header = _file_header(binding, config, pools, digest)
        folder = Path(config.prefix_cache_dir)
        ranks = binding.ranks
        num_bytes = config.prefix_cache_dir_bytes
        if ranks is not None:
            header |= {"rank": ranks.rank, "ranks": ranks.size}
            folder = folder / folder_of_rank(ranks.rank, ranks.size)
            num_bytes = num_bytes // ranks.size
        if num_bytes < (most := max(group.block_bytes for group in pools.groups)):
            raise ValueError(
                f"prefix_cache_dir_bytes is {config.prefix_cache_dir_bytes:,}, {num_bytes:,} for a rank, and one block "
                f"or state takes {most:,}. Set at least {most * config.tensor_parallel_size:,}."
            )
        return cls(memory, books, CacheDirectory(folder, header, num_bytes, books), json.dumps(header, sort_keys=True))


def _shares(pools: CachePools) -> list[float]:
    """Shares of a tier's bytes for the cache groups: those of the KV cache."""
    return [group.block_bytes * count / pools.num_bytes for group, count in zip(*pools, strict=True)]


def _least_bytes(pools: CachePools) -> int:
    """Fewest bytes of a tier with room for one recurrent state; 0 for a model without any."""
    return math.ceil(pools.groups[-1].block_bytes / _shares(pools)[-1]) if any(pools.are_records) else 0


def _host_memory(binding: ModelBinding, config: EngineConfig, pools: CachePools) -> HostMemory:
    """The host memory of a rank, which executes the copies of its steps from now on."""
    caches = binding.caches
    sizes = [group.block_bytes for group in pools.groups]
    caches.host = memory = HostMemory(caches, sizes, config.block_size, binding.device)
    num_bytes = config.prefix_cache_host_bytes or 0
    if num_bytes and num_bytes < (least := _least_bytes(pools)):
        raise ValueError(
            f"prefix_cache_host_bytes is {num_bytes:,}, of which recurrent states have a share that holds none: "
            f"one of {type(binding.model).__name__} takes {sizes[-1]:,} bytes. Set at least {least:,}."
        )
    try:
        memory.pin([int(num_bytes * share) for share in _shares(pools)])
    except RuntimeError as error:
        raise ValueError(
            f"prefix_cache_host_bytes is {num_bytes:,} for each of {config.tensor_parallel_size} ranks, and this "
            f"machine cannot pin so much memory ({error}). Set fewer bytes."
        ) from error
    return memory


def _file_header(binding: ModelBinding, config: EngineConfig, pools: CachePools, digest: str) -> dict[str, Any]:
    """Everything that the bytes of KV depend on besides tokens and salts."""
    shapes = [
        [
            [*part.shape[:1], *part.shape[2:], str(part.dtype)]
            for part in binding.caches.blocks_of(group, config.block_size)
        ]
        for group in range(len(pools.groups))
    ]
    layers = binding.mixers.layers if isinstance(binding.mixers, Mixers) else []
    states = [sorted(map(str, layer.states)) for layer in layers]
    return ({"states": states} if states else {}) | {
        "model": digest,
        "rope": binding.rope.choice,
        "device": binding.device.type,
        "machine": platform.machine(),
        "processor": _processor(binding.device),
        "attention_backend": config.attention_backend,
        "block_size": config.block_size,
        "groups": [[*group.kind.spans, list(group.layers), group.block_bytes] for group in pools.groups],
        "blocks": shapes,
        "quantization": config.quantization,
        "exact_activations": config.exact_activations,
        "nanovllm": nanovllm.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _processor(device: torch.device) -> str | None:
    """The class of the CPU, or the name of the GPU: others round K and V differently."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    rounding_class = find_kernel("processor_classes", "rounding_class")
    return None if rounding_class is None else rounding_class()
