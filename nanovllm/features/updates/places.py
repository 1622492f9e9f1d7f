"""Every place where an engine keeps a weight, by its name in the model's state dict: the one registry of copies.

A weight may lie in its parameter, in a part of a merged product, and in products that are packed for a CPU, where plain
weights are freed. A form that keeps a copy of a weight belongs into `_writers_of`; a test walks all tensors for others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanovllm.model import ModelBinding
from nanovllm.models.experts import KEPT_EXPERTS, PACKED_EXPERTS
from nanovllm.models.packed_linears import OneDnnLinear, PackedLinear

Write = Callable[[Tensor], None]


class Place(NamedTuple):
    """A weight in an engine.

    key: equal for names of one weight, such as those of tied embeddings.
    tensor: its plain values, in place; None where they are freed.
    writers: functions that write a tensor of its shape and dtype into every other copy.
    """

    key: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    tensor: Tensor | None
    writers: tuple[Write, ...]


def places_of(binding: ModelBinding) -> dict[str, Place]:
    """The place of each weight and persistent buffer by name; the binding is uninstalled.

    Raises ValueError for a model with quantised weights.
    """
    places = _own_places(binding)
    return places | _whole_places(places, getattr(binding.model, "rank_parts", {}))


def _own_places(binding: ModelBinding) -> dict[str, Place]:
    model = binding.model
    fused = {linear: place for layer in binding.fused_layers for linear, place in layer.places().items()}
    persistent = model.state_dict(keep_vars=True).keys()
    named: list[tuple[str, nn.Module, str, Tensor]] = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        _check_plain(prefix, module)
        at = f"{prefix}." if prefix else ""
        named += [(at + name, module, name, tensor) for name, tensor in _tensors_of(module, at, persistent)]
    owners: defaultdict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for _, module, name, tensor in named:
        if (module, name) not in owners[id(tensor)]:
            owners[id(tensor)].append((module, name))
    places = {}
    for name, module, own, tensor in named:
        writers = [write for owner in owners[id(tensor)] for write in _writers_of(*owner, fused)]
        is_freed = tensor.numel() == 0
        shape = _shape_of(module, own) if is_freed else tuple(tensor.shape)
        places[name] = Place(id(tensor), shape, tensor.dtype, None if is_freed else tensor, tuple(writers))
    return places


def _whole_places(places: Mapping[str, Place], parts: Mapping[str, Any]) -> dict[str, Place]:
    """Places of the whole weights that a rank has in part (`WeightPart`), under one of their names or several."""

    def write_parts(names: Iterable[str], whole: Tensor) -> None:
        write([(places[name], parts[name].cut(whole) if name in parts else whole) for name in names])

    found: dict[str, Place] = {}
    for part in parts.values():
        first = places[part.names[0]]
        place = Place(first.key, part.shape, first.dtype, None, (partial(write_parts, part.names),))
        found |= dict.fromkeys(part.names, place)
    return found


def _check_plain(name: str, module: nn.Module) -> None:
    if hasattr(module, "quantised_parts") or KEPT_EXPERTS in vars(module):
        raise ValueError(
            f"{name} keeps quantised weights, which new values would have to be quantised for. Build the engine "
            "without quantization."
        )


def _tensors_of(module: nn.Module, at: str, persistent: Collection[str]) -> Iterable[tuple[str, Tensor]]:
    """Parameters, persistent buffers, and the shares of a merged linear layer, by the names of a state dict."""
    if hasattr(module, "shares_with"):  # a part of a merged product
        parts: Any = module
        return [(name, part) for name in ("weight", "bias") if (part := getattr(parts, name)) is not None]
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return [(name, tensor) for name, tensor in tensors if at + name in persistent]


def _shape_of(module: Any, name: str) -> tuple[int, ...]:
    """Shape of a weight that packing has freed."""
    if PACKED_EXPERTS in vars(module):
        shape: tuple[int, ...] = vars(module)[PACKED_EXPERTS].shape_of(name)
        return shape
    return module.out_features, module.in_features


def _writers_of(module: Any, name: str, fused: Mapping[nn.Module, tuple[Any, int]]) -> list[Write]:
    """Writers of the copies that a module's tensor has besides its plain values."""
    writers: list[Write] = []
    if module in fused:
        product, number = fused[module]
        writers.append(partial(product.write, number, name))
    forward = vars(module).get("forward")
    if isinstance(forward, PackedLinear):
        writers.append(partial(forward.write, name))
    elif isinstance(forward, OneDnnLinear) and name == "weight":
        writers.append(forward.write)
    if PACKED_EXPERTS in vars(module) and name in vars(module)[PACKED_EXPERTS].names:
        writers.append(partial(vars(module)[PACKED_EXPERTS].write, name))
    return writers


def checked(places: Mapping[str, Place], weights: Iterable[tuple[str, Tensor]]) -> list[tuple[Place, Tensor]]:
    """The new value of each weight that is given, once for each key.

    Raises TypeError or ValueError for an unknown name, another shape, or values that are no floating-point numbers.
    """
    found: dict[int, tuple[str, Place, Tensor]] = {}
    for name, tensor in weights:
        place = places.get(name)
        if place is None:
            raise ValueError(f"the model has no weight {name!r}; its names are like {next(iter(places))!r}.")
        if not isinstance(tensor, Tensor):
            raise TypeError(f"the value of {name} must be a tensor, not {type(tensor).__name__}.")
        if tuple(tensor.shape) != place.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, and the model's weight {place.shape}.")
        is_float = tensor.is_floating_point() and tensor.element_size() > 1
        if tensor.dtype != place.dtype and not (is_float and place.dtype.is_floating_point):
            raise ValueError(f"{name} has dtype {tensor.dtype}, which is not converted to the model's {place.dtype}.")
        other = found.get(place.key)
        if other is not None and other[2].data_ptr() != tensor.data_ptr() and not torch.equal(other[2], tensor):
            raise ValueError(f"{name} and {other[0]} are one weight of this model, and their values differ.")
        found[place.key] = name, place, tensor
    if not found:
        raise ValueError("an update without weights changes nothing; give named tensors.")
    return [(place, tensor) for _, place, tensor in found.values()]


def write(values: Collection[tuple[Place, Tensor]]) -> None:
    """Write checked values into every copy, in place: launches and graphs read them by address."""
    with torch.no_grad():
        plain = [(place.tensor, tensor) for place, tensor in values if place.tensor is not None]
        for to, tensor in plain:
            to.copy_(tensor, non_blocking=to.is_cuda)
        for place, tensor in values:
            if place.writers:
                own = tensor.detach().to("cpu", place.dtype)
                for write_copy in place.writers:
                    write_copy(own)
