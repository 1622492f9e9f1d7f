"""Device errors, copies, the lock for graph captures, kernels by name, compilers."""

from __future__ import annotations

import gc
import itertools
import os
import re
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor

from nanovllm.errors import DeviceError

# While one thread captures a CUDA graph, no other may synchronise with the device or free its memory.
DEVICE_LOCK = threading.RLock()

_DEVICE_ERROR = re.compile(r"CUDA error|Triton Error \[CUDA\]|cuBLAS error|CUBLAS_STATUS", re.IGNORECASE)


def raise_device_error(error: RuntimeError) -> NoReturn:
    """Raise a device error as DeviceError; re-raise any other error."""
    # Triton raises plain errors; a failed allocation is not a device error.
    is_of_device = isinstance(error, torch.AcceleratorError) or _DEVICE_ERROR.search(str(error))
    if is_of_device and not isinstance(error, torch.OutOfMemoryError):
        raise DeviceError(str(error)) from error
    raise error


def to_device(values: Any, device: torch.device) -> Tensor:
    """A device tensor of host values; the copy to a GPU is asynchronous."""
    tensor = torch.as_tensor(values, device="cpu")  # ignores the default device
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def to_host(tensor: Tensor) -> Tensor:
    """A host tensor, filled when the device has finished its earlier work; a CPU tensor is returned itself."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def give_memory_back(device: torch.device) -> None:
    """Free unused memory of a GPU, for other processes too."""
    if device.type == "cuda":
        with DEVICE_LOCK:
            gc.collect()  # compilation leaves reference cycles that hold the arguments of the first call
            torch.cuda.empty_cache()


def find_kernel(file: str, name: str) -> Any | None:
    """`name` of `fast/kernels/<file>.py`; None without that folder, or if the file needs Triton and there is none.

    Call it at construction, not in a step.
    """
    try:
        return getattr(import_module(f"nanovllm.fast.kernels.{file}"), name)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(("nanovllm.fast.kernels", "triton")):
            raise
        return None


_copies = itertools.count()


def own_code(function: Any) -> Callable[..., Any]:
    """A copy of a function without closure, to be compiled for one engine.

    Dynamo keeps a limited number of compiled versions by code object: engines that shared one would reach the limit
    and fall back to uncompiled code.
    """
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_copies)}")
    return FunctionType(code, function.__globals__, argdefs=function.__defaults__)


def cpp_compiler() -> str:
    """Name of the C++ compiler, chosen as by torch.compile, without 0.3 s for importing that."""
    return os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
