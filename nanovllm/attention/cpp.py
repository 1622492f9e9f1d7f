"""The CPU's own form: decodes by a small C++ kernel straight from the pages, chunks as in `sdpa`.

The kernel is compiled for the model's dtype, head size and group when it is first needed (about a second), for the very
processor, and kept in the user's cache folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention.layout import BatchLayout
from nanovllm.attention.sdpa import SdpaAttention, SdpaPlan
from nanovllm.block_manager import NULL_BLOCK
from nanovllm.default_model import cache_root

SOURCE = Path(__file__).with_name("paged_attention.cpp")
ELEMENTS = {torch.float32: "float", torch.bfloat16: "bfloat16"}
LANES = 16  # elements that the kernel handles at once
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fopenmp")
# Tokens of a work item: small enough that few long sequences keep all threads busy, large enough that merging is free.
SPLIT_TOKENS = 512

Kernel = Callable[..., None]


class KernelBuildError(RuntimeError):
    """The C++ kernel could not be compiled; the message has the compiler's last words."""


def load_kernel(dtype: torch.dtype, head_dim: int, num_groups: int) -> Kernel:
    """The compiled kernel, from the cache folder if this processor's is there already.

    Raises KernelBuildError, or ValueError for a dtype or a head size that it does not serve.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler

    if dtype not in ELEMENTS or head_dim % LANES:
        raise ValueError(
            f"it serves float32 and bfloat16 in heads of a multiple of {LANES}, not {dtype} in {head_dim}."
        )
    sizes = (f"-DELEMENT={ELEMENTS[dtype]}", f"-DHEAD_DIM={head_dim}", f"-DNUM_GROUPS={num_groups}")
    command = [get_cpp_compiler(), *FLAGS, *sizes, str(SOURCE)]
    identity = "\0".join([*command[:-1], SOURCE.read_text(encoding="utf-8"), _processor()])
    library = cache_root() / "kernels" / f"paged-attention-{hashlib.sha256(identity.encode()).hexdigest()[:24]}.so"
    if not library.exists():
        _build(command, library)
    function = ctypes.CDLL(str(library)).paged_decode_attention
    function.restype = None
    function.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_int64] * 5 + [ctypes.c_float, ctypes.c_int]
    return function


def _processor() -> str:
    """What -march=native depends on: a cache folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _build(command: list[str], library: Path) -> None:
    """Compile beside the final place and rename, so that what is there is complete."""
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            built = Path(folder) / library.name
            done = subprocess.run([*command, "-o", str(built)], capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise KernelBuildError(f"{command[0]} failed: {done.stderr.strip()[-500:]}")
            os.replace(built, library)
    except OSError as error:
        raise KernelBuildError(f"the kernel could not be built in {library.parent}: {error}") from error


class CppAttention(SdpaAttention):
    """The `cpp` form. One instance serves every layer of an engine.

    Args:
        kernel: from `load_kernel`, for the layers' dtype and sizes.
        block_size, page_bytes, dtype, device: as of `SdpaAttention`.
    """

    def __init__(self, kernel: Kernel, *, block_size: int, page_bytes: int, dtype: torch.dtype) -> None:
        super().__init__(block_size, page_bytes, dtype, torch.device("cpu"))
        self._kernel = kernel

    def plan(self, layout: BatchLayout) -> CppPlan:
        contexts = layout.positions[: layout.num_decodes] + 1
        num_pages = -(-contexts // self.block_size)
        tables = np.full((layout.num_decodes, int(num_pages.max(initial=0))), NULL_BLOCK, np.int64)
        for row, (entry, count) in enumerate(zip(layout.decodes, num_pages.tolist(), strict=True)):
            tables[row, :count] = entry.block_table[:count]
        return CppPlan(self.block_size, [], self._chunks(layout), self._kernel, tables, contexts)


@dataclass(frozen=True, slots=True)
class CppPlan(SdpaPlan):
    """One step's tables and chunks; `attend` is called once a layer."""

    kernel: Kernel
    tables: np.ndarray  # [num_decodes, max_pages] int64
    contexts: np.ndarray  # [num_decodes] int64, tokens that each decode sees

    def _attend_decodes(
        self, output: Tensor, query: Tensor, key_cache: Tensor, value_cache: Tensor, scaling: float
    ) -> None:
        num_decodes, width = self.tables.shape
        if num_decodes:  # all tensors are contiguous, and the decodes are the first rows
            self.kernel(
                query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(),
                self.tables.ctypes.data, self.contexts.ctypes.data, output.data_ptr(),
                num_decodes, width, self.block_size, key_cache.shape[1], SPLIT_TOKENS,
                scaling, torch.get_num_threads(),
            )  # fmt: skip
