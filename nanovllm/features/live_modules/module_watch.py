"""Detects changes that the owner of a live module makes between steps: weights, submodules, functions, flags.

PEFT's flags, such as the active adapter, are compared apart from all else: with other flags the same weights compute
other KV, and with the former flags the former KV.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import NoneType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from nanovllm.attention import LAYER_CACHE, LAYER_ENGINE, LAYER_KIND, LAYER_SHARES
from nanovllm.model import modules_of

# Attributes of PEFT's modules that choose among weights. All others count as structure.
_FLAGS = ("_active_adapter", "active_adapter", "_disable_adapters", "_adapters_disabled", "scaling")
_MERGED = "merged_adapters"  # a merge may write weights through `.data`, which leaves no other trace
_KNOWN = {*_FLAGS, _MERGED}
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

    Attributes:
        flags: PEFT's flags, by value.
        on_switch: function that is called once the flags have changed; None counts them as structure.
    """

    on_switch: Callable[[], None] | None = None

    def __init__(self, model: nn.Module, lock: AbstractContextManager[Any]) -> None:
        self._model = model
        self._lock = lock
        self._weights: list[_TensorState] = []
        self._structure = 0
        self.flags: list[Any] = []
        self._merged: list[Any] = []
        self._flagged: list[nn.Module] = []  # modules with flags, since most have none
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
            before = self._structure, self._flagged, self._merged
            flags_before = self.flags
            if weights_changed or with_structure:
                self._flagged = [module for module in modules if not _KNOWN.isdisjoint(vars(module))]
            self.flags = self._values(*_FLAGS)
            self._merged = self._values(_MERGED)
            if with_structure:
                self._structure = _structure_of(modules, {id(module) for module in self._flagged})
        structure_changed = before != (self._structure, self._flagged, self._merged)
        if self.flags != flags_before and self.on_switch is not None:
            self.on_switch()
        elif self.flags != flags_before:
            structure_changed = True
        return weights_changed, structure_changed

    def _values(self, *names: str) -> list[Any]:
        return [_by_value(vars(module).get(name)) for module in self._flagged for name in names]


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


def _structure_of(modules: Iterable[nn.Module], flagged: set[int]) -> int:
    """Hash of a module's attributes besides weights and known flags: submodules, functions, other flags.

    Args:
        flagged: ids of the modules with flags.
    """
    parts: list[Any] = []
    for module in modules:
        parts.append(id(module))
        has_flags = id(module) in flagged
        for name, value in vars(module).items():
            if name in _NOT_STRUCTURE or (has_flags and name in _KNOWN and _by_value(value) is not None):
                continue
            parts.append(_identity(value))
            if has_flags and isinstance(value, dict) and not name.startswith("_"):  # such as PEFT's variants
                parts += [(key, _identity(each)) for key, each in value.items()]
    return hash(tuple(parts))


def _identity(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str, NoneType)) else id(value)


def _by_value(flag: Any) -> Any:
    """A flag as a value that equals those of equal effect; None if it is of no known kind."""
    if isinstance(flag, bool):
        return flag
    if isinstance(flag, str):
        return [flag]
    if isinstance(flag, (list, tuple)) and all(isinstance(name, str) for name in flag):
        return [*flag]
    if isinstance(flag, dict) and all(type(factor) in (int, float) for factor in flag.values()):
        return [*flag.items()]
    return None
