"""Merges linear layers that read the same input into one product: q, k and v, or gate and up, by any names.

One forward pass shows which layers share an input. Not for live modules, since modules are replaced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.device import find_kernel
from nanovllm.models.packed_linears import with_own_weights


class _Shared:
    """Concatenated weights of a group of layers, and their product between the first layer's call and the last's."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.weight = torch.cat([linear.weight.detach() for linear in linears])
        self.bias: Tensor | None = None
        if any(linear.bias is not None for linear in linears):
            self.bias = torch.cat([
                linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
                for linear in linears
            ])  # fmt: skip
        self.product: Tensor | None = None


class _SharedJoined:
    """The same of quantised layers; `joined` is the layer of all outputs."""

    def __init__(self, linears: Sequence[Any]) -> None:
        self.joined = type(linears[0]).joined(linears)
        self.bias = self.joined.bias
        self.product: Tensor | None = None


class _Part(nn.Module):
    """A linear layer that owns outputs `start` to `end` of a product; has the attributes of `nn.Linear`."""

    def __init__(self, shared: Any, in_features: int, start: int, end: int) -> None:
        super().__init__()
        self._shared = shared
        self.in_features = in_features
        self.out_features = end - start
        self.start = start
        self.end = end

    def shares_with(self, other: _Part) -> bool:
        """Whether both are parts of one product."""
        return self._shared is other._shared

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self._shared.weight[self.start : self.end]
        return weight

    @property
    def bias(self) -> Tensor | None:
        return None if self._shared.bias is None else self._shared.bias[self.start : self.end]


class FirstPart(_Part):
    """The first layer of a group in call order: computes the product of all.

    Args:
        num_outputs: outputs of the product.
    """

    def __init__(self, shared: Any, in_features: int, end: int, num_outputs: int) -> None:
        super().__init__(shared, in_features, 0, end)
        self.num_outputs = num_outputs

    def product(self, states: Tensor) -> Tensor:
        """Outputs of all layers of the group, [..., num_outputs]."""
        raise NotImplementedError

    def forward(self, states: Tensor) -> Tensor:
        self._shared.product = product = self.product(states)
        return product[..., : self.end]


class MergedLinear(FirstPart):
    """The first of layers with plain weights."""

    def __init__(self, shared: _Shared, in_features: int, end: int) -> None:
        super().__init__(shared, in_features, end, len(shared.weight))
        self.all_weights = nn.Parameter(shared.weight, requires_grad=False)
        self.all_biases = None if shared.bias is None else nn.Parameter(shared.bias, requires_grad=False)
        self.is_skinny = shared.bias is None and _suits_kernel(shared.weight)

    def product(self, states: Tensor) -> Tensor:
        if self.is_skinny:
            result: Tensor = torch.ops.nanovllm.linear(states, self.all_weights)
            return result
        return F.linear(states, self.all_weights, self.all_biases)


class MergedJoined(FirstPart):
    """The first of quantised layers."""

    def __init__(self, shared: _SharedJoined, in_features: int, end: int) -> None:
        super().__init__(shared, in_features, end, shared.joined.out_features)
        self.joined_layer = shared.joined

    def product(self, states: Tensor) -> Tensor:
        result: Tensor = self.joined_layer(states)
        return result


class MergedPart(_Part):
    """A later layer of a group: returns its slice of the product."""

    def __init__(self, shared: Any, in_features: int, start: int, end: int, *, is_last: bool) -> None:
        super().__init__(shared, in_features, start, end)
        self.is_last = is_last

    def forward(self, states: Tensor) -> Tensor:
        product: Tensor | None = self._shared.product
        assert product is not None  # calls come in the recorded order
        if self.is_last:
            self._shared.product = None
        return product[..., self.start : self.end]


class SkinnyLinear(nn.Linear):
    """A single linear layer that uses our kernel for few rows."""

    def forward(self, states: Tensor) -> Tensor:
        result: Tensor = torch.ops.nanovllm.linear(states, self.weight)
        return result


def _is_quantised(module: nn.Module) -> bool:
    """Whether the module is a quantised layer that can be joined with others of its `kind`."""
    return hasattr(type(module), "joined")


def is_plain_linear(module: nn.Module) -> bool:
    """Whether the module computes x W^T + b of its `weight` and `bias`, as `nn.Linear`."""
    return type(module) in (nn.Linear, SkinnyLinear, MergedLinear, MergedPart)


def kernel_calls(model: nn.Module, num_rows: int) -> list[Callable[[], Tensor]]:
    """Calls of all few-row product kernels, with and without a residual sum, one per weight shape."""
    weights = {module.weight.shape: module.weight for module in model.modules() if isinstance(module, SkinnyLinear)}
    merged = [module for module in model.modules() if isinstance(module, MergedLinear) and module.is_skinny]
    alone = weights | {module.all_weights.shape: module.all_weights for module in merged}
    states = {shape: weight.new_zeros(num_rows, shape[1]) for shape, weight in alone.items()}
    calls: list[Callable[[], Tensor]] = [
        partial(torch.ops.nanovllm.linear, states[shape], weight) for shape, weight in alone.items()
    ]
    for shape, weight in weights.items():
        residual = weight.new_zeros(num_rows, shape[0])
        calls.append(partial(torch.ops.nanovllm.linear_and_add, states[shape], weight, residual))
    return calls


@contextmanager
def merging(model: nn.Module, layers: Iterable[nn.Module]) -> Iterator[None]:
    """Hook the layers of `model` for one forward pass; on exit, merge linear layers of each that read one tensor."""
    calls: dict[nn.Module, list[tuple[Any, Tensor]]] = {layer: [] for layer in layers}
    hooks = []
    try:
        # Ids, not references, so that weights can be freed. Replacing a module would lose its hooks.
        scaled = [module for module in model.modules() if _is_quantised(module)]
        own = {id(module) for module in (*with_own_weights(model), *scaled) if not module._forward_hooks}
        for layer, seen in calls.items():
            for module in (module for module in layer.modules() if id(module) in own):
                hooks.append(module.register_forward_pre_hook(_note(seen)))
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for layer in list(calls):
        for group in _groups(calls.pop(layer)):
            _merge(layer, group)
        for module in layer.modules():
            if type(module) is nn.Linear and module.bias is None and _suits_kernel(module.weight):
                module.__class__ = SkinnyLinear


def _suits_kernel(weight: Tensor) -> bool:
    """Whether `nanovllm::linear` is the faster product for few rows; registers the operator."""
    suits = find_kernel("skinny_linear", "suits")
    return suits is not None and suits(weight)


def _note(seen: list[tuple[Any, Tensor]]) -> Callable[..., None]:
    def hook(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        if arguments:  # a layer called with keyword arguments is not merged
            seen.append((module, arguments[0]))

    return hook


def _groups(seen: list[tuple[Any, Tensor]]) -> list[list[Any]]:
    """Groups of linear layers called once each, on the same tensor and of the same kind, in call order."""
    calls = Counter(module for module, _ in seen)
    groups: dict[tuple[int, Any], list[Any]] = {}
    for module, states in seen:
        if calls[module] == 1:
            kind = module.kind if _is_quantised(module) else module.weight.dtype
            groups.setdefault((id(states), kind), []).append(module)
    return [group for group in groups.values() if len(group) > 1]


def _merge(layer: nn.Module, linears: list[Any]) -> None:
    """Replace `linears` by the merged layers; the last reference to the old weights frees them."""
    depth = linears[0].in_features
    end = linears[0].out_features
    shared: _Shared | _SharedJoined
    first: nn.Module
    if _is_quantised(linears[0]):
        shared = _SharedJoined(linears)
        first = MergedJoined(shared, depth, end)
    else:
        shared = _Shared(linears)
        first = MergedLinear(shared, depth, end)
    replacements: dict[nn.Module, nn.Module] = {linears[0]: first}
    for module in linears[1:]:
        start = end
        end = end + module.out_features
        replacements[module] = MergedPart(shared, depth, start, end, is_last=module is linears[-1])
    for parent in list(layer.modules()):
        for name, child in parent._modules.items():
            if child in replacements:
                parent._modules[name] = replacements[child]
