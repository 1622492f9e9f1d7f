"""Temporary changes of attributes of a caller's objects, undone exactly; and the changes for attention modules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from nanovllm.attention.kv_writes import LayerCache
from nanovllm.attention.operator import LAYER_CACHE, LAYER_ENGINE, LAYER_KIND, LAYER_SHARES, AttentionLayer
from nanovllm.cache.kinds import kind_of, kinds_of

Change = tuple[dict[str, Any], str, Any]  # an object's attributes, a name among them, a value

_ABSENT = object()


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


def layer_changes(
    layers: Sequence[AttentionLayer], caches: Sequence[LayerCache], engine_handle: int | None
) -> list[Change]:
    """Attributes of hooked attention modules.

    Args:
        caches: K and V of each layer.
        engine_handle: set if the model does not pass its keyword arguments on to attention.
    """
    changes: list[Change] = []
    kinds = kinds_of(layer.traits for layer in layers)
    for layer, cache in zip(layers, caches, strict=True):
        attributes, traits = vars(layer.module), layer.traits
        changes.append((attributes, LAYER_CACHE, cache))
        changes.append((attributes, LAYER_KIND, kinds.index(kind_of(traits))))
        changes.append((attributes, LAYER_SHARES, traits.shares is not None))
        if engine_handle is not None:
            changes.append((attributes, LAYER_ENGINE, engine_handle))
    return changes
