"""The one pool of blocks of a KV cache in which all layers keep every position, and its number of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from nanovllm.config import EngineConfig

Config = TypeVar("Config", bound=EngineConfig)


class OnePool(NamedTuple):
    """One pool of blocks for all layers.

    num_blocks: Blocks in the pool, the null block included.
    block_bytes: Bytes of one block over all layers.
    """

    num_blocks: int
    block_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def num_longest(self, max_model_len: int, block_size: int) -> int:
        """Number of sequences of max_model_len that fit at once."""
        return (self.num_blocks - 1) // -(-max_model_len // block_size)

    def kind_groups(self, layers: Sequence[Any]) -> Sequence[int]:
        """Empty: one pool serves every kind of layers."""
        return ()

    def allocate(self, caches: Any, block_size: int) -> None:
        """Allocate `KVCaches`."""
        caches.allocate(self.num_blocks * block_size)

    def lay_out(self, layout: Any, block_size: int) -> Any:
        """The layout itself: no other pool has rows."""
        return layout


def one_pool(config: Config, binding: Any, memory_bytes: int, *, max_model_len_is_set: bool) -> tuple[Config, OnePool]:
    """Resolve num_kv_blocks for a hooked model; arguments and errors as for `resolve_pool`."""
    block_bytes = binding.caches.num_bytes(config.block_size)
    config = resolve_pool(config, block_bytes, memory_bytes, max_model_len_is_set=max_model_len_is_set)
    return config, OnePool(config.num_kv_blocks, block_bytes)


def resolve_pool(config: Config, block_bytes: int, memory_bytes: int, *, max_model_len_is_set: bool) -> Config:
    """Resolve num_kv_blocks from `num_kv_blocks`, `kv_cache_memory_bytes` or `memory_bytes`, in this order.

    Args:
        block_bytes: bytes of one block over all layers.
        memory_bytes: free memory of the device.
        max_model_len_is_set: True if the user set max_model_len; otherwise it is lowered to fit the pool.

    Raises ValueError if the pool cannot hold one sequence of max_model_len.
    """
    per_sequence = -(-config.max_model_len // config.block_size)
    if config.num_kv_blocks is not None:
        num_blocks = config.num_kv_blocks
    elif config.kv_cache_memory_bytes is not None:
        num_blocks = config.kv_cache_memory_bytes // block_bytes
    else:  # max_num_seqs sequences of max_model_len use no more blocks than that
        num_blocks = min(max(0, memory_bytes) // block_bytes, per_sequence * config.max_num_seqs + 1)
    fitting = max(0, num_blocks - 1) * config.block_size
    max_model_len = config.max_model_len
    if fitting < max_model_len:
        if max_model_len_is_set or fitting < 2:
            smaller = f"Set max_model_len to at most {fitting}, or give" if fitting >= 2 else "Give"
            raise ValueError(
                f"the KV cache of {num_blocks} blocks of {config.block_size} tokens ({num_blocks * block_bytes:,} "
                f"bytes; block 0 is reserved) holds sequences of at most {fitting} tokens, but max_model_len is "
                f"{max_model_len}. {smaller} the cache at least {per_sequence + 1} blocks "
                f"({(per_sequence + 1) * block_bytes:,} bytes) through num_kv_blocks, kv_cache_memory_bytes or "
                "gpu_memory_utilization."
            )
        max_model_len = fitting
    return replace(config, num_kv_blocks=num_blocks, max_model_len=max_model_len)
