"""Attributes set on a caller's objects for a while, and put back exactly as they were.

Those of a model while an engine or a probe computes its forward pass, and those of its attention layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from nanovllm.attention import LAYER_CACHE, LAYER_ENGINE, LAYER_KIND, LAYER_SHARES, AttentionLayer, LayerCache

Change = tuple[dict[str, Any], str, Any]  # an object's attributes, a name among them, a value

_ABSENT = object()


def modules_of(model: nn.Module) -> list[nn.Module]:
    """All submodules, each once, unordered: `model.modules()` without its nested generators.

    A live module is walked in every step, which is a good part of a step's host time.
    """
    found: dict[int, nn.Module] = {}
    pending = [model]
    while pending:
        module = pending.pop()
        if id(module) not in found:
            found[id(module)] = module
            pending += [child for child in module._modules.values() if child is not None]
    return list(found.values())


class AttributePatches:
    """A stack of patches. `undo` can be called again after an interrupt cut it short."""

    def __init__(self) -> None:
        self._undo: list[Change] = []

    def __len__(self) -> int:
        return len(self._undo)

    def apply(self, changes: Iterable[Change]) -> None:
        # Writes to the attribute dictionaries, so that wrappers of a module's __setattr__ do not see it.
        for attributes, name, value in changes:
            self._undo.append((attributes, name, attributes.get(name, _ABSENT)))
            attributes[name] = value

    def undo(self, *, down_to: int = 0) -> None:
        """Undo the latest changes until `down_to` are left."""
        while len(self._undo) > down_to:
            attributes, name, before = self._undo[-1]
            if before is _ABSENT:
                attributes.pop(name, None)
            else:
                attributes[name] = before
            self._undo.pop()


def redirected_to(model: nn.Module, attention_name: str, others: Mapping[str, str]) -> list[Change]:
    """Changes to that attention implementation, to others by attribute of configs, to eval mode and uncompiled calls.

    The owner's compiled calls would be compiled again for our passes.
    """
    changes: list[Change] = []
    configs: dict[int, Any] = {}
    for module in modules_of(model):
        attributes = vars(module)
        if attributes["training"]:
            changes.append((attributes, "training", False))
        if attributes.get("_compiled_call_impl") is not None:
            changes.append((attributes, "_compiled_call_impl", None))
        config = attributes.get("config")
        if hasattr(config, "_attn_implementation_internal"):
            configs[id(config)] = config
    for config in configs.values():
        attributes = vars(config)
        changes.append((attributes, "_attn_implementation_internal", attention_name))
        changes += [(attributes, name, value) for name, value in others.items() if name in attributes]
    return changes


def layer_changes(
    layers: Sequence[AttentionLayer], caches: Sequence[LayerCache], kinds: Sequence[int], engine_handle: int | None
) -> list[Change]:
    """Attributes of hooked attention modules.

    Args:
        caches: K and V of each layer.
        kinds: the number of each layer's kind.
        engine_handle: for a model that does not pass its keyword arguments on to attention.
    """
    changes: list[Change] = []
    for layer, cache, kind in zip(layers, caches, kinds, strict=True):
        attributes = vars(layer.module)
        changes.append((attributes, LAYER_CACHE, cache))
        changes.append((attributes, LAYER_KIND, kind))
        changes.append((attributes, LAYER_SHARES, layer.traits.shares is not None))
        if engine_handle is not None:
            changes.append((attributes, LAYER_ENGINE, engine_handle))
    return changes
