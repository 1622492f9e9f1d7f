"""Whether a model's weights were changed."""

from __future__ import annotations

import weakref

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef


def modules_of(model: nn.Module) -> list[nn.Module]:
    """All submodules, each once, in no particular order: `model.modules()` without its nested generators.

    A live module is walked in every step, so this is a good part of a step's host time.
    """
    found: dict[int, nn.Module] = {}
    pending = [model]
    while pending:
        module = pending.pop()
        if id(module) not in found:
            found[id(module)] = module
            pending += [child for child in module._modules.values() if child is not None]
    return list(found.values())


class WeightsWatch:
    """Detects whether any parameter or buffer of a module was written or replaced (by version and storage)."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known: list[_TensorState] = []
        self.have_changed()

    def have_changed(self) -> bool:
        """Since the last call."""
        tensors = [
            tensor
            for module in modules_of(self._model)  # walked each time: submodules may be replaced, adapters injected
            for tensors in (module._parameters, module._buffers)
            for tensor in tensors.values()
            if tensor is not None
        ]
        known = self._known
        if len(known) == len(tensors) and all(map(_TensorState.is_of, known, tensors)):
            return False
        self._known = [_TensorState(tensor) for tensor in tensors]
        return True


class _TensorState:
    """Version and storage of a tensor, to detect writes and replacements.

    An address alone is not enough, since the memory of weights that were replaced is used again for the next ones; but
    while the storage that was seen there lives, no other can have its address.
    """

    __slots__ = ("_address", "_storage", "_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._address = tensor.data_ptr()
        self._version = _version(tensor)

    def is_of(self, tensor: Tensor) -> bool:
        return (
            self._tensor() is tensor
            and self._version == _version(tensor)
            and self._address == tensor.data_ptr()
            and not self._storage.expired()
        )


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
