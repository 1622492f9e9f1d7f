"""Errors of the device, copies to and from it, threads, memory, the lock for captures, kernels by name, compilers."""

from __future__ import annotations

import gc
import mmap
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, NoReturn

import torch
from torch import Tensor

from nanovllm.core.errors import DeviceError

# While one thread captures a CUDA graph, no other may wait for the device or give memory back to it.
DEVICE_LOCK = threading.RLock()

HUGE_PAGE_BYTES = 2 * 2**20  # of most systems

_DEVICE_ERROR = re.compile(r"CUDA error|Triton Error \[CUDA\]|cuBLAS error|CUBLAS_STATUS", re.IGNORECASE)


def raise_device_error(error: RuntimeError) -> NoReturn:
    """Raise an error of the device itself as DeviceError, any other as it is."""
    # Triton raises plain errors; a failed allocation is no failure of the device.
    is_of_device = isinstance(error, torch.AcceleratorError) or _DEVICE_ERROR.search(str(error))
    if is_of_device and not isinstance(error, torch.OutOfMemoryError):
        raise DeviceError(str(error)) from error
    raise error


def to_device(values: Any, device: torch.device) -> Tensor:
    """A tensor of the host's numbers; the host does not wait for the copy to a GPU."""
    tensor = torch.as_tensor(values, device="cpu")  # whatever the default device is
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def to_host(tensor: Tensor) -> Tensor:
    """The tensor on the host, filled once the device has done what was launched before; itself on a CPU."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def give_memory_back(device: torch.device) -> None:
    """Give the memory that nothing uses back to a GPU, for other processes too."""
    if device.type == "cuda":
        with DEVICE_LOCK:
            gc.collect()  # compiling leaves cycles behind that hold what the compiled code was first called with
            torch.cuda.empty_cache()


@contextmanager
def computing_with(num_threads: int | None) -> Iterator[None]:
    """Compute with this many of PyTorch's threads inside the block; with None, with as many as outside.

    PyTorch keeps the number per calling thread: what one thread sets, no other can take back. So rank 0 takes its share
    for each step, and not from construction to `close`, which may be another thread's. It costs 0.3 µs.
    """
    before = torch.get_num_threads()
    if num_threads is None or num_threads == before:
        yield
        return
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def fresh_pages(num_bytes: int) -> mmap.mmap:
    """Zeroed memory of the system, which is taken when it is first written to."""
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # not shared with forks


def use_huge_pages(pages: mmap.mmap, begin: int = 0, end: int | None = None) -> None:
    """Ask for huge pages from `begin`, a multiple of a page's size, to `end`, where the system has them.

    Nothing is asked for less than the size of one.
    """
    end = len(pages) if end is None else end
    if end - begin >= HUGE_PAGE_BYTES:
        with suppress(OSError, AttributeError):
            pages.madvise(mmap.MADV_HUGEPAGE, begin, end - begin)


def use_small_pages(pages: mmap.mmap) -> None:
    """Ask for no huge pages, which some systems give to whoever does not ask too."""
    with suppress(OSError, AttributeError):
        pages.madvise(mmap.MADV_NOHUGEPAGE)


def find_kernel(file: str, name: str) -> Any | None:
    """`name` of `kernels/<file>.py`; None without the `kernels` room, or without Triton where that needs it.

    Call it at construction, not in a step.
    """
    try:
        return getattr(import_module(f"nanovllm.kernels.{file}"), name)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(("nanovllm.kernels", "triton")):
            raise
        return None


def cpp_compiler() -> str:
    """The C++ compiler's name, as torch.compile chooses it: asking there imports a third of a second of code."""
    return os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
