"""Memory of huge pages for packed weights, all of which a step reads: fewer pages whose places are to be looked up."""

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

_ALIGNMENT = 64  # bytes: a line of the processor's cache
_MARGIN = 2**16  # bytes, for what lies between tensors


class HugePages:
    """One mapping, from which tensors are taken one behind another; it lives as long as any of them.

    Args:
        num_bytes: of all tensors; memory is taken when it is first written to.
        num_taken: how many of them a thread takes at once, beside what the caller goes on with: the system clears
            them, and a virtual machine may have to ask its host for them, a millisecond for each page.
    """

    def __init__(self, num_bytes: int, *, num_taken: int = 0) -> None:
        self._pages: mmap.mmap | None = None
        self._used = 0
        self._taking: threading.Thread | None = None
        self._num_taken = 0
        if num_bytes >= HUGE_PAGE_BYTES:
            with suppress(OSError):  # a limit of the process: then each tensor is of the allocator
                self._pages = fresh_pages(num_bytes + _MARGIN)
                use_huge_pages(self._pages)
                if num_taken > 0:
                    self._num_taken = min(num_taken, len(self._pages))
                    self._taking = threading.Thread(target=_touch, args=(self._pages, num_taken), daemon=True)
                    self._taking.start()

    @property
    def is_taking(self) -> bool:
        """Whether the thread is still at it."""
        return self._taking is not None and self._taking.is_alive()

    def num_taken(self) -> int:
        """Bytes that the thread has taken; waits for it."""
        self._wait()
        return self._num_taken

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor whose content is undefined; from the allocator if no room is left, or all would be small."""
        self._wait()  # it writes
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
        """Begin anew: whoever took tensors has dropped them."""
        self._used = 0


def _touch(pages: mmap.mmap, num_bytes: int) -> None:
    """Write to each page, in one call, which needs the interpreter's lock at its end alone."""
    np.frombuffer(pages, np.uint8)[: num_bytes : mmap.PAGESIZE] = 0
