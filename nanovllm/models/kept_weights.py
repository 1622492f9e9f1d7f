"""Dequantised weights, kept for the checks at start: these compute a model some six times before it is packed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

PASSES = 8
MOST_BYTES = 2**30  # limit for all layers of the process together
_total = 0


class KeptWeight:
    """A layer's dequantised weight in parts, from its first pass on; freed after `PASSES`, or by `drop`."""

    def __init__(self) -> None:
        self._num_passes, self._parts = 0, list[Tensor]()

    def over(self, parts: Iterable[Tensor], like: Tensor, num_elements: int) -> Iterator[Tensor]:
        """The kept parts, or `parts`, lazy ones, which are kept if there is room.

        Args:
            like: tensor with the dtype and device of the parts.
            num_elements: number of elements of all parts together.
        """
        self._num_passes += 1
        if self._parts and self._parts[0].dtype == like.dtype and self._num_passes <= PASSES:
            yield from self._parts
            return
        self.drop()
        has_room = _total + num_elements * like.element_size() <= MOST_BYTES
        if self._num_passes > 1 or like.device.type != "cpu" or not has_room:
            yield from parts
            return
        found = []
        for part in parts:
            found.append(part)
            yield part
        self._set(found)

    def drop(self) -> None:
        if self._parts:
            self._set([])

    __del__ = drop  # a model that is dropped makes room for the next

    def _set(self, parts: list[Tensor]) -> None:
        global _total
        _total += sum(part.nbytes for part in parts) - sum(part.nbytes for part in self._parts)
        self._parts = parts
