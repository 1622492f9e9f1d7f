"""A model's weights: whether they were changed, and a faster order for a CPU."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

_PACKED_DTYPES = (torch.float32, torch.bfloat16)


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
    """Tells whether any parameter or buffer of a module was written or replaced (by version and storage)."""

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
    """What tells that a tensor was written to or replaced.

    An address alone tells nothing, since the memory of weights that were replaced is used again for the next ones; but
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


class _PackedLinear:
    """What a linear layer's `forward` becomes when its weight is packed (oneDNN's blocked format)."""

    def __init__(self, linear: nn.Linear) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self._bias = linear.bias

    def __call__(self, states: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(states, self._weight, self._bias, "none", [], "")


def pack_linear_layers(model: nn.Module, *, let_go: bool) -> None:
    """Bring the linear layers' weights into the order that a CPU's matrix products read fastest.

    Products of few rows take half the time. Only for a model that nobody else uses: a packed copy would not follow an
    owner's updates.

    Args:
        let_go: free the plain copies that no other module holds.
    """
    if not torch.backends.mkldnn.is_available():
        return
    own = _with_own_weights(model) if let_go else set()
    for linear in modules_of(model):
        if type(linear) is nn.Linear and linear.weight.dtype in _PACKED_DTYPES:
            vars(linear)["forward"] = _PackedLinear(linear)
            if linear in own:
                linear.weight.data = linear.weight.data.new_empty(0)


@contextmanager
def plain_weights_hidden(model: nn.Module) -> Iterator[None]:
    """The linear layers work, but who reads their weights past them fails: so it shows whether they can be let go."""
    hidden = [(linear, linear.weight.data) for linear in _with_own_weights(model)]
    try:
        for linear, weight in hidden:
            vars(linear)["forward"] = partial(F.linear, weight=weight, bias=linear.bias)
            linear.weight.data = weight.new_empty(0)
        yield
    finally:
        for linear, weight in hidden:
            linear.weight.data = weight
            vars(linear).pop("forward", None)


def _with_own_weights(model: nn.Module) -> set[nn.Linear]:
    """Linear layers whose weight is no other module's too (as tied embeddings are)."""
    modules = modules_of(model)
    owners = Counter(id(parameter) for module in modules for parameter in module._parameters.values())
    return {module for module in modules if type(module) is nn.Linear and owners[id(module.weight)] == 1}
