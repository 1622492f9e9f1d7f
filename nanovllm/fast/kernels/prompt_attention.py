"""Attention of chunks over the paged KV cache on Hopper GPUs: `prompt_attention_cuda/`.

A work item is a query head and up to 128 consecutive rows of a chunk. The copy engine gathers K and V through the block
table, two warpgroups multiply in turn; queries are read and results written in place in the flat batch.
"""

from __future__ import annotations

import ctypes
import logging
import math
from contextlib import suppress
from ctypes import c_float, c_int, c_longlong, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from nanovllm.fast.kernels import nvrtc

TILE_ROWS = 128  # query rows of a thread block
_TYPES = {torch.bfloat16: ("bf16", 9), torch.float16: ("f16", 6)}  # name in PTX, number in a tensor map
_PANEL = 64  # columns per fetch: 128 bytes, the swizzle's width
NUM_THREADS = 384
_ALIGNMENT = 1024
_STATIC_BYTES = 6144
_LARGE_TILES = 65536  # bytes of keys and values; two stages of them hide the copies
_MOST_CUT = 32  # tiles with keys cut in parts
_WIDEST_ROWS = 640  # bytes of a token's key and value: two stages of 128 tokens fit into shared memory
_LEAST_HEAD_DIM = 64
_MOST_HEAD_DIM = 256
_MOST_SOFTCAP = 1000.0  # the error of a capped score is 2^-21 of the cap
_MAX_MAPS = 1024
_MAX_CHECKED = 8192  # window of the check at start-up, in tokens
TOLERANCE = 8e-3  # largest error in the check at start-up; bfloat16 rounds to 4e-3
_SWIZZLE_128_BYTES = 3
_L2_PROMOTION_256_BYTES = 3
_SOURCES = Path(__file__).with_name("prompt_attention_cuda")


logger = logging.getLogger("nanovllm")


class AttentionSizes(NamedTuple):
    """Sizes of the layers of one kind.

    block_size: tokens of a block; divides 128.
    window: positions that a row sees, its own included; None for all.
    softcap: limit of scores, by tanh; None without one.
    chunk: a row sees its own chunk of the positions alone; None for all.
    value_dim: elements of a head of values; None for `head_dim`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    window: int | None = None
    softcap: float | None = None
    chunk: int | None = None
    value_dim: int | None = None

    @property
    def widths(self) -> tuple[int, int]:
        """Elements of a head of queries and keys, and of values."""
        return self.head_dim, self.value_dim or self.head_dim

    @property
    def tile_keys(self) -> int:
        """Keys of a tile: wide values take half as many, since their sums fill a thread's registers."""
        return TILE_ROWS if self.widths[1] <= 128 and sum(self.row_bytes) <= _WIDEST_ROWS else 64

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Shared memory for a token's head of keys, and of values, in whole panels."""
        keys, values = (-(-width // _PANEL) * _PANEL * 2 for width in self.widths)
        return keys, values


def why_not(sizes: AttentionSizes, device: torch.device) -> str | None:
    """The reason why layers of these sizes are unsupported; None if they are supported."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return "the GPU is not of compute capability 9 (Hopper)"
    if sizes.dtype not in _TYPES:
        return f"K and V are {sizes.dtype}, not bfloat16 or float16"
    for width in sizes.widths:
        if width % 8 or not _LEAST_HEAD_DIM <= width <= _MOST_HEAD_DIM:
            return f"heads of {width} elements are no multiple of 8 from {_LEAST_HEAD_DIM} to {_MOST_HEAD_DIM}"
    if sizes.block_size % 8 or TILE_ROWS % sizes.block_size:
        return f"blocks of {sizes.block_size} tokens are no multiple of 8 that divides {TILE_ROWS}"
    if sizes.softcap is not None and sizes.softcap > _MOST_SOFTCAP:
        return f"the soft-cap {sizes.softcap:g} exceeds {_MOST_SOFTCAP:g}, so its float32 tanh is too coarse"
    if not nvrtc.is_available():
        return "there is no libnvrtc to compile CUDA C++"
    return None


def open_kernel(*sizes: Any, device: torch.device) -> PromptAttention | None:
    """See `HopperAttention.open`."""
    return PromptAttention.open(AttentionSizes(*sizes), device)


def compile_kernel(*sizes: Any, device: torch.device) -> None:
    """Compile the kernel for layers of these `AttentionSizes`, if they are supported; `open_kernel` reports errors."""
    own = AttentionSizes(*sizes)
    if why_not(own, device) is None:
        with suppress(nvrtc.CudaError):
            machine_code(own, *shared_memory(own, device)[:2], PromptAttention.name)


def shared_memory(sizes: AttentionSizes, device: torch.device, most_buffers: int = 2) -> tuple[int, int, int]:
    """Stages of K and V in shared memory, buffers of Q, and bytes of both."""
    query_bytes = TILE_ROWS * sizes.row_bytes[0]
    tile_bytes = sizes.tile_keys * sum(sizes.row_bytes)
    properties: Any = torch.cuda.get_device_properties(device)
    room = properties.shared_memory_per_block_optin - _STATIC_BYTES - _ALIGNMENT
    most = 3 if tile_bytes < _LARGE_TILES else 2
    stages = min(most, (room - query_bytes) // tile_bytes)
    buffers = min(most_buffers, (room - stages * tile_bytes) // query_bytes)
    return stages, buffers, _ALIGNMENT + buffers * query_bytes + stages * tile_bytes


class HopperAttention:
    """A kernel over the paged KV cache for layers of one kind; `why_not` must be None for their sizes.

    name: name of the CUDA kernel.
    failure, difference: warnings where it fails, or differs from float32.
    most_buffers: most buffers of Q in shared memory.
    """

    name = failure = difference = ""
    most_buffers = 2

    def __init__(self, sizes: AttentionSizes, device: torch.device) -> None:
        self._sizes = sizes
        self._device = device
        stages, buffers, shared_bytes = shared_memory(sizes, device, self.most_buffers)
        with torch.cuda.device(device):
            code = machine_code(sizes, stages, buffers, self.name)
            self._function = nvrtc.CudaFunction(code, self.name, num_threads=NUM_THREADS, shared_bytes=shared_bytes)
        self._maps: dict[tuple[int, ...], Any] = {}  # tensor maps by address; caches stay, others recur

    @classmethod
    def open(cls, sizes: AttentionSizes, device: torch.device) -> Self | None:
        """The kernel for layers of these sizes; None where they are unsupported, or if its check fails."""
        if why_not(sizes, device) is not None:
            return None
        try:
            kernel = cls(sizes, device)
            error = kernel.error_at_start()
        except nvrtc.CudaError as failure:
            logger.warning(cls.failure, failure)
            return None
        if not error <= TOLERANCE:
            logger.warning(cls.difference, error)
            return None
        return kernel

    def error_at_start(self) -> float:
        """Largest difference from dense float32 attention, relative to the largest value."""
        raise NotImplementedError

    def _map(self, tensor: Tensor, num_rows: int) -> Any:
        key = tensor.data_ptr(), num_rows, *tensor.shape, *tensor.stride()
        if (found := self._maps.get(key)) is None:
            if len(self._maps) >= _MAX_MAPS:
                self._maps.clear()
            found = self._maps[key] = tensor_map(tensor, num_rows)
        return found


class PromptAttention(HopperAttention):
    """The kernel of chunks."""

    name = "prompt_attention"
    failure = "attention of prompts by FlexAttention, since the kernel for Hopper does not run: %s"
    difference = "attention of prompts by FlexAttention, since the kernel for Hopper differs from float32 by %.1e"

    def __init__(self, sizes: AttentionSizes, device: torch.device) -> None:
        super().__init__(sizes, device)
        properties: Any = torch.cuda.get_device_properties(device)
        self._num_processors = properties.multi_processor_count
        items = 2 * self._num_processors  # parts, floats of each part
        sums = 8 * 32 * (sizes.row_bytes[1] // 4 + 4)
        self._workspace = torch.empty(items * sums, dtype=torch.float32, device=device)
        self._arrivals = torch.zeros(_MOST_CUT * sizes.num_heads * 8, dtype=torch.int32, device=device)
        self._counts = torch.zeros(2, dtype=torch.int32, device=device)

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        step: tuple[Tensor, Tensor, Tensor],
        scaling: float,
        output: Tensor,
        sinks: Tensor | None = None,
        *,
        num_decodes: int = 0,
    ) -> None:
        """Write the attention of a step's chunks to their rows of `output`, and 0 to rows after them.

        Args:
            query, output: [num_rows, num_heads, head_dim or value_dim], a row's elements contiguous; the output's rows
                begin at multiples of 16 bytes.
            keys, values: [num_slots, num_kv_heads, head_dim or value_dim].
            step: int32, spans [num_spans, 3] of consecutive rows of one sequence: first row, its position, number of
                rows up to 128, padding (0) last; starts of their block tables [num_spans]; block tables, concatenated.
            scaling: factor of the scores, above 0.
            sinks: [num_heads].
            num_decodes: rows of `output` before the chunks.
        """
        sizes, (spans, starts, tables) = self._sizes, step
        if sinks is not None:
            sinks = sinks.detach().float()  # the kernel reads float32
        box = min(sizes.block_size, sizes.tile_keys)
        maps = self._map(query, TILE_ROWS), self._map(keys, box), self._map(values, box)
        with torch.cuda.device(self._device):
            self._function.launch(
                self._num_processors,
                *maps,
                c_void_p(output.data_ptr()),
                c_longlong(output.stride(0)),
                c_void_p(spans.data_ptr()),
                c_int(len(spans)),
                c_void_p(starts.data_ptr()),
                c_void_p(tables.data_ptr()),
                c_void_p(None if sinks is None else sinks.data_ptr()),
                c_float(scaling * math.log2(math.e)),
                c_void_p(self._workspace.data_ptr()),
                c_void_p(self._arrivals.data_ptr()),
                c_void_p(self._counts.data_ptr()),
                c_int(num_decodes),
                c_int(len(output)),
            )

    @torch.inference_mode()
    def error_at_start(self) -> float:
        """See the base class.

        The step has two chunks, one of them beyond the window or across two chunks of positions, with sinks and
        without. Scores exceed the soft-cap.
        """
        sizes = self._sizes
        block = self._sizes.block_size
        farthest = max(3 * TILE_ROWS, *(min(span or 0, _MAX_CHECKED) for span in (sizes.window, sizes.chunk)))
        chunks = [(0, 150), (farthest + (5 if sizes.chunk is None else -15), 40)]  # first position, rows
        counts = [-(-(start + rows) // block) for start, rows in chunks]
        generator = torch.Generator(self._device).manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=self._device).to(sizes.dtype)

        tables = torch.arange(sum(counts), 0, -1, dtype=torch.int32, device=self._device)
        slots = (sum(counts) + 1) * block
        num_rows = sum(rows for _, rows in chunks)
        keys, values = (random(slots, sizes.num_kv_heads, width) for width in sizes.widths)
        query = random(num_rows, sizes.num_heads, sizes.head_dim)
        sinks = random(sizes.num_heads)
        query = query * (sizes.softcap or 1)
        sinks = sinks + (sizes.softcap or 0)
        spans = [(150, chunks[1][0], 40), (128, 128, 22), (0, 0, 128), (0, 0, 0)]
        starts = [counts[0], 0, 0, 0]
        span_table, start_table = (torch.tensor(x, dtype=torch.int32, device=self._device) for x in (spans, starts))
        step = span_table, start_table, tables
        errors = []
        for given in (None, sinks):
            output = query.new_full((num_rows, sizes.num_heads, sizes.widths[1]), torch.nan)
            self.attend(query, keys, values, step, sizes.head_dim**-0.5, output, given)
            expected = []
            row = 0
            table = 0
            for (start, rows), count in zip(chunks, counts, strict=True):
                positions = torch.arange(start + rows, device=self._device)
                seen = tables[table + positions // block].long() * block + positions % block
                own = query[row : row + rows]
                expected.append(_dense_attention(own, keys[seen], values[seen], sizes, given))
                row = row + rows
                table = table + count
            right = torch.cat(expected)
            errors.append(float((output.float() - right).abs().max() / right.abs().max()))
        return max(errors) if all(error >= 0.0 for error in errors) else math.nan


def _dense_attention(
    query: Tensor, keys: Tensor, values: Tensor, sizes: AttentionSizes, sinks: Tensor | None
) -> Tensor:
    """Attention of a chunk's last rows in float32: query [rows, heads, head_dim], keys and values of all positions."""
    rows, (length, num_kv_heads, head_dim) = len(query), keys.shape
    grouped = query.float().view(rows, num_kv_heads, -1, head_dim)  # no copy of K and V for each query head
    positions = torch.arange(length, device=query.device)
    own = positions[length - rows :, None]
    is_seen = (positions <= own) & (positions > own - (sizes.window or length))
    if sizes.chunk is not None:
        is_seen &= positions >= own // sizes.chunk * sizes.chunk
    scores = torch.einsum("qkgd,skd->kgqs", grouped, keys.float()) * head_dim**-0.5
    if sizes.softcap is not None:
        scores = sizes.softcap * torch.tanh(scores / sizes.softcap)
    scores = scores.masked_fill(~is_seen, -torch.inf)
    if sinks is not None:
        own_sinks = sinks.float().view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, own_sinks], 3)
    weights = scores.softmax(3)[..., :length]
    return torch.einsum("kgqs,skd->qkgd", weights, values.float()).flatten(1, 2)


class _TensorMap(ctypes.Structure):
    _fields_ = [("opaque", ctypes.c_ubyte * 128)]
    _align_ = 64


def tensor_map(tensor: Tensor, num_rows: int) -> Any:
    """A map of [rows, heads, head_dim] for boxes of `num_rows` rows and 64 columns of one head; rows outside are 0."""
    memory = ctypes.create_string_buffer(128 + 64)  # older Pythons do not align structures
    address = -(-ctypes.addressof(memory) // 64) * 64
    rows, heads, head_dim = tensor.shape
    sizes = (ctypes.c_uint64 * 3)(head_dim, heads, rows)
    strides = (ctypes.c_uint64 * 2)(tensor.stride(1) * 2, tensor.stride(0) * 2)
    box = (ctypes.c_uint32 * 3)(_PANEL, 1, num_rows)
    steps = (ctypes.c_uint32 * 3)(1, 1, 1)
    nvrtc.check(
        nvrtc.driver().cuTensorMapEncodeTiled(
            c_void_p(address), _TYPES[tensor.dtype][1], 3, c_void_p(tensor.data_ptr()), sizes, strides, box, steps,
            0, _SWIZZLE_128_BYTES, _L2_PROMOTION_256_BYTES, 0,
        ),
        f"describe a tensor of {tuple(tensor.shape)} to the copy engine",
    )  # fmt: skip
    return _TensorMap.from_buffer_copy(ctypes.string_at(address, 128))


def source_text(name: str) -> str:
    """The source files of the kernel of chunks, or of wide groups, concatenated."""
    own = {"prompt_attention": ("3_items.h", "4_prompts.cu"), "wide_attention": ("5_wide.cu",)}[name]
    return nvrtc.joined_sources(*(_SOURCES / file for file in ("1_hopper.h", "2_products.h", *own)))


@cache
def machine_code(sizes: AttentionSizes, stages: int, buffers: int, name: str) -> bytes:
    """Machine code of the kernel; compilation takes half a second."""
    definitions = {
        "TYPE": _TYPES[sizes.dtype][0], "HEAD_DIM": sizes.head_dim, "HEADS": sizes.num_heads,
        "KV_HEADS": sizes.num_kv_heads, "BLOCK_SIZE": sizes.block_size, "WINDOW": sizes.window or 0, "STAGES": stages,
        "KEYS": sizes.tile_keys, "SOFTCAP": f"{float(sizes.softcap or 0)}f", "VALUE_DIM": sizes.widths[1],
        "CHUNK": sizes.chunk or 0, "QUERIES": buffers,
    }  # fmt: skip
    return nvrtc.compile_source(source_text(name), "sm_90a", definitions)
