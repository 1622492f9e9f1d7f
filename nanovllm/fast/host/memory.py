"""A CPU's memory: huge pages for packed weights; for the KV cache, pages faulted in before steps write to them."""

from __future__ import annotations

import ctypes
import itertools
import logging
import math
import mmap
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanovllm.features.engine_config import EngineConfig
from nanovllm.kv_cache import CacheMemory, KVCaches

logger = logging.getLogger("nanovllm")

HUGE_PAGE_BYTES = 2 * 2**20  # size on most systems
_ALIGNMENT = 64  # bytes: a cache line
_MARGIN = 2**16  # bytes, for padding between tensors
# Bytes touched per call: one huge page, 1–4 ms, during which an arriving request shares the machine.
PIECE_BYTES = HUGE_PAGE_BYTES
# Left to the rest of the machine, or of the container: beyond that, memory is taken by the steps that need it.
RESERVE_BYTES = 2**30
# Linux 5.14: faults pages in as for a write without writing, so that blocks in use keep their contents.
MADV_POPULATE_WRITE = 23
# At the start of each layer's K and of its V: memory that is taken by pages of 4 KiB.
SMALL_PAGES_BYTES = 2 * 2**20
# The cache on a CPU competes with everything else in memory: by default it takes at most half of the available bytes
# and at most this, enough for 64 requests of 2,800 tokens with the default model.
MAX_DEFAULT_CPU_CACHE_BYTES = 4 * 2**30
CGROUPS = Path("/sys/fs/cgroup")


def _fresh_pages(num_bytes: int) -> mmap.mmap:
    """Zeroed anonymous memory, allocated at the first write."""
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # not shared with forks


def _use_huge_pages(pages: mmap.mmap, begin: int, end: int) -> None:
    """Request huge pages from `begin`, a multiple of the page size, to `end`, if at least one fits."""
    if end - begin >= HUGE_PAGE_BYTES:
        with suppress(OSError, AttributeError):  # a system without them
            pages.madvise(mmap.MADV_HUGEPAGE, begin, end - begin)


class HugePages:
    """One mapping in huge pages for consecutive tensors; it lives as long as any of them.

    Args:
        num_bytes: bytes of all tensors; pages are allocated at the first write.
    """

    def __init__(self, num_bytes: int) -> None:
        self._pages: mmap.mmap | None = None
        self._used = 0
        if num_bytes >= HUGE_PAGE_BYTES:
            with suppress(OSError):  # a limit of the process: tensors then come from torch's allocator
                self._pages = _fresh_pages(num_bytes + _MARGIN)
                _use_huge_pages(self._pages, 0, len(self._pages))

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor; from torch's allocator if there is no mapping or no room in it."""
        count = math.prod(shape)
        if self._pages is None or self._used + count * dtype.itemsize > len(self._pages):
            return torch.empty(shape, dtype=dtype, device="cpu")
        tensor = torch.frombuffer(self._pages, dtype=dtype, count=count, offset=self._used).view(shape)
        self._used += -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        return tensor

    def forget_tensors(self) -> None:
        """Reuse the mapping from its start; all earlier tensors must be dead."""
        self._used = 0


class LazyMemory(CacheMemory):
    """Fresh pages of the system, which are zero, and take memory and time only when they are first written to.

    Writing zeros to the default pool took 5 s of start-up. `take_some_memory` faults them in in the order of blocks:
    the first of every layer, then the next. That is safe during steps in another thread: no content changes, and a
    piece in flight keeps its mapping alive.
    """

    def __init__(self) -> None:
        self.num_taken: int = 0
        self._pieces: Iterator[tuple[int, int, Tensor]] = iter(())

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        pages = _fresh_pages(math.prod(shape) * dtype.itemsize)
        _spare_first_pages(pages, len(pages) // shape[0])
        return torch.frombuffer(pages, dtype=dtype).view(*shape)

    def begin(self, caches: Sequence[Tensor]) -> None:
        """Args: caches: [n, ...] each, contiguous and mapped by themselves; `n` parts that fill alike."""
        self.num_taken = 0
        is_worth_touching = sum(cache.nbytes for cache in caches) >= PIECE_BYTES
        self._pieces = _pieces(caches if is_worth_touching else ())

    def take_some_memory(self) -> bool:
        """Touch one piece; False if none is left, the system cannot, or memory is short."""
        if _madvise() is None or free_memory() < RESERVE_BYTES + PIECE_BYTES:
            return False
        piece = next(self._pieces, None)
        if piece is None:
            return False
        error = _populate(*piece)
        if error:
            logger.debug("the KV cache's memory is taken by the steps that use it: madvise failed with error %d", error)
            self.stop()
            return False
        self.num_taken += piece[1]
        return True

    def stop(self) -> None:
        """Drop the remaining pieces."""
        self._pieces = iter(())


def _spare_first_pages(pages: mmap.mmap, part_bytes: int) -> None:
    """Ask for huge pages, but not at the start of each part.

    The first request writes little to K and V of each layer: of a model of 30 layers huge pages would be 120 MB, all of
    it cleared before the first token.
    """
    with suppress(OSError, AttributeError):  # some systems use huge pages by default
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    for begin in range(0, len(pages), part_bytes):
        _use_huge_pages(pages, -(-(begin + SMALL_PAGES_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE, begin + part_bytes)


def _pieces(caches: Sequence[Tensor]) -> Iterator[tuple[int, int, Tensor]]:
    """(address, bytes, its tensor) of each piece, on page boundaries; an end of less than a page is left out."""
    parts = [(part.data_ptr(), part.numel() * part.element_size(), part) for cache in caches for part in cache]
    for offset in range(0, max((size for _, size, _ in parts), default=0), PIECE_BYTES):
        for address, size, part in parts:
            first = -(-(address + offset) // mmap.PAGESIZE) * mmap.PAGESIZE
            last = (address + min(offset + PIECE_BYTES, size)) // mmap.PAGESIZE * mmap.PAGESIZE
            if first < last:
                yield first, last - first, part


def _populate(address: int, num_bytes: int, _owner: Tensor) -> int:
    """Fault pages in; returns errno, 0 if all went well. `_owner` keeps them mapped meanwhile."""
    madvise = _madvise()
    assert madvise is not None
    return ctypes.get_errno() if madvise(address, num_bytes, MADV_POPULATE_WRITE) else 0


@cache
def _madvise() -> Any:
    """The system's function, which runs without the interpreter's lock; None where it cannot do this."""
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_int
    return function


def memory_for_cache(binding: object, config: EngineConfig, choice: object) -> int:
    """Bytes that the cache may take on a CPU by default; arguments as of `defaults.memory_share`."""
    available = min(MAX_DEFAULT_CPU_CACHE_BYTES, available_memory() // 2)
    return available // (config.data_parallel_size * config.tensor_parallel_size)


def available_memory() -> int:
    """Bytes of the machine's memory that can be taken without swapping, by Linux's estimate."""
    with open("/proc/meminfo", encoding="ascii") as file:
        kib = next(line.split()[1] for line in file if line.startswith("MemAvailable:"))
    return int(kib) * 1024


def free_memory() -> int:
    """Bytes that this process may still take: of the machine, and of each control group that it is in."""
    free = available_memory()
    for folder in _groups():
        try:
            limit = (folder / "memory.max").read_text(encoding="ascii").strip()
            if limit != "max":
                stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
                used = int((folder / "memory.current").read_text(encoding="ascii")) - int(stat["inactive_file"])
                free = min(free, int(limit) - used)
        except (OSError, ValueError, KeyError):  # no such file at the root
            continue
    return free


@cache
def _groups() -> tuple[Path, ...]:
    """Folders of the control groups (version 2) that limit this process, from its own to the root."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ()
    own = next((line[3:].lstrip("/") for line in lines if line.startswith("0::")), None)
    if own is None:
        return ()
    folders = [CGROUPS / own, *(CGROUPS / own).parents]
    return tuple(folders[: folders.index(CGROUPS) + 1])


def take_memory(caches: KVCaches) -> None:
    """Take a CPU's memory now, by writing zeros, instead of in the steps that first write to a block.

    For measuring; call it before anything is cached.
    """
    for part in itertools.chain.from_iterable((*caches.of_layers, *caches.of_records)):
        if part.device.type == "cpu":
            part.zero_()
