"""Attention on a GPU: one call for the decodes of a step, one for its chunks, by FlexAttention (Dong et al. 2024).

Decodes go to `fast/kernels/paged_decode.py` where it exists, else to `flex_decodes.py`. In both calls the block mask is
the block table::

    decode   batch dimension = sequences, one row a query head    partial: all KV tiles of its blocks, to the last slot
    chunk    tiles of block_size rows, longest context first      full: the blocks before  partial: its own block

A chunk's row at position q is row q % block_size of its block's tile, so it sees its own block diagonally,
`kv % block_size <= row % block_size`, and nothing is captured. Layers with a window, or attention in chunks, list no
more than they see. All tables keep their addresses, so that a captured CUDA graph reads those of its step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nanovllm.attention import AttentionLayer, row_values
from nanovllm.device import find_kernel
from nanovllm.fast.attention.flex_chunks import FlexChunks
from nanovllm.fast.attention.flex_decodes import FlexDecodes
from nanovllm.fast.attention.flex_gpu_options import MIN_HEAD_DIM, KernelOptions
from nanovllm.fast.attention.layer_traits import first_beyond
from nanovllm.fast.attention.no_attention import NoAttention
from nanovllm.fast.attention.shared_prefixes import SharedPrefixes, SharingRule
from nanovllm.fast.attention.step_tables import StepTables, TableInputs
from nanovllm.fast.attention.tiles import Tiles
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.groups.cache_pools import CachePools
from nanovllm.layout import BatchLayout, LayerTraits, Sight, kind_of


class GpuFlexAttention:
    """The `flex` backend on a GPU, with tables and calls for each kind of layers.

    Args:
        options: kernel options of each kind of layers on this GPU.
        groups: cache group of each kind; empty where one group holds all layers.
        num_blocks: blocks of each group's cache.
        max_decodes, max_tiles: most decodes and tiles in a step.
        max_blocks: most blocks of a sequence.
        widened: `WidenedChunks` of fast/kernels/fp8_rows.py, for caches in 8-bit floats; None for others.
    """

    def __init__(
        self,
        *,
        options: Sequence[KernelOptions],
        groups: Sequence[int],
        num_blocks: Sequence[int],
        max_decodes: int,
        max_tiles: int,
        max_blocks: int,
        device: torch.device,
        widened: Any = None,
    ) -> None:
        self._widened = widened
        self.block_size = options[0].block_size
        self._groups: tuple[int | None, ...] = tuple(groups) or (None,) * len(options)
        self.kinds = [
            KindCalls(
                each, max_decodes=max_decodes, max_tiles=max_tiles, max_blocks=max_blocks,
                num_blocks=num_blocks[group or 0], device=device,
            )
            for each, group in zip(options, self._groups, strict=True)
        ]  # fmt: skip
        self._has_spans = any(kind.prompts is not None for kind in self.kinds)
        num_groups = 1 + max(groups) if groups else 0
        # Of a packed step, for `fill`.
        self.inputs = TableInputs(self.block_size, num_groups, has_spans=self._has_spans)
        self.compiles_each_size = any(kind.compiles_each_size for kind in self.kinds)
        # Beginnings of block tables are those of the first group. Only one kind's decodes read them together, since how
        # many do depends on its heads.
        of_first = (kind for kind, group in zip(self.kinds, self._groups, strict=True) if not group)
        self._sharing = next((kind for kind in of_first if kind.sharing is not None), self.kinds[0])

    @staticmethod
    def supports(traits: LayerTraits) -> str | None:
        """The first trait of a layer that this backend cannot compute, in words; None if it serves the layer."""
        if min(traits.head_dim, traits.value_dim) < MIN_HEAD_DIM:
            return (
                f"heads of {min(traits.head_dim, traits.value_dim)} elements, of {MIN_HEAD_DIM} that it takes at least"
            )
        return first_beyond(traits, "window", "chunk", "softcap", "sinks", "widths")

    @staticmethod
    def unread_layer(layers: Sequence[AttentionLayer]) -> str | None:
        """Name of the first layer with K and V in a form that this backend does not read; None without one."""
        kernel = find_kernel("paged_decode", "PagedDecode")
        for index, layer in enumerate(layers):
            head_dim = max(layer.traits.head_dim, layer.traits.value_dim)
            if layer.cache_dtype is not None and (kernel is None or not kernel.suits(head_dim, layer.dtype)):
                return (
                    f"layer {index} has heads of {head_dim} elements in 8-bit floats, which no kernel of decodes reads"
                )
        return None

    def plan(self, layout: BatchLayout) -> Tiles:
        """The host's part of the block masks; `fill` does the rest on the device."""
        prefixes = self._sharing.shared_prefixes(layout) if layout.num_decodes else None
        return Tiles.from_layout(layout, self.block_size, prefixes, with_spans=self._has_spans)

    def fill(self, inputs: Any) -> GpuFlexPlan:
        """Fill the block masks' tables on the device; they are overwritten by the next step's.

        Args:
            inputs: arrays of the packed step by name, on the device.
        """
        steps = [StepTables.from_inputs(inputs, group) for group in self._groups]
        for kind, step in zip(self.kinds, steps, strict=True):
            kind.fill(step, shares=kind is self._sharing)
        return GpuFlexPlan(self.kinds, steps, self._widened)


class NoGpuAttention:
    """The backend of a model without attention: its tiles give the shape of a step."""

    compiles_each_size = False

    def __init__(self, block_size: int) -> None:
        self.block_size, self.inputs = block_size, TableInputs(block_size)

    def plan(self, layout: BatchLayout) -> Tiles:
        return Tiles.from_layout(layout, self.block_size)

    def fill(self, inputs: Any) -> NoAttention:
        return NoAttention()


class KindCalls:
    """The tables and calls of one kind of layers; for the arguments see `GpuFlexAttention`."""

    def __init__(
        self,
        options: KernelOptions,
        *,
        max_decodes: int,
        max_tiles: int,
        max_blocks: int,
        num_blocks: int,
        device: torch.device,
    ) -> None:
        self._block_size = options.block_size
        kernel = options.decode_kernel(max_decodes, device)
        self.sharing: SharingRule | None = None  # None if decodes never read blocks together
        if kernel is not None and kernel.bundle_members > 1 and options.sight.is_full:
            token_bytes = 2 * options.num_kv_heads * options.head_bytes
            self.sharing = SharingRule.for_kernel(kernel, token_bytes)
        self.decodes: Any = kernel
        if kernel is None:
            self.decodes = FlexDecodes(options, max_decodes=max_decodes, max_blocks=max_blocks, device=device)
        self.prompts: Any = None if options.build_prompts is None else options.build_prompts()
        self.chunks: FlexChunks | None = None
        if self.prompts is None:
            self.chunks = FlexChunks(
                options, max_tiles=max_tiles, max_blocks=max_blocks, num_blocks=num_blocks,
                device=device,
            )  # fmt: skip
        self.compiles_each_size = kernel is None  # FlexAttention compiles once a number of decodes

    def shared_prefixes(self, layout: BatchLayout) -> SharedPrefixes | None:
        """The decodes of a step that read blocks together; None if none do."""
        if self.sharing is None:
            return None
        rule = self.sharing._replace(max_bundles=self.decodes.most_bundles(layout.num_decodes))
        return SharedPrefixes.from_layout(layout, self._block_size, rule)

    def fill(self, step: StepTables, *, shares: bool) -> None:
        """Fill the tables for a step; shares: True if the step's shared prefixes are those of this kind."""
        if len(step.decode_blocks):
            self.decodes.fill(
                step.tables, step.decode_tables, step.decode_blocks, step.decode_positions,
                step.sharing if shares else None,
            )  # fmt: skip
        if len(step.tile_blocks) and self.chunks is not None:
            self.chunks.fill(step.tables, step.tile_tables, step.tile_blocks, step.tile_is_used)


@dataclass(frozen=True, slots=True)
class GpuFlexPlan:
    """One step's attention; `attend` is called once a layer.

    kinds, steps: the calls and the tables of each kind of layers.
    widened: argument of `GpuFlexAttention`.
    """

    kinds: Sequence[KindCalls]
    steps: Sequence[StepTables]
    widened: Any = None

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
        calls = self.kinds[kind]
        step = self.steps[kind]
        count = len(step.decode_blocks)
        tile_rows = step.tile_rows
        if not len(tile_rows):
            attended: Tensor = calls.decodes.attend(query, key_cache, value_cache, scaling, None, sinks)
            return attended
        shape = *query.shape[:2], row_values(value_cache)
        output = query.new_empty(shape)
        if count:
            calls.decodes.attend(query[:count], key_cache, value_cache, scaling, output[:count], sinks)
        if self.widened is not None:
            key_cache, value_cache = self.widened.of_step(key_cache, value_cache, step)
        if calls.chunks is None:
            spans = step.spans, step.span_tables, step.tables
            calls.prompts.attend(query, key_cache, value_cache, spans, scaling, output, sinks, num_decodes=count)
            return output
        keys = key_cache.transpose(0, 1)[None]  # [1, num_kv_heads, num_slots, head_dim], a view
        values = value_cache.transpose(0, 1)[None]
        tiles = calls.chunks.attend(query.index_select(0, tile_rows), keys, values, scaling, sinks)
        torch.index_select(tiles, 0, step.chunk_rows, out=output[count:])
        return output


def layers_by_kind(layers: Sequence[AttentionLayer]) -> list[AttentionLayer]:
    """The first layer of each kind, in the order of `kinds_of`."""
    found: dict[LayerTraits, AttentionLayer] = {}
    for layer in layers:
        found.setdefault(kind_of(layer.traits), layer)
    return list(found.values())


def build_gpu_attention(
    layers: Sequence[AttentionLayer],
    device: torch.device,
    config: EngineConfig,
    pools: CachePools,
    *,
    max_decodes: int,
    max_tiles: int,
) -> GpuFlexAttention | NoGpuAttention:
    """The backend of an engine, of a fully resolved config; `max_decodes` and `max_tiles` bound a step."""
    if not layers:
        return NoGpuAttention(config.block_size)
    return GpuFlexAttention(
        options=[KernelOptions.for_layer(layer, device, config.block_size) for layer in layers_by_kind(layers)],
        groups=pools.kind_groups(layers),
        num_blocks=pools.num_blocks,
        max_decodes=max_decodes,
        max_tiles=max_tiles,
        max_blocks=-(-config.max_model_len // config.block_size),
        device=device,
        widened=_widened(layers, device, config, pools),
    )


def _widened(
    layers: Sequence[AttentionLayer], device: torch.device, config: EngineConfig, pools: CachePools
) -> Any | None:
    """Memory for K and V of chunks in the model's dtype, where the caches are in another; None where they are not."""
    if layers[0].cache_dtype is None:
        return None
    make: Any = find_kernel("fp8_rows", "WidenedChunks")
    firsts = layers_by_kind(layers)
    groups = pools.kind_groups(layers) or [0] * len(firsts)
    num_slots = [pools.num_blocks[group] * config.block_size for group in groups]
    return make([layer.traits for layer in firsts], num_slots, config.block_size, layers[0].dtype, device)


def widened_share(layers: Sequence[AttentionLayer]) -> float:
    """Memory of `_widened`, as a share of the caches' at most."""
    totals: Counter[Sight] = Counter()
    widest: Counter[Sight] = Counter()
    for layer in layers:
        if layer.cache_dtype is not None and layer.traits.shares is None:
            totals[layer.traits.sight] += layer.token_bytes
            of_token = replace(layer, cache_dtype=None).token_bytes
            widest[layer.traits.sight] = max(widest[layer.traits.sight], of_token)
    return max((widest[sight] / total for sight, total in totals.items()), default=0.0)
