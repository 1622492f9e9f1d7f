"""Chooses the block manager of an engine; for the composition root, since it knows every kind of manager."""

from __future__ import annotations

from typing import Any

from nanovllm.block_manager import BlockManager
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.groups.cache_groups import CacheGroups
from nanovllm.features.groups.cache_pools import CachePools


def build_block_manager(
    config: EngineConfig, pools: CachePools, *, hash_seed: str = "", with_tiers: bool = False
) -> BlockManager:
    """The block manager of an engine: a plain one for full attention alone. The config is fully resolved."""
    prefixes: dict[str, Any] = {"enable_prefix_caching": config.enable_prefix_caching, "hash_seed": hash_seed}
    plain = BlockManager
    grouped = CacheGroups
    if with_tiers:
        from nanovllm.features.tiers.tiered_blocks import TieredBlocks, TieredGroups

        plain = TieredBlocks
        grouped = TieredGroups
    if pools.is_one_full:
        return plain(config.num_kv_blocks, config.block_size, **prefixes)
    return grouped(
        [group.kind for group in pools.groups],
        pools.num_blocks,
        config.block_size,
        max_model_len=config.max_model_len,
        max_chunk_tokens=config.long_prefill_token_threshold * (2 if config.overlap else 1),
        **prefixes,
    )
