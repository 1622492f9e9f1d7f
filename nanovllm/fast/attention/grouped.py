"""Attention of layers in several cache groups: one backend a group, over the group's block tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanovllm.attention import AttentionBackend, AttentionLayer, AttentionPlan
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.groups.cache_pools import CachePools
from nanovllm.layout import BatchLayout, kinds_of

if TYPE_CHECKING:
    from nanovllm.fast.attention.backends import AttentionChoice


class GroupedAttention:
    """A backend for each group.

    Args:
        pools: pools of at least two groups of K and V.
    """

    def __init__(
        self,
        choice: AttentionChoice,
        layers: Sequence[AttentionLayer],
        device: torch.device,
        config: EngineConfig,
        pools: CachePools,
    ) -> None:
        self._backends: list[AttentionBackend] = []
        kinds = kinds_of(layer.traits for layer in layers)
        group_kinds = dict.fromkeys(kinds, (0, 0))
        for number, (group, num_blocks) in enumerate(zip(pools.groups, pools.num_blocks, strict=True)):
            members = [layers[index] for index in group.layers]
            own_kinds = kinds_of(layer.traits for layer in members)
            group_kinds |= {kind: (number, local) for local, kind in enumerate(own_kinds)}
            own = choice  # the choice, with the kernels of this group's kinds
            if choice.kernels:
                own = replace(choice, kernels=tuple(choice.kernels[kinds.index(kind)] for kind in own_kinds))
            self._backends.append(own.build(members, device, replace(config, num_kv_blocks=num_blocks)))
        self._group_kinds = [group_kinds[kind] for kind in kinds]
        self.reads_whole_blocks = any(backend.reads_whole_blocks for backend in self._backends)

    def plan(self, layout: BatchLayout) -> GroupedPlan:
        layouts = layout, *layout.others  # the group of recurrent states, if any, comes last
        plans = [backend.plan(of_group) for backend, of_group in zip(self._backends, layouts, strict=False)]
        return GroupedPlan(plans, self._group_kinds)


@dataclass(frozen=True, slots=True)
class GroupedPlan:
    """One step's plan of each group.

    group_kinds: (group, index among the group's kinds) of each kind of layers.
    """

    plans: list[AttentionPlan]
    group_kinds: list[tuple[int, int]]

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
        group, local = self.group_kinds[kind]
        return self.plans[group].attend(query, key_cache, value_cache, scaling, local, sinks)
