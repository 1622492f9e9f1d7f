"""All Llama-style decoder layers in one launch for few decodes: `layer_stack_cuda/`.

A step of few rows runs some 300 kernels of 2-3 µs, a third of it for reading weights. Here one thread block
stays on each multiprocessor for all layers. Its warps own rows of every weight and prefetch them into shared memory as
far as that has room, even while the blocks wait; a grid barrier separates the parts of a layer, since each part's input
comes from all blocks::

    input norm, q k v | q and k norm, rotary, KV write, attention | merge, o, sum | norm, gate up | down, sum |
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_float, c_int, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels import nvrtc

NUM_ROWS = (4,)  # supported numbers of rows, padding included
_WARPS = 8
_MAX_SPLITS = 32  # of a decode's context
_SPLIT_TOKENS = 64  # fewest tokens of a split
_MAX_SLOTS = 6  # pieces of 1024 elements per warp; more leave too little L1 cache for K and V
_PIECES = (1024, 512, 256)
_OWN_BYTES = 4096  # of shared memory
# Largest weights of a layer. Measured at 31 MB; for much larger ones separate kernels are faster than the 2.9 TB/s (one
# row) to 1.4 TB/s (four rows) of these products.
_MAX_LAYER_BYTES = 48 * 2**20
_MAX_GROUPS = 8  # query heads per KV head, limited by registers
_SOURCES = Path(__file__).with_name("layer_stack_cuda")


class StackSizes(NamedTuple):
    """Sizes of the layers, equal for all."""

    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    @property
    def piece(self) -> int:
        """Elements per fetch of a weight's row; 0 if no size divides all rows."""
        rows = self.hidden, self.inner, self.num_heads * self.head_dim
        return next((size for size in _PIECES if all(depth % size == 0 for depth in rows)), 0)

    @property
    def num_bytes(self) -> int:
        """Bytes of a layer's weights."""
        heads = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        return 2 * self.hidden * (heads + 3 * self.inner)

    def shared_bytes(self, num_rows: int, slots: int) -> int:
        deepest = max(self.hidden, self.inner, self.num_heads * self.head_dim)
        groups = self.num_heads // self.num_kv_heads
        attention = groups * _WARPS * (self.head_dim + 2) * 4
        return _WARPS * slots * (2 * self.piece + 16) + num_rows * deepest * 2 + attention

    def slots(self, num_rows: int, available: int) -> int:
        """Pieces per warp that fit into `available` bytes of shared memory, besides the kernel's variables."""
        most = _MAX_SLOTS * _PIECES[0] // self.piece
        return next((n for n in range(most, 0, -1) if self.shared_bytes(num_rows, n) <= available - _OWN_BYTES), 0)


class LayerWeights(NamedTuple):
    """One layer's bfloat16 tensors in the kernel's order: weights [num_outputs, depth], norms, biases, caches.

    keys, values: [num_slots, num_kv_heads, head_dim].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None
    keys: Tensor
    values: Tensor
    epsilons: tuple[float, float, float, float]  # of the four norms


class _LayerStruct(ctypes.Structure):
    _fields_ = [*((name, c_void_p) for name in LayerWeights._fields[:-1]), ("epsilons", c_double * 4)]


def _struct(layer: LayerWeights) -> _LayerStruct:
    addresses = (None if part is None else part.data_ptr() for part in layer[:-1])
    return _LayerStruct(*addresses, (c_double * 4)(*layer.epsilons))


class _StepStruct(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in (
            "layers", "input", "cosines", "sines", "output", "positions", "slots", "tables", "table_starts", "counts",
            "qkv", "hidden", "middle", "inner", "partial", "sums", "counter",
        )),
        ("scaling", c_float),
        ("num_layers", c_int),
    ]  # fmt: skip


class DecodeRows(NamedTuple):
    """Positions, slots and block tables of a step's rows, on the device; see `StepTables`.

    positions, slot_mapping: [num_rows] int64.
    tables: the block tables, int32, concatenated.
    table_starts, block_counts: [num_rows] int32; padding, of no blocks, comes last.
    """

    positions: Tensor
    slot_mapping: Tensor
    tables: Tensor
    table_starts: Tensor
    block_counts: Tensor


def why_not(sizes: StackSizes, dtype: torch.dtype, device: torch.device) -> str | None:
    """The reason why layers of these sizes are unsupported; None if they are supported."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 9:
        return "the GPU copies no weights by itself (sm_90 and later do)"
    if dtype != torch.bfloat16:
        return f"their weights are {dtype}, not bfloat16"
    if not nvrtc.is_available():
        return "there is no libnvrtc to compile CUDA C++"
    if sizes.piece == 0 or sizes.head_dim not in (64, 128, 256):
        return f"of the sizes {sizes} one is not a multiple of 256, or heads are not of 64, 128 or 256"
    if sizes.num_bytes > _MAX_LAYER_BYTES:
        return f"their weights of {sizes.num_bytes / 2**20:.0f} MiB a layer are read faster one by one"
    if sizes.num_heads > _MAX_GROUPS * sizes.num_kv_heads:
        return f"more than {_MAX_GROUPS} query heads share a KV head"
    properties: Any = torch.cuda.get_device_properties(device)
    if sizes.hidden > 32 // NUM_ROWS[-1] * _WARPS * properties.multi_processor_count:
        return f"{sizes.hidden} hidden states are too many for {properties.multi_processor_count} multiprocessors"
    available = properties.shared_memory_per_block_optin
    if sizes.slots(NUM_ROWS[-1], available) * sizes.piece < 4096:
        return f"shared memory of {available} bytes does not hold their inputs beside weights"
    return None


class LayerStack:
    """The layers of one engine.

    Args:
        layers: in order; `why_not` must be None for their sizes.
        scaling: of the attention scores.
    """

    def __init__(self, layers: Sequence[LayerWeights], sizes: StackSizes, scaling: float, device: torch.device) -> None:
        self._layers = layers  # keeps the targets of the pointers alive
        self._sizes, self._scaling, self._device = sizes, scaling, device
        self._properties: Any = torch.cuda.get_device_properties(device)
        structs = (_LayerStruct * len(layers))(*map(_struct, layers))
        rows, heads = NUM_ROWS[-1], sizes.num_heads
        splits = rows * heads * max(1, min(_MAX_SPLITS, self._properties.multi_processor_count // sizes.num_kv_heads))

        def space(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        with torch.inference_mode(False), torch.cuda.device(device):
            self._table = torch.frombuffer(bytearray(structs), dtype=torch.int64).to(device)
            qkv = (heads + 2 * sizes.num_kv_heads) * sizes.head_dim
            self._spaces = [space(rows, size) for size in (qkv, sizes.hidden, sizes.hidden, sizes.inner)]
            self._spaces += [space(splits, size, dtype=torch.float32) for size in (sizes.head_dim, 2)]
            self._spaces.append(space(4, dtype=torch.int32))
            self._functions = {num_rows: self._function(num_rows) for num_rows in NUM_ROWS}

    def _function(self, num_rows: int) -> nvrtc.CudaFunction:
        sizes, first = self._sizes, self._layers[0]
        has_norms, has_biases = first.q_norm is not None, first.q_bias is not None
        code = machine_code(sizes, num_rows, self._device, has_norms=has_norms, has_biases=has_biases)
        shared_bytes = sizes.shared_bytes(num_rows, _slots(sizes, num_rows, self._device))
        return nvrtc.CudaFunction(code, "layer_stack", num_threads=32 * (_WARPS + 1), shared_bytes=shared_bytes)

    def run(
        self, hidden: Tensor, cosines: Tensor, sines: Tensor, rows: DecodeRows, *, first: int = 0, count: int = 0
    ) -> Tensor:
        """The layers' output [num_rows, hidden]; writes the rows' K and V.

        Args:
            hidden: [num_rows, hidden], num_rows one of NUM_ROWS.
            cosines, sines: [num_rows, head_dim].
            first, count: range of layers to run; all by default.
        """
        given = [part.contiguous() for part in (hidden, cosines, sines)]
        output = torch.zeros_like(given[0])  # some padding rows are not computed
        step = _StepStruct(
            self._table.data_ptr() + first * ctypes.sizeof(_LayerStruct),
            *(part.data_ptr() for part in (*given, output, *rows, *self._spaces)),
            self._scaling, count or len(self._layers),
        )  # fmt: skip
        with torch.cuda.device(self._device):
            self._functions[len(hidden)].launch_at_once(self._properties.multi_processor_count, step)
        return output


def source_text() -> str:
    """The kernel's source files, concatenated."""
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(_SOURCES.glob("[0-9]*")))


def _slots(sizes: StackSizes, num_rows: int, device: torch.device) -> int:
    properties: Any = torch.cuda.get_device_properties(device)
    return sizes.slots(num_rows, properties.shared_memory_per_block_optin)


@cache
def machine_code(sizes: StackSizes, num_rows: int, device: torch.device, *, has_norms: bool, has_biases: bool) -> bytes:
    """Machine code of the kernel for steps of `num_rows`; compilation takes four seconds."""
    major, minor = torch.cuda.get_device_capability(device)
    definitions = {
        "HIDDEN": sizes.hidden, "INNER": sizes.inner, "HEADS": sizes.num_heads, "KV_HEADS": sizes.num_kv_heads,
        "HEAD_DIM": sizes.head_dim, "BLOCK_SIZE": sizes.block_size, "PIECE": sizes.piece, "ROWS": num_rows,
        "SLOTS": _slots(sizes, num_rows, device), "HAS_NORMS": int(has_norms), "HAS_BIAS": int(has_biases),
        "SPLIT": _SPLIT_TOKENS,
    }  # fmt: skip
    return nvrtc.compile_source(source_text(), f"sm_{major}{minor}", definitions)
