"""Huge pages for packed weights: each step reads all of them, and larger pages cause fewer TLB misses."""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from nanovllm.process.device import HUGE_PAGE_BYTES, fresh_pages, use_huge_pages

_ALIGNMENT = 64  # bytes: a cache line
_MARGIN = 2**16  # bytes, for padding between tensors


class HugePages:
    """One mapping for consecutive tensors; it lives as long as any of them.

    Args:
        num_bytes: of all tensors; pages are allocated at the first write.
        num_taken: bytes that a background thread touches at once: the system clears them, and a virtual machine may
            have to request them from its host, at a millisecond per page.
    """

    def __init__(self, num_bytes: int, *, num_taken: int = 0) -> None:
        self._pages: mmap.mmap | None = None
        self._used = 0
        self._taking: threading.Thread | None = None
        self._num_taken = 0
        if num_bytes >= HUGE_PAGE_BYTES:
            with suppress(OSError):  # a limit of the process: tensors then come from torch's allocator
                self._pages = fresh_pages(num_bytes + _MARGIN)
                use_huge_pages(self._pages)
                if num_taken > 0:
                    self._num_taken = min(num_taken, len(self._pages))
                    self._taking = threading.Thread(target=_touch, args=(self._pages, num_taken), daemon=True)
                    self._taking.start()

    @property
    def is_taking(self) -> bool:
        """Whether the thread is still touching pages."""
        return self._taking is not None and self._taking.is_alive()

    def num_taken(self) -> int:
        """Bytes touched by the thread; waits for it."""
        self._wait()
        return self._num_taken

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor; from torch's allocator if there is no mapping or no room in it."""
        self._wait()  # the thread writes
        count = math.prod(shape)
        if self._pages is None or self._used + count * dtype.itemsize > len(self._pages):
            return torch.empty(shape, dtype=dtype, device="cpu")
        tensor = torch.frombuffer(self._pages, dtype=dtype, count=count, offset=self._used).view(shape)
        self._used += -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        return tensor

    def _wait(self) -> None:
        if self._taking is not None:
            self._taking.join()
            self._taking = None

    def forget_tensors(self) -> None:
        """Reuse the mapping from its start; all earlier tensors must be dead."""
        self._used = 0


def _touch(pages: mmap.mmap, num_bytes: int) -> None:
    """Write to each page, in one call that releases the GIL."""
    np.frombuffer(pages, np.uint8)[: num_bytes : mmap.PAGESIZE] = 0
