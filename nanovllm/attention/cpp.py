"""The CPU's own form: small C++ kernels that read K and V straight from their pages.

They are compiled for the model's dtype, head size and group when they are first needed (two seconds), for the very
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
from nanovllm.batch import ScheduledSequence
from nanovllm.block_manager import NULL_BLOCK
from nanovllm.default_model import cache_root

SOURCE = Path(__file__).with_name("paged_attention.cpp")
ELEMENTS = {torch.float32: "float", torch.bfloat16: "bfloat16"}
LANES = 16  # elements that the kernel handles at once
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fopenmp")
# Tokens of a work item: small enough that few long sequences keep all threads busy, large enough that merging is free.
SPLIT_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Kernels:
    """The functions of the compiled library; their arguments are described in its source."""

    decode: Callable[..., None]
    chunk: Callable[..., None]


class KernelBuildError(RuntimeError):
    """The C++ kernel could not be compiled; the message has the compiler's last words."""


def load_kernels(dtype: torch.dtype, head_dim: int, num_groups: int) -> Kernels:
    """The compiled kernels, from the cache folder if this processor's is there already.

    Raises KernelBuildError, or ValueError for a dtype or a head size that they do not serve.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler

    if dtype not in ELEMENTS or head_dim % LANES:
        raise ValueError(
            f"they serve float32 and bfloat16 in heads of a multiple of {LANES}, not {dtype} in {head_dim}."
        )
    sizes = (f"-DELEMENT={ELEMENTS[dtype]}", f"-DHEAD_DIM={head_dim}", f"-DNUM_GROUPS={num_groups}")
    command = [get_cpp_compiler(), *FLAGS, *sizes, str(SOURCE)]
    identity = "\0".join([*command[:-1], SOURCE.read_text(encoding="utf-8"), _processor()])
    library = cache_root() / "kernels" / f"paged-attention-{hashlib.sha256(identity.encode()).hexdigest()[:24]}.so"
    if not library.exists():
        _build(command, library)
    functions = ctypes.CDLL(str(library))
    decode, chunk = functions.paged_decode_attention, functions.paged_chunk_attention
    decode.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_int64] * 5 + [ctypes.c_float, ctypes.c_int]
    chunk.argtypes = [ctypes.c_void_p] * 8 + [ctypes.c_int64] * 4 + [ctypes.c_float, ctypes.c_int]
    decode.restype = chunk.restype = None
    return Kernels(decode, chunk)


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
        kernels: from `load_kernels`, for the layers' dtype and sizes.
        block_size, page_bytes, dtype: as of `SdpaAttention`.
    """

    def __init__(self, kernels: Kernels, *, block_size: int, page_bytes: int, dtype: torch.dtype) -> None:
        super().__init__(block_size, page_bytes, dtype, torch.device("cpu"))
        self._kernels = kernels
        # PyTorch's attention multiplies bfloat16 in AMX's tiles, where there are any; the kernel computes in float32.
        self._gathers_chunks = dtype == torch.bfloat16 and "amx_bf16" in _processor()

    def plan(self, layout: BatchLayout) -> CppPlan:
        chunks = self._chunks(layout) if self._gathers_chunks else []
        chunk_rows = _Rows.of([] if self._gathers_chunks else layout.chunks, layout.num_decodes, self.block_size)
        return CppPlan(
            self.block_size, [], chunks, self._kernels, _Rows.of(layout.decodes, 0, self.block_size), chunk_rows
        )


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of consecutive entries, as the kernels want them: all int64, one item an entry."""

    first_rows: np.ndarray  # in the flat batch
    starts: np.ndarray  # position of the first row
    counts: np.ndarray  # rows
    contexts: np.ndarray  # tokens that the last row sees
    tables: np.ndarray  # [num_entries, max_pages]

    @classmethod
    def of(cls, entries: list[ScheduledSequence], first_row: int, block_size: int) -> _Rows:
        starts = np.fromiter((entry.start for entry in entries), np.int64, len(entries))
        counts = np.fromiter((entry.num_new_tokens for entry in entries), np.int64, len(entries))
        contexts = starts + counts
        num_pages = -(-contexts // block_size)
        tables = np.full((len(entries), int(num_pages.max(initial=0))), NULL_BLOCK, np.int64)
        for row, (entry, count) in enumerate(zip(entries, num_pages.tolist(), strict=True)):
            tables[row, :count] = entry.block_table[:count]
        return cls(first_row + np.cumsum(counts) - counts, starts, counts, contexts, tables)


@dataclass(frozen=True, slots=True)
class CppPlan(SdpaPlan):
    """One step's tables; `attend` is called once a layer, with contiguous queries and caches."""

    kernels: Kernels
    decode_rows: _Rows
    chunk_rows: _Rows

    def _attend_decodes(
        self, output: Tensor, query: Tensor, key_cache: Tensor, value_cache: Tensor, scaling: float
    ) -> None:
        rows = self.decode_rows
        if len(rows.tables):
            self.kernels.decode(
                query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(),
                rows.tables.ctypes.data, rows.contexts.ctypes.data, output.data_ptr(),
                *rows.tables.shape, self.block_size, key_cache.shape[1], SPLIT_TOKENS,
                scaling, torch.get_num_threads(),
            )  # fmt: skip

    def _attend_chunks(
        self,
        output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scaling: float,
    ) -> None:
        SdpaPlan._attend_chunks(self, output, query, key, value, key_cache, value_cache, scaling)
        rows = self.chunk_rows
        if len(rows.tables):
            self.kernels.chunk(
                query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(),
                rows.tables.ctypes.data, rows.first_rows.ctypes.data, rows.starts.ctypes.data,
                rows.counts.ctypes.data, output.data_ptr(),
                *rows.tables.shape, self.block_size, key_cache.shape[1],
                scaling, torch.get_num_threads(),
            )  # fmt: skip
