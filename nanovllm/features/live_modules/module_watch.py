"""Detects changes that the owner of a live module makes between steps: weights, submodules, functions, flags."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from types import NoneType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from nanovllm.attention import LAYER_CACHE, LAYER_ENGINE, LAYER_KIND, LAYER_SHARES
from nanovllm.model import modules_of

# Attributes that training toggles, and those set by a step itself.
_NOT_STRUCTURE = {"training", "_compiled_call_impl", LAYER_CACHE, LAYER_ENGINE, LAYER_KIND, LAYER_SHARES}


def tensors_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Parameters and buffers of these modules, without those of submodules."""
    return [
        tensor
        for module in modules
        for tensors in (module._parameters, module._buffers)
        for tensor in tensors.values()
        if tensor is not None
    ]


class ModuleWatch:
    """Detects writes to and replacements of parameters and buffers, by version and storage, and structural changes.

    Args:
        lock: lock of the module: reading it waits for a step of another engine, which patches it.
    """

    def __init__(self, model: nn.Module, lock: AbstractContextManager[Any]) -> None:
        self._model = model
        self._lock = lock
        self._weights: list[_TensorState] = []
        self._structure = 0
        self.changes(with_structure=True)

    def changes(self, *, with_structure: bool) -> tuple[bool, bool]:
        """(weights changed, structure changed) since the last call.

        Args:
            with_structure: also check the structure, which takes longer than the weights; if False, it counts as
                unchanged.
        """
        with self._lock:
            modules = modules_of(self._model)  # no cache: the owner may replace submodules or inject adapters
            tensors = tensors_of(modules)
            weights_changed = len(tensors) != len(self._weights) or not all(
                state.tensor() is tensor
                and state.version == (0 if tensor.is_inference() else tensor._version)
                and state.address == tensor.data_ptr()
                and not state.storage.expired()
                for state, tensor in zip(self._weights, tensors, strict=True)
            )
            if weights_changed:
                self._weights = [_TensorState.from_tensor(tensor) for tensor in tensors]
            structure_before = self._structure
            if with_structure:
                self._structure = _structure_of(modules)
        return weights_changed, self._structure != structure_before


class _TensorState(NamedTuple):
    """Identity, version and storage of a tensor.

    An address alone is not enough: the allocator reuses the memory of replaced weights. While the recorded storage
    lives, no other tensor can have its address.
    """

    tensor: weakref.ref[Tensor]
    storage: StorageWeakRef
    address: int
    version: int

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> _TensorState:
        version = 0 if tensor.is_inference() else tensor._version
        return cls(weakref.ref(tensor), StorageWeakRef(tensor.untyped_storage()), tensor.data_ptr(), version)


def _structure_of(modules: Iterable[nn.Module]) -> int:
    """Hash of a module's attributes besides weights: submodules, functions, flags."""
    parts: list[Any] = []
    for module in modules:
        parts.append(id(module))
        for name, value in vars(module).items():
            if name not in _NOT_STRUCTURE:
                parts.append(value if isinstance(value, (bool, int, float, str, NoneType)) else id(value))
    return hash(tuple(parts))
