"""Memory of huge pages for packed weights, all of which a step reads: fewer pages whose places are to be looked up."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from nanovllm.device import HUGE_PAGE_BYTES, fresh_pages, use_huge_pages

_ALIGNMENT = 64  # bytes: a line of the processor's cache
_MARGIN = 2**16  # bytes, for what lies between tensors


class HugePages:
    """One mapping, from which tensors are taken one behind another; it lives as long as any of them.

    Args:
        num_bytes: of all tensors; memory is taken when it is first written to.
    """

    def __init__(self, num_bytes: int) -> None:
        self._pages: mmap.mmap | None = None
        self._used = 0
        if num_bytes >= HUGE_PAGE_BYTES:
            with suppress(OSError):  # a limit of the process: then each tensor is of the allocator
                self._pages = fresh_pages(num_bytes + _MARGIN)
                use_huge_pages(self._pages)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor whose content is undefined; from the allocator if no room is left, or all would be small."""
        count = math.prod(shape)
        if self._pages is None or self._used + count * dtype.itemsize > len(self._pages):
            return torch.empty(shape, dtype=dtype, device="cpu")
        tensor = torch.frombuffer(self._pages, dtype=dtype, count=count, offset=self._used).view(shape)
        self._used += -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        return tensor
