"""The KV cache: one tensor per layer, allocated, cleared and released here."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from nanovllm.attention.operator import AttentionLayer
from nanovllm.device import find_kernel


class KVCaches:
    """The caches of an engine, one for each of `layers`, which are all alike.

    Attributes:
        of_layers: [2, num_slots, num_kv_heads, head_dim] for each layer, K first; empty until they are allocated.
    """

    def __init__(self, layers: Sequence[AttentionLayer], device: torch.device) -> None:
        self._layers = layers
        self._device = device
        self._clear_kernel = find_kernel("kv_writes", "clear_blocks") if device.type == "cuda" else None
        self._together: list[Tensor] = []  # allocations, each of one or more layers' caches
        self.of_layers: list[Tensor] = []

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes of K and V for this many tokens over all layers."""
        return len(self._layers) * self._layers[0].token_bytes * num_tokens

    def allocate(self, num_slots: int) -> None:
        """Allocate the caches, zeroed, so that no slot is ever NaN."""
        if self._device.type == "cpu":  # one by one, since pages of the system's memory are cleared where they are used
            self._together = [self._zeros(2, num_slots) for _ in self._layers]
        else:
            self._together = [self._zeros(2 * len(self._layers), num_slots)]
        self.of_layers = [cache for together in self._together for cache in torch.split(together, 2)]

    def _zeros(self, count: int, num_slots: int) -> Tensor:
        layer = self._layers[0]
        shape = (count, num_slots, layer.num_kv_heads, layer.head_dim)
        with torch.inference_mode(False):  # a cache made in a caller's inference mode could be used only there
            if self._device.type != "cpu":
                return torch.zeros(shape, dtype=layer.dtype, device=self._device)
            # Fresh pages of the system are zero, and take memory and time only when they are first written to: writing
            # zeros to the default pool took 5 s of start-up.
            num_bytes = math.prod(shape) * layer.dtype.itemsize
            pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # not shared with forks
            with suppress(OSError, AttributeError):  # not available everywhere
                pages.madvise(mmap.MADV_HUGEPAGE)
            return torch.frombuffer(pages, dtype=layer.dtype).view(shape)

    def take_memory(self) -> None:
        """Take a CPU's memory now, by writing zeros, instead of in the steps that first write to a block.

        For measuring; call it before anything is cached.
        """
        if self._device.type == "cpu":
            for cache in self.of_layers:
                cache.zero_()

    def clear_blocks(self, blocks: Tensor, block_size: int, *, by_kernel: bool = False) -> None:
        """Zero blocks [n] int64 of every cache.

        Args:
            by_kernel: use the one kernel of `kernels/`, compiled at its first call, where it exists; for a GPU.
        """
        for caches in self._together:
            if by_kernel and self._clear_kernel is not None:
                self._clear_kernel(caches, blocks, block_size)
            else:
                caches.view(len(caches), -1, block_size, *caches.shape[2:]).index_fill_(1, blocks, 0)

    def release(self) -> None:
        self.of_layers = []
        self._together = []
