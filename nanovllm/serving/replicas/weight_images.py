"""Tensors in shared memory: a front writes each once, and every replica of its machine maps them.

An image is an anonymous file, which ends with its last reader and which no other user can open. It is sealed once it is
whole: mappings never change, and never lose a page.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import weakref
from collections.abc import Collection, Iterable
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

ALIGNMENT = 64
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class SentTensor(Struct, array_like=True):
    """Place of a tensor in an image."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class SentImage(Struct, array_like=True):
    """Path of an image, and its tensors."""

    path: str
    tensors: list[SentTensor]


class Image:
    """Named tensors in an anonymous file; tensors that share their memory are written once."""

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self.tensors: list[SentTensor] = []
        self._file = os.memfd_create("nanovllm-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self._file).atexit = False
        self._end = 1  # a mapping has at least one byte
        written: dict[Any, tuple[Tensor, int]] = {}  # tensors keep their addresses
        for name, tensor in named:
            if not isinstance(tensor, Tensor):
                raise TypeError(f"the value of {name} must be a tensor, not {type(tensor).__name__}.")
            key = tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()
            if key not in written:
                written[key] = tensor, self._append(tensor)
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.tensors.append(SentTensor(name, dtype, tuple(tensor.shape), written[key][1]))
        os.ftruncate(self._file, self._end)
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)

    @property
    def num_bytes(self) -> int:
        return self._end

    def sent(self) -> SentImage:
        """The image for a child of this process."""
        return SentImage(f"/proc/{os.getpid()}/fd/{self._file}", self.tensors)

    def without(self, names: Collection[str]) -> Image:
        """An image of the other tensors; this one if it has none of these names."""
        if all(tensor.name not in names for tensor in self.tensors):
            return self
        return Image((name, tensor) for name, tensor in mapped(self.sent()) if name not in names)

    def _append(self, tensor: Tensor) -> int:
        """Write a tensor's values; returns their offset."""
        offset = -(-self._end // ALIGNMENT) * ALIGNMENT
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        self._end = offset
        while content:
            count = os.pwrite(self._file, content, self._end)
            self._end += count
            content = content[count:]
        return offset


def mapped(sent: SentImage) -> list[tuple[str, Tensor]]:
    """The tensors of an image, in its memory; a write copies the page for this process."""
    with open(sent.path, "rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return [(tensor.name, _tensor_in(content, tensor)) for tensor in sent.tensors]


def _tensor_in(content: mmap.mmap, sent: SentTensor) -> Tensor:
    dtype = getattr(torch, sent.dtype)
    if not (count := math.prod(sent.shape)):
        return torch.empty(sent.shape, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype, count=count, offset=sent.offset).view(sent.shape)
