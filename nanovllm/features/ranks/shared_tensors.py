"""Tensors for the other ranks of this machine, in memory that all processes map."""

from __future__ import annotations

import itertools
import math
import os
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 64
Entry = tuple[int, torch.dtype, tuple[int, ...]]  # first byte, dtype and shape of a tensor


class SharedTensors:
    """Copies of tensors by name; pickled it is an address, which is valid while the first process keeps the object.

    An anonymous file (memfd_create) has no size limit of /dev/shm, and nobody else's name.

    Args:
        tensors: values by name, with the dtype of each copy.

    Raises OSError if the host lacks the memory.
    """

    def __init__(self, tensors: Mapping[str, tuple[Tensor, torch.dtype]]) -> None:
        sizes = [math.prod(tensor.shape) * dtype.itemsize for tensor, dtype in tensors.values()]
        *starts, self._size = itertools.accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0)
        self._entries: dict[str, Entry] = {
            name: (start, dtype, tuple(tensor.shape))
            for start, (name, (tensor, dtype)) in zip(starts, tensors.items(), strict=True)
        }
        file = os.memfd_create("nanovllm")
        weakref.finalize(self, os.close, file)
        os.posix_fallocate(file, 0, self._size + 1)
        self._path = f"/proc/{os.getpid()}/fd/{file}"
        for name, copy in self.open().items():
            copy.copy_(tensors[name][0].detach())

    def __getstate__(self) -> Any:
        return self._size, self._entries, self._path

    def __setstate__(self, state: Any) -> None:
        self._size, self._entries, self._path = state

    def open(self) -> dict[str, Tensor]:
        """The tensors, which keep the memory."""
        memory = torch.from_file(self._path, shared=True, size=self._size + 1, dtype=torch.uint8)
        return {
            name: memory[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for name, (start, dtype, shape) in self._entries.items()
        }
