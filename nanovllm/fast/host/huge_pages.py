"""Fresh memory of the system, in huge pages for packed weights, where they cause fewer TLB misses in each step."""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 * 2**20  # size on most systems
_ALIGNMENT = 64  # bytes: a cache line
_MARGIN = 2**16  # bytes, for padding between tensors


def fresh_pages(num_bytes: int) -> mmap.mmap:
    """Zeroed anonymous memory, allocated at the first write."""
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # not shared with forks


def use_huge_pages(pages: mmap.mmap, begin: int = 0, end: int | None = None) -> None:
    """Request huge pages from `begin`, a multiple of the page size, to `end`, if the system supports them.

    Does nothing for less than one huge page.
    """
    end = len(pages) if end is None else end
    if end - begin >= HUGE_PAGE_BYTES:
        with suppress(OSError, AttributeError):
            pages.madvise(mmap.MADV_HUGEPAGE, begin, end - begin)


def use_small_pages(pages: mmap.mmap) -> None:
    """Opt out of huge pages, which some systems use by default."""
    with suppress(OSError, AttributeError):
        pages.madvise(mmap.MADV_NOHUGEPAGE)


class HugePages:
    """One mapping for consecutive tensors; it lives as long as any of them.

    Args:
        num_bytes: bytes of all tensors; pages are allocated at the first write.
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
