"""Linear layers that read the same input, as one product: q, k and v, or gate and up, whatever a model calls them.

Which ones do is seen in one forward pass. Only for a model that nobody else uses: its modules are replaced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.packing import with_own_weights
from nanovllm.skinny_linear import linear, suits


class _Shared:
    """Where the first layer of a group leaves the product for the others, from its call to the last one's."""

    def __init__(self) -> None:
        self.product: Tensor | None = None


class MergedLinear(nn.Module):
    """The first of several linear layers in the order of their calls: computes for all."""

    def __init__(self, linears: list[nn.Linear], shared: _Shared) -> None:
        super().__init__()
        self.out_features = linears[0].out_features
        self._shared = shared
        self.weight = nn.Parameter(torch.cat([linear.weight.detach() for linear in linears]), requires_grad=False)
        self.bias = None
        if any(linear.bias is not None for linear in linears):
            biases = [
                linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
                for linear in linears
            ]
            self.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
        self.is_skinny = self.bias is None and suits(self.weight)

    def forward(self, states: Tensor) -> Tensor:
        product = linear(states, self.weight) if self.is_skinny else F.linear(states, self.weight, self.bias)
        self._shared.product = product
        return product[..., : self.out_features]


class SkinnyLinear(nn.Linear):
    """A linear layer by itself, whose products of a few rows are our own."""

    def forward(self, states: Tensor) -> Tensor:
        return linear(states, self.weight)


class MergedPart(nn.Module):
    """One of the others: takes its part of the product."""

    def __init__(self, shared: _Shared, start: int, end: int, *, is_last: bool) -> None:
        super().__init__()
        self._shared = shared
        self.start, self.end, self.is_last = start, end, is_last

    def forward(self, states: Tensor) -> Tensor:
        product = self._shared.product
        assert product is not None  # the calls come in the order that was seen
        if self.is_last:
            self._shared.product = None
        return product[..., self.start : self.end]


@contextmanager
def merging(model: nn.Module, layers: Iterable[nn.Module]) -> Iterator[None]:
    """Watch the layers of `model` in a forward pass; on leaving, merge the linear layers within each that read the
    same tensor."""
    candidates = with_own_weights(model)
    calls: dict[nn.Module, list[tuple[nn.Linear, Tensor]]] = {layer: [] for layer in layers}
    hooks = []
    try:
        for layer, seen in calls.items():
            for linear in (module for module in layer.modules() if module in candidates):
                hooks.append(linear.register_forward_pre_hook(_note(seen)))
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for layer, seen in calls.items():
        for group in _groups(seen):
            _merge(layer, group)
        for module in layer.modules():
            if type(module) is nn.Linear and module.bias is None and suits(module.weight):
                module.__class__ = SkinnyLinear


def _note(seen: list[tuple[nn.Linear, Tensor]]) -> Callable[..., None]:
    def hook(linear: nn.Linear, arguments: tuple[Tensor, ...]) -> None:
        seen.append((linear, arguments[0]))

    return hook


def _groups(seen: list[tuple[nn.Linear, Tensor]]) -> list[list[nn.Linear]]:
    """Linear layers that were called once, on the same tensor and in the same dtype, in the order of their calls."""
    calls = Counter(module for module, _ in seen)
    groups: dict[tuple[int, torch.dtype], list[nn.Linear]] = {}
    for module, states in seen:
        if calls[module] == 1:
            groups.setdefault((id(states), module.weight.dtype), []).append(module)
    return [group for group in groups.values() if len(group) > 1]


def _merge(layer: nn.Module, linears: list[nn.Linear]) -> None:
    shared = _Shared()
    replacements: dict[nn.Module, nn.Module] = {linears[0]: MergedLinear(linears, shared)}
    start = linears[0].out_features
    for module in linears[1:]:
        end = start + module.out_features
        replacements[module] = MergedPart(shared, start, end, is_last=module is linears[-1])
        start = end
    for parent in list(layer.modules()):
        for name, child in parent._modules.items():
            if child in replacements:
                parent._modules[name] = replacements[child]
