"""Attributes set on a caller's objects for a while, and put back exactly as they were."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Change = tuple[dict[str, Any], str, Any]  # an object's attributes, a name among them, a value

_ABSENT = object()


class AttributePatches:
    """A stack of patches. An `undo` that an interrupt cut short can be called again."""

    def __init__(self) -> None:
        self._undo: list[Change] = []

    def __len__(self) -> int:
        return len(self._undo)

    def apply(self, changes: Iterable[Change]) -> None:
        # Straight into the attribute dictionaries: nothing that wraps a module's __setattr__ should see this.
        for attributes, name, value in changes:
            self._undo.append((attributes, name, attributes.get(name, _ABSENT)))
            attributes[name] = value

    def undo(self, *, down_to: int = 0) -> None:
        """Put back what was set last, until `down_to` changes are left."""
        while len(self._undo) > down_to:
            attributes, name, before = self._undo[-1]
            if before is _ABSENT:
                attributes.pop(name, None)
            else:
                attributes[name] = before
            self._undo.pop()
