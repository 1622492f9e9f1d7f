"""Chooses the attention backend: the one measured fastest on the device among those available there.

docs/guide/tuning.md and docs/results/gpu.md have the figures.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from nanovllm.attention import AttentionBackend, AttentionLayer
from nanovllm.defaults import PlainAttention, may_compile
from nanovllm.device import find_kernel
from nanovllm.errors import KernelBuildError, ProcessorClassError
from nanovllm.fast.attention.no_attention import NoAttention
from nanovllm.fast.attention.scores import scores_of
from nanovllm.features.engine_config import EngineConfig
from nanovllm.layout import LayerTraits, kinds_of

if TYPE_CHECKING:
    from nanovllm.fast.kernels.cpp import Kernels
    from nanovllm.features.groups.cache_pools import CachePools

logger = logging.getLogger("nanovllm")


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The chosen backend and its abilities."""

    backend: str  # "flex", "sdpa" or "cpp"
    compiles: bool  # True if layers may be compiled
    uses_graphs: bool  # True if steps have the layout of CUDA graphs ("flex" on a GPU)
    kernels: tuple[Kernels, ...]  # C++ kernels of each kind of layers; empty for other backends

    @classmethod
    def for_model(cls, layers: Sequence[AttentionLayer], device: torch.device, config: EngineConfig) -> AttentionChoice:
        """The backend for a model; raises ValueError, naming the missing part, if the user set an unavailable one."""
        compiles = may_compile(config, device)
        kernels: tuple[Kernels, ...] = ()
        wanted = config.attention_backend
        if wanted == "auto":
            if not compiles:
                wanted = "sdpa"
            elif device.type == "cuda":
                wanted = "flex"
            else:
                wanted = "cpp"
        if wanted == "cpp":
            try:
                kernels = _load_kernels(layers, device, config.exact_activations)
            except ProcessorClassError:  # a user's mistake
                raise
            except (KernelBuildError, ValueError) as error:
                if config.attention_backend == "cpp":
                    raise ValueError(
                        f"attention_backend='cpp' is unavailable ({error}). Use 'auto' or 'sdpa'."
                    ) from error
                logger.warning("attention_backend is 'sdpa': the C++ kernels are unavailable: %s", error)
                wanted = "sdpa"
        if wanted == "flex" and device.type == "cuda":
            from nanovllm.fast.attention.flex_gpu import GpuFlexAttention

            refused = unserved_layer(layers, GpuFlexAttention.supports) or GpuFlexAttention.unread_layer(layers)
            if refused is not None:
                if config.attention_backend == "flex":
                    raise ValueError(
                        f"attention_backend='flex' is unavailable on a GPU: {refused}. Use 'auto' or 'sdpa'."
                    )
                logger.warning(
                    "attention_backend is 'sdpa', since 'flex' does not serve the model on a GPU: %s", refused
                )
                wanted = "sdpa"
        return cls(wanted, compiles, wanted == "flex" and device.type == "cuda", kernels)

    @classmethod
    def beside_mixers(
        cls, layers: Sequence[AttentionLayer], device: torch.device, config: EngineConfig
    ) -> AttentionChoice:
        """The backend for a model with recurrent layers: nothing is compiled on a CPU.

        Raises ValueError as `for_model`, and for a backend that the user set where no layer attends.
        """
        wanted = config.attention_backend
        if not layers and wanted not in ("auto", "sdpa"):
            raise ValueError(f"attention_backend is {wanted!r}, but no layer of this model attends. Leave it out.")
        if layers:
            choice = cls.for_model(layers, device, config)
            return replace(choice, compiles=choice.uses_graphs)
        uses_graphs = device.type == "cuda" and wanted == "auto" and may_compile(config, device)
        return cls("flex" if uses_graphs else "sdpa", uses_graphs, uses_graphs, kernels=())

    def captures(self, config: EngineConfig, device: torch.device, obstacle: str | None = None) -> bool:
        """The resolved `cuda_graphs`; raises ValueError if the user set it and it is unavailable.

        Args:
            obstacle: the part of the model that no graph can capture, in words.
        """
        if config.cuda_graphs and not self.uses_graphs:
            raise ValueError(
                "cuda_graphs=True needs compiled layers on a GPU and attention_backend='flex', but this "
                f"engine has {self.backend!r} on {device}. Leave it out."
            )
        if obstacle is not None and self.uses_graphs:
            if config.cuda_graphs:
                raise ValueError(f"cuda_graphs=True is unavailable: {obstacle}. Leave cuda_graphs out.")
            if config.cuda_graphs is None:
                logger.warning("steps run without CUDA graphs: %s", obstacle)
            return False
        return self.uses_graphs if config.cuda_graphs is None else config.cuda_graphs

    def build(
        self,
        layers: Sequence[AttentionLayer],
        device: torch.device,
        config: EngineConfig,
        pools: CachePools | None = None,
        *,
        uncompiled: bool = False,
    ) -> AttentionBackend:
        """The backend, for steps that are not captured; config is fully resolved, except for one `uncompiled`.

        Args:
            pools: pools of the cache groups; None for a single group.
        """
        if not layers:
            return NoAttention()
        if pools is not None and len(pools.paged.groups) > 1:
            from nanovllm.fast.attention.grouped import GroupedAttention

            return GroupedAttention(self, layers, device, config, pools.paged)
        kinds = kinds_of(layer.traits for layer in layers)
        if self.kernels and not uncompiled:
            from nanovllm.fast.attention.cpp import CppAttention

            return CppAttention(kinds, self.kernels, num_blocks=config.num_kv_blocks, block_size=config.block_size)
        plain = PlainAttention("flex" if self.backend == "flex" and not uncompiled else "sdpa")
        return plain.build(layers, device, config, scores=scores_of(kinds))


def unserved_layer(layers: Sequence[AttentionLayer], supports: Callable[[LayerTraits], str | None]) -> str | None:
    """The first layer that a backend cannot serve and why, in words; None if it serves all."""
    for index, layer in enumerate(layers):
        reason = supports(layer.traits)
        if reason is not None:
            return f"layer {index} ({type(layer.module).__name__}) has {reason}"
    return None


def _load_kernels(layers: Sequence[AttentionLayer], device: torch.device, exact_rows: bool) -> tuple[Kernels, ...]:
    if device.type != "cpu":
        raise ValueError(f"its kernels run on a CPU, and the model is on {device}")
    load_kernels = find_kernel("cpp", "load_kernels")
    if load_kernels is None:
        raise ValueError("the folder `kernels` of this installation is missing")
    from nanovllm.fast.attention.cpp import CppAttention

    refused = unserved_layer(layers, CppAttention.supports)
    if refused is not None:
        raise ValueError(refused)
    kinds = kinds_of(layer.traits for layer in layers)
    dtype = layers[0].dtype
    return tuple(load_kernels(dtype, kind.head_dim, kind.num_groups, kind.value_dim, exact_rows) for kind in kinds)
