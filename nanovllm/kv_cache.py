"""The KV cache: a tensor for each layer, or two, allocated, cleared and released here."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention import AttentionLayer, LayerCache
from nanovllm.batch import Copy
from nanovllm.device import to_device
from nanovllm.layout import kind_of, kinds_of

StateShapes = Sequence[Sequence[tuple[tuple[int, ...], torch.dtype]]]  # (shape, dtype) of each state, by layer


class HostCopies:
    """Copies of a step that cross to or from host memory, by `HostMemory`; by default none does."""

    def store(self, copies: Sequence[Copy]) -> Sequence[Copy]:
        """Execute the copies to host memory, before any other of a step; returns those within the device."""
        return copies

    def load(self, copies: Sequence[Copy]) -> None:
        """Execute the copies from host memory, after all others of a step."""


class CacheMemory:
    """Source of the caches' memory: by default the device, all at once."""

    num_taken: int | None = None  # bytes that `take_some_memory` took; None if all was taken from the start

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def begin(self, caches: Sequence[Tensor]) -> None:
        """Name the caches, each [n, ...] from one call of `zeros`, for which `take_some_memory` takes memory."""

    def take_some_memory(self) -> bool:
        """Take memory for a few milliseconds, at any time; False if none is left to take, or none is free."""
        return False

    def stop(self) -> None:
        """Take no more."""


class KVCaches:
    """The caches of an engine, one for each layer that does not share another's K and V.

    Attributes:
        of_layers: K and V of each layer, [2, num_slots, num_kv_heads, head_dim], or a tensor each where their widths
            differ, maybe in a `KVFormat`; a layer that shares another's K and V has the same tensor. Empty until they
            are allocated.
        group_bytes: bytes of each cache group's tensors.
        of_records: states of each layer with recurrent states, [num_records, ...] each.
        choice: name of a `KVFormat`, on which cached blocks depend; empty for K and V as they are.
        clear: function that zeroes blocks [n] int64 of caches [num_caches, num_slots, ...], of this block size.
    """

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        device: torch.device,
        records: StateShapes = (),
    ) -> None:
        self._layers = layers
        self._records = records
        self._own = [index for index, layer in enumerate(layers) if layer.traits.shares is None]
        self._device = device
        self.clear: Callable[[Tensor, Tensor, int], None] = clear
        self._together: list[tuple[int, Tensor]] = []  # group, and an allocation of one or more layers' caches
        self.group_bytes: Counter[int] = Counter()
        self.memory = CacheMemory()
        self.of_layers: list[LayerCache] = []
        self.of_records: list[list[Tensor]] = []
        self._record_group = 0
        self.host = HostCopies()
        self.choice = ""

    @cached_property
    def kinds(self) -> list[int]:
        """Index of each layer's kind among the engine's kinds. Read it in steps: the traits are settled by then."""
        kinds = kinds_of(layer.traits for layer in self._layers)
        return [kinds.index(kind_of(layer.traits)) for layer in self._layers]

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes of K and V for this many tokens over all layers."""
        return sum(self._layers[index].token_bytes for index in self._own) * num_tokens

    def allocate(self, *num_slots: int, groups: Sequence[int] | None = None, num_records: int = 2) -> None:
        """Allocate the caches, zeroed, so that no slot is ever NaN.

        Args:
            num_slots: slots of each cache group.
            groups: cache group of each layer; None where there is one.
            num_records: records of the group of recurrent states, the last group, if there are such states.
        """
        by_shape: dict[tuple[int, int, int, int], list[int]] = {}
        for index in self._own:
            layer = self._layers[index]
            shape = layer.traits.num_kv_heads, *layer.row_widths
            by_shape.setdefault((0 if groups is None else groups[index], *shape), []).append(index)
        self._together = []
        self.group_bytes.clear()
        found: dict[int, LayerCache] = {}
        for (group, num_heads, head_dim, value_dim), indices in by_shape.items():
            # On a CPU one by one, since pages of the system's memory are cleared where they are used.
            for part in [[index] for index in indices] if self._device.type == "cpu" else [indices]:
                if head_dim == value_dim:
                    together = self._zeros(2 * len(part), num_slots[group], num_heads, head_dim)
                    found.update(zip(part, torch.split(together, 2), strict=True))
                    self._together.append((group, together))
                else:
                    sizes = len(part), num_slots[group], num_heads
                    both = [self._zeros(*sizes, width) for width in (head_dim, value_dim)]
                    found.update(zip(part, zip(*both, strict=True), strict=True))
                    self._together += [(group, caches) for caches in both]
        for group, caches in self._together:
            self.group_bytes[group] += caches.nbytes
        self._record_group = len(num_slots) - 1
        self.of_records = [
            [self._zeros(num_records, *shape, dtype=dtype) for shape, dtype in states] for states in self._records
        ]
        self.group_bytes[self._record_group] += sum(state.nbytes for states in self.of_records for state in states)
        self.of_layers = [found[layer.traits.shares_of(index)] for index, layer in enumerate(self._layers)]
        self.memory.begin([caches for _, caches in self._together])

    def _zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self._layers[0].cache_dtype or self._layers[0].dtype
        with torch.inference_mode(False):  # a cache made in a caller's inference mode could be used only there
            return self.memory.zeros(shape, dtype, self._device)

    def clear_blocks(self, blocks: Tensor, block_size: int, *, group: int = 0) -> None:
        """Zero blocks [n] int64 of every cache of a group."""
        for caches in [caches for of_group, caches in self._together if of_group == group]:
            self.clear(caches, blocks, block_size)

    def copy_blocks(self, copies: Sequence[Copy], block_size: int) -> None:
        """Copy K and V of blocks, as `ScheduledBatch.copies` says, on the current stream."""
        within = self.host.store(copies)
        for group in {copy.group for copy in within}:
            blocks = [(source, destination) for of_group, source, destination in within if of_group == group]
            sources, destinations = to_device(np.array(blocks, np.int64), self._device).unbind(1)
            for caches in self.blocks_of(group, block_size):
                caches.index_copy_(1, destinations, caches.index_select(1, sources))
        self.host.load(copies)

    def blocks_of(self, group: int, block_size: int) -> list[Tensor]:
        """Caches of a group as [n, num_blocks, block_size, ...], states as [1, num_records, ...], in a fixed order."""
        # Wide elements first, so that parts one after another are aligned.
        parts = [_in_blocks(caches, block_size) for of_group, caches in self._together if of_group == group]
        if group == self._record_group:
            parts += [state.unsqueeze(0) for state in itertools.chain.from_iterable(self.of_records)]
        return sorted(parts, key=lambda part: -part.itemsize)

    def release(self) -> None:
        self.memory.stop()
        self.of_layers = []
        self.of_records = []
        self._together = []
        self.group_bytes.clear()


def clear(caches: Tensor, blocks: Tensor, block_size: int) -> None:
    _in_blocks(caches, block_size).index_fill_(1, blocks, 0)


def _in_blocks(caches: Tensor, block_size: int) -> Tensor:
    """Caches [n, num_slots, ...] as [n, num_blocks, block_size, ...]."""
    return caches.view(len(caches), -1, block_size, *caches.shape[2:])
