"""The GPU's `flex` backend for all layers of a model: tables and calls for each kind of layers.

Kinds of one cache group read the same block tables; what a kind's rows see of them is its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanovllm.attention.flex_gpu import GpuFlexAttention, GpuFlexPlan
from nanovllm.attention.flex_gpu_options import KernelOptions
from nanovllm.attention.operator import AttentionLayer
from nanovllm.attention.step_tables import TableInputs
from nanovllm.attention.tiles import Tiles
from nanovllm.cache.cache_pools import CachePools
from nanovllm.cache.kinds import LayerTraits, kind_of
from nanovllm.core.batch_layout import BatchLayout
from nanovllm.core.config import EngineConfig


class GpuFlexKinds:
    """A `GpuFlexAttention` for each kind of layers, where there are several.

    Args:
        groups: the cache group of each; empty where one group holds all layers.
    """

    def __init__(self, backends: Sequence[GpuFlexAttention], groups: Sequence[int]) -> None:
        self.backends = tuple(backends)
        self.groups: tuple[int | None, ...] = tuple(groups) or (None,) * len(backends)
        self.inputs = TableInputs(backends[0].block_size, 1 + max(groups) if groups else 0)
        self.compiles_each_size = any(backend.compiles_each_size for backend in backends)
        # Beginnings of block tables are those of the first group. Only one kind's decodes read them together, since how
        # many do depends on its heads.
        of_first = (backend for backend, group in zip(backends, self.groups, strict=True) if not group)
        self._sharing = next((backend for backend in of_first if backend.shares), self.backends[0])

    def plan(self, layout: BatchLayout) -> Tiles:
        """As of `GpuFlexAttention`; the tiles are the same for all kinds."""
        return self._sharing.plan(layout)

    def fill(self, inputs: Any) -> GpuKindsPlan:
        """As of `GpuFlexAttention`."""
        return GpuKindsPlan([
            backend.fill(inputs, group, shares=backend is self._sharing)
            for backend, group in zip(self.backends, self.groups, strict=True)
        ])  # fmt: skip


@dataclass(frozen=True, slots=True)
class GpuKindsPlan:
    """One step's plan of each kind."""

    plans: list[GpuFlexPlan]

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scaling: float,
        kind: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionPlan`."""
        return self.plans[kind].attend(query, key_cache, value_cache, scaling, kind, sinks)


def layers_by_kind(layers: Sequence[AttentionLayer]) -> list[AttentionLayer]:
    """The first layer of each kind, in the order of `kinds_of`."""
    found: dict[LayerTraits, AttentionLayer] = {}
    for layer in layers:
        found.setdefault(kind_of(layer.traits), layer)
    return list(found.values())


def kind_groups(layers: Sequence[AttentionLayer], pools: CachePools) -> tuple[int, ...]:
    """The cache group of each kind of layers; empty where one group holds all layers."""
    if len(pools.groups) == 1:
        return ()
    groups = dict(zip(map(id, layers), pools.groups_of_layers(), strict=True))
    return tuple(groups[id(layer)] for layer in layers_by_kind(layers))


def build_gpu_attention(
    layers: Sequence[AttentionLayer],
    device: torch.device,
    config: EngineConfig,
    pools: CachePools,
    *,
    max_decodes: int,
    max_tiles: int,
) -> GpuFlexAttention | GpuFlexKinds:
    """The backend of an engine, of a fully resolved config; `max_decodes` and `max_tiles` bound a step."""
    groups = kind_groups(layers, pools)
    firsts = layers_by_kind(layers)
    backends = [
        GpuFlexAttention(
            options=KernelOptions.for_layer(layer, device, config.block_size),
            max_decodes=max_decodes,
            max_tiles=max_tiles,
            max_blocks=-(-config.max_model_len // config.block_size),
            num_blocks=pools.num_blocks[group],
            uses_flash=config.attention_backend == "flash",
            device=device,
        )
        for layer, group in zip(firsts, groups or [0] * len(firsts), strict=True)
    ]
    return backends[0] if len(backends) == 1 else GpuFlexKinds(backends, groups)
