"""Pools of the cache groups: the split of memory among layers that see a whole sequence or only its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.groups.group_layouts import with_groups
from nanovllm.features.groups.state_kinds import FULL, StateKind
from nanovllm.layout import BatchLayout, LayerTraits, kind_of
from nanovllm.one_pool import resolve_pool

# Slots of recurrent states that a running sequence holds: the one that steps write to, the last one that is kept, and
# now and then one more at a block's end.
RECORDS_PER_SEQUENCE = 2.1


class CacheGroup(NamedTuple):
    """Layers of one kind, with common block tables and one pool of blocks.

    layers: indices of its layers in the model.
    block_bytes: bytes of one block over all its layers.
    """

    layers: tuple[int, ...] = ()
    block_bytes: int = 0
    kind: StateKind = FULL


class CachePools(NamedTuple):
    """The cache groups of a model, and the blocks in each one's pool, the null block included."""

    groups: tuple[CacheGroup, ...]
    num_blocks: tuple[int, ...]

    @property
    def is_one_full(self) -> bool:
        """Whether a plain `BlockManager` serves the model: full attention alone."""
        return len(self.groups) == 1 and self.groups[0].kind.is_full

    @property
    def num_bytes(self) -> int:
        return sum(group.block_bytes * count for group, count in zip(self.groups, self.num_blocks, strict=True))

    @property
    def are_records(self) -> tuple[bool, ...]:
        """Whether each group keeps a record a sequence; at most the last one does."""
        return tuple(group.kind.record_bytes is not None for group in self.groups)

    @property
    def paged(self) -> CachePools:
        """The groups of K and V."""
        num_paged = self.are_records.count(False)
        return CachePools(self.groups[:num_paged], self.num_blocks[:num_paged])

    def groups_of_layers(self) -> list[int]:
        """The group of each layer."""
        of_layer = {layer: number for number, group in enumerate(self.groups) for layer in group.layers}
        return [of_layer[layer] for layer in sorted(of_layer)]

    def kind_groups(self, layers: Sequence[Any]) -> tuple[int, ...]:
        """The group of each kind of attention layers, ordered as by `kinds_of`; empty where one group holds all."""
        if len(self.paged.groups) == 1:
            return ()
        kinds = (kind_of(layer.traits) for layer in layers)
        return tuple(dict(zip(kinds, self.groups_of_layers(), strict=True)).values())

    def allocate(self, caches: Any, block_size: int) -> None:
        """Allocate `KVCaches`."""
        num_slots = (count * block_size for count in self.num_blocks)
        caches.allocate(*num_slots, groups=self.groups_of_layers(), num_records=self.num_blocks[-1])

    def lay_out(self, layout: BatchLayout, block_size: int) -> BatchLayout:
        """The layout with the rows of each group; call it right after the step was scheduled."""
        return layout if len(self.groups) == 1 else with_groups(layout, self.are_records, block_size)

    def num_longest(self, max_model_len: int, block_size: int) -> int:
        """Number of sequences of max_model_len that fit at once."""
        pairs = zip(self.groups, self.num_blocks, strict=True)
        return min((count - 1) // group.kind.max_blocks(max_model_len, block_size) for group, count in pairs)


def cache_groups_of(
    layers: Sequence[LayerTraits], block_bytes: Sequence[int], max_model_len: int, *, record_bytes: int = 0
) -> tuple[CacheGroup, ...]:
    """The groups of a model's layers, full attention first, recurrent states last.

    A window or chunk that holds max_model_len hides nothing, so it counts as full attention; so do all layers where one
    reads the K and V of another that sees other positions. Where no layer attends, a group without layers and bytes
    comes first: its blocks stand for those of tokens in the prefix index.

    Args:
        block_bytes: bytes of one block in each layer; ignored for a layer that reads another's K and V.
        record_bytes: bytes of a sequence's recurrent states over all layers; 0 without such states.
    """

    kinds = [StateKind(*layer.sight).within(max_model_len) for layer in layers]
    if any(layer.shares is not None and kinds[layer.shares] != own for layer, own in zip(layers, kinds, strict=True)):
        kinds = [FULL] * len(layers)
    groups = []
    for kind in sorted(dict.fromkeys(kinds), key=lambda kind: not kind.is_full):  # stable
        members = tuple(index for index, own in enumerate(kinds) if own == kind)
        num_bytes = sum(block_bytes[index] for index in members if layers[index].shares is None)
        groups.append(CacheGroup(members, num_bytes, kind))
    if record_bytes:
        groups = [*(groups or [CacheGroup()]), CacheGroup((), record_bytes, StateKind.record(record_bytes))]
    return tuple(groups)


def pools_of(
    config: EngineConfig, binding: Any, memory_bytes: int, *, max_model_len_is_set: bool
) -> tuple[EngineConfig, CachePools]:
    """`resolve_pools` for the layers of a hooked model."""
    traits = [layer.traits for layer in binding.layers]
    block_bytes = [layer.token_bytes * config.block_size for layer in binding.layers]
    groups = cache_groups_of(traits, block_bytes, config.max_model_len, record_bytes=binding.mixers.num_bytes)
    return resolve_pools(config, groups, memory_bytes, max_model_len_is_set=max_model_len_is_set)


def resolve_pools(
    config: EngineConfig, groups: Sequence[CacheGroup], memory_bytes: int, *, max_model_len_is_set: bool
) -> tuple[EngineConfig, CachePools]:
    """Resolve num_kv_blocks (of the first group) and the pools of the other groups.

    The split is static, for sequences of half of max_model_len: all of their blocks in the group of full attention, a
    window in the others, the same for running sequences and for cached ones. `window_pool_share` overrides it.

    Args:
        memory_bytes, max_model_len_is_set: arguments of `resolve_pool`.

    Raises ValueError if a pool cannot hold one sequence of max_model_len.
    """
    groups = tuple(groups)
    if config.window_pool_share is not None and (len(groups) == 1 or not groups[0].block_bytes):
        raise ValueError(
            f"window_pool_share is {config.window_pool_share}, but all layers of this model share one pool here: "
            "they see the same positions. Leave window_pool_share out."
        )
    if len(groups) == 1 and groups[0].kind.is_full:
        config = resolve_pool(config, groups[0].block_bytes, memory_bytes, max_model_len_is_set=max_model_len_is_set)
        return config, CachePools(groups, (config.num_kv_blocks,))
    pools = CachePools(groups, _split(config, groups, memory_bytes))
    longest = config.max_model_len
    fitting = (pools.num_blocks[0] - 1) * config.block_size
    if groups[0].kind.is_full and not max_model_len_is_set and 2 <= fitting < longest:
        longest = fitting
    for number, (group, count) in enumerate(zip(*pools, strict=True)):
        if count - 1 < group.kind.max_blocks(longest, config.block_size):
            raise ValueError(_too_small(config, pools, number))
    return replace(config, num_kv_blocks=pools.num_blocks[0], max_model_len=longest), pools


def _split(config: EngineConfig, groups: tuple[CacheGroup, ...], memory_bytes: int) -> tuple[int, ...]:
    """Blocks of each group: in proportion to `_weights`, but no window pool smaller than one sequence needs."""
    weights = _weights(config, groups)
    kinds = [group.kind for group in groups]
    needed = [kind.max_blocks(config.max_model_len, config.block_size) for kind in kinds]
    least = [1 + count for count in needed]
    if groups[0].kind.is_full and groups[0].block_bytes:
        least[0] = 0
    if kinds[-1].record_bytes is not None:
        least[-1] = _fewest_records(config, groups[-1], memory_bytes)
    if config.num_kv_blocks is not None:
        scale = config.num_kv_blocks / weights[0]
        return config.num_kv_blocks, *(max(n, int(scale * w)) for n, w in zip(least[1:], weights[1:], strict=True))
    memory = config.kv_cache_memory_bytes
    is_asked = memory is not None
    if memory is None:
        memory = max(0, memory_bytes)
    scale = memory / sum(group.block_bytes * weight for group, weight in zip(groups, weights, strict=True))
    counts = [max(n, int(scale * weight)) for n, weight in zip(least, weights, strict=True)]
    if not is_asked:  # no more than blocks of all running sequences, and as many cached windows again
        chunk = -(-2 * config.max_num_batched_tokens // config.block_size)
        for number, kind in enumerate(kinds):
            most = config.max_num_seqs * needed[number] * (1 if kind.is_full else 2)
            if not kind.is_full and kind.record_bytes is None:
                most += chunk
            counts[number] = min(counts[number], most + 1)
    if groups[0].block_bytes:
        rest = memory - sum(g.block_bytes * n for g, n in zip(groups[1:], counts[1:], strict=True))
        counts[0] = max(0, min(counts[0], rest // groups[0].block_bytes))
    return tuple(counts)


def _fewest_records(config: EngineConfig, group: CacheGroup, memory_bytes: int) -> int:
    """Slots for all running sequences, in at most half of the memory, and for at least one sequence."""
    num_kept = 0 if config.speculation is None else config.max_num_seqs  # one each while drafts are verified
    wanted = 1 + math.ceil(RECORDS_PER_SEQUENCE * config.max_num_seqs) + num_kept
    if config.num_kv_blocks is None:
        memory = memory_bytes if config.kv_cache_memory_bytes is None else config.kv_cache_memory_bytes
        wanted = min(wanted, memory // 2 // group.block_bytes)
    return max(1 + group.kind.max_blocks(config.max_model_len, config.block_size), wanted)


def _weights(config: EngineConfig, groups: tuple[CacheGroup, ...]) -> list[float]:
    """Relative numbers of blocks of the groups."""
    blocks: list[float] = [group.kind.max_blocks(config.max_model_len, config.block_size) for group in groups]
    if groups[0].kind.is_full:
        blocks[0] /= 2
    if (share := config.window_pool_share) is not None:
        of_windows = sum(group.block_bytes * count for group, count in zip(groups[1:], blocks[1:], strict=True))
        factor = share / (1 - share) * groups[0].block_bytes * blocks[0] / of_windows
        blocks[1:] = [factor * count for count in blocks[1:]]
    return blocks


def _too_small(config: EngineConfig, pools: CachePools, number: int) -> str:
    """The message for a pool that cannot hold one sequence."""
    (layers, _, kind), count = pools.groups[number], pools.num_blocks[number]
    needed = 1 + kind.max_blocks(config.max_model_len, config.block_size)
    if kind.record_bytes is not None:
        return (
            f"the pool of recurrent states has {count} slots of {kind.record_bytes:,} bytes (slot 0 is reserved), but "
            f"one sequence needs {needed}. Give the cache more memory through kv_cache_memory_bytes or "
            "gpu_memory_utilization."
        )
    seen = f"window {kind.window}" if kind.window is not None else f"chunks of {kind.chunk}"
    return (
        f"the KV cache of the {len(layers)} layers with {'full attention' if kind.is_full else seen} has {count}"
        f" blocks of {config.block_size} tokens (block 0 is reserved), but one sequence of max_model_len "
        f"({config.max_model_len}) needs {needed}. Set a smaller max_model_len, or give the cache more memory through "
        "num_kv_blocks, kv_cache_memory_bytes or gpu_memory_utilization."
        + ("" if config.window_pool_share is None else f" window_pool_share is {config.window_pool_share}.")
    )
