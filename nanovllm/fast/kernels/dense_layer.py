"""One launch from one layer's attention to the next one's on Hopper, for up to 128 rows: `dense_layer_cuda/`.

Separate kernels take longer to start and end than to read a small layer's weights. Here one thread block stays on each
multiprocessor, and fetches weights of the next product while it waits for the inputs of this one, and those of a large
layer's first product while attention ends::

    output product, sum | norm, gate up, SiLU | down product, sum | norm, q k v, norms, rotary, KV write
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.fast.kernels import nvrtc

NUM_ROWS = (16, 32, 64, 128)  # numbers of rows that are compiled; fewer rows run as the next of them
TUNING = {"PATIENCE": 0}  # reads before a wait traps, for tests; 0: never
# Largest weights of a layer that an engine runs by it. A gain at 31, 201 and 386 MB; more is not measured.
MAX_LAYER_BYTES = 512 * 2**20
_LARGE_BYTES = 128 * 2**20  # bytes of a layer's weights above which it counts as large
_MOST_ROWS_OF_LARGE = 64  # cuBLAS is faster with 128 rows
_FLIGHT_OF_LARGE = 4
_THREADS = 384
_PANEL = 64  # elements of a box of the copy engine: 128 bytes, the swizzle's width
_STEP = 2 * _PANEL
_MOST_COLUMNS = 128  # rows of the batch in one product
_WEIGHT_BYTES = 2 * 64 * _PANEL * 2  # bytes of a slot for weights
_MAX_SPLITS = 8  # MEETING_ROUND of the source
_MAX_SLICES = 16  # most SLICES of the source
_MOST_BLOCKS = 256
_MOST_INPUT_BYTES = 112 * 1024  # most bytes of all slots for inputs
_ALIGNMENT = 1024  # bytes of shared memory
_BARRIER_BYTES = 512
_SOURCES = Path(__file__).with_name("dense_layer_cuda")
_HOPPER = Path(__file__).with_name("prompt_attention_cuda") / "1_hopper.h"
_BF16 = 9
_SWIZZLE_128_BYTES = 3
_L2_PROMOTION_256_BYTES = 3


class DenseSizes(NamedTuple):
    """Sizes of the layers, equal for all."""

    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def query(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def qkv(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def num_bytes(self) -> int:
        """Bytes of a layer's weights."""
        return 2 * self.hidden * (self.query + self.qkv + 3 * self.inner)


class DenseWeights(NamedTuple):
    """The bfloat16 tensors between a layer's attention and the next one's.

    output: [hidden, query]; gate_up: [2 * inner, hidden], gate first; down: [hidden, inner].
    qkv, next_norm, q_norm, k_norm, bias ([qkv]), keys, values ([num_slots, num_kv_heads, head_dim]): the next layer's,
        None after the last layer; q_norm, k_norm and bias also where layers have none.
    epsilons: epsilon of each norm, in the order post_norm, next_norm, q_norm, k_norm.
    """

    output: Tensor
    gate_up: Tensor
    down: Tensor
    post_norm: Tensor
    qkv: Tensor | None
    next_norm: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    bias: Tensor | None
    keys: Tensor | None
    values: Tensor | None
    epsilons: tuple[float, float, float, float]


class StepAdapters(NamedTuple):
    """Adapters of a step's rows, of the classes in `adapted_layers.py`.

    factors: `Factors` of the output, gate and up, down, and next q k v products; None for one that no adapter changes.
    rows: `RowsBySlot`.
    """

    factors: Sequence[Any]
    rows: Any


class _TensorMap(ctypes.Structure):
    _fields_ = [("opaque", ctypes.c_uint64 * 16)]


_MAPS = "attended", "output_weight", "middle", "gate_weight", "inner", "down_weight", "next", "next_weight"
_POINTERS = (
    "residual", "post_norm", "next_norm", "q_norm", "k_norm", "bias", "cosines", "sines", "slots", "middle_rows",
    "middle_scaled", "inner_rows", "next_rows", "next_scaled", "query", "keys", "values", "partial", "middle_squares",
    "next_squares", "passed", "exchanged",
)  # fmt: skip


class _LowRankStruct(ctypes.Structure):
    _fields_ = [("down", c_void_p), ("up", c_void_p), ("rank", c_int)]


class _LayerStruct(ctypes.Structure):
    _fields_ = [
        *((name, _TensorMap) for name in _MAPS),
        *((name, c_void_p) for name in _POINTERS),
        ("epsilons", c_float * 4),
        ("num_rows", c_int),
        ("has_next", c_int),
        ("low_rank", _LowRankStruct * 4),
        *((name, c_void_p) for name in ("attended_rows", "row_slots", "order", "starts", "shrunk")),
        ("num_slots", c_int),
        ("padding", c_int * 11),  # rounds the size up to the alignment of the maps, as in C++
    ]


def why_not(sizes: DenseSizes, dtype: torch.dtype, device: torch.device) -> str | None:
    """The reason why layers of these sizes are unsupported; None if they are supported."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return "the GPU is not of compute capability 9 (Hopper)"
    if dtype != torch.bfloat16:
        return f"their weights are {dtype}, not bfloat16"
    if not nvrtc.is_available():
        return "there is no libnvrtc to compile CUDA C++"
    if sizes.head_dim not in (64, 128):
        return f"heads are of {sizes.head_dim} elements, not 64 or 128"
    if any(size % _STEP for size in (sizes.hidden, sizes.inner, sizes.query, sizes.qkv)):
        return f"of the sizes {sizes} one is not a multiple of {_STEP}"
    return None


def compiled_rows(sizes: DenseSizes) -> tuple[int, ...]:
    """The sizes of NUM_ROWS for which the kernel is faster than a layer's products one by one."""
    most = _MOST_ROWS_OF_LARGE if sizes.num_bytes > _LARGE_BYTES else NUM_ROWS[-1]
    return tuple(size for size in NUM_ROWS if size <= most)


class Plan(NamedTuple):
    """Division of the products into items, for one number of rows; see `dense_layer_cuda/1_parts.h`."""

    output_splits: int
    down_splits: int
    qkv_splits: int
    gate_blocks: int
    weight_slots: int
    input_slots: int

    @staticmethod
    def of(sizes: DenseSizes, num_rows: int, *, num_processors: int, shared_bytes: int) -> Plan:
        columns = min(num_rows, _MOST_COLUMNS)
        tiles = num_rows // columns

        def rounds(items: int) -> int:
            return -(-items // num_processors)

        def splits(features: int, depth: int, width: int) -> int:
            """Most splits with at most one item a block, of equal depths unless far fewer blocks would have one."""
            items = features // width * tiles
            steps = depth // _STEP
            fit = [n for n in range(1, min(_MAX_SPLITS, steps) + 1) if n == 1 or n * items <= num_processors]
            fit = [n for n in fit if tiles == 1 or columns % n == 0]
            equal = max(n for n in fit if steps % n == 0 and columns % n == 0)
            return fit[-1] if 2 * fit[-1] >= 3 * equal else equal

        gates = 2 * sizes.inner // 64 * tiles
        input_bytes = columns * _STEP * 2
        input_slots = min(8, _MOST_INPUT_BYTES // input_bytes)
        own_bytes = _ALIGNMENT + _BARRIER_BYTES + 8 * num_rows
        weight_slots = (shared_bytes - own_bytes - input_slots * input_bytes) // _WEIGHT_BYTES
        return Plan(
            splits(sizes.hidden, sizes.query, 64),
            splits(sizes.hidden, sizes.inner, 64),
            splits(sizes.qkv, sizes.hidden, 128),
            1 if rounds(gates) < 2 * rounds(gates // 2) else 2,
            weight_slots,
            input_slots,
        )

    def shared_bytes(self, num_rows: int) -> int:
        input_bytes = min(num_rows, _MOST_COLUMNS) * _STEP * 2
        return _ALIGNMENT + self.weight_slots * _WEIGHT_BYTES + self.input_slots * input_bytes


class DenseLayers:
    """The kernel for one number of rows and its workspace, for all layers of one engine.

    Args:
        sizes: `why_not` must be None for them.
        num_rows: one of NUM_ROWS, the most rows of a step.
        has_norms: True if the heads of q and k are normalised.
        has_bias: True if q, k and v have biases.
    """

    def __init__(
        self, sizes: DenseSizes, device: torch.device, num_rows: int, *, has_norms: bool, has_bias: bool
    ) -> None:
        self.sizes = sizes
        self._device = device
        self.num_rows = num_rows
        code = machine_code(sizes, device, num_rows, has_norms=has_norms, has_bias=has_bias)
        self._num_blocks, plan = _plan(sizes, device, num_rows)
        self._starts_early, self._has_run = sizes.num_bytes > _LARGE_BYTES, False  # a gain there; less is not measured
        self._structs: dict[int, tuple[tuple[Any, ...], _LayerStruct]] = {}  # (weight addresses, struct) by layer

        def space(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        hidden = sizes.hidden
        parts = max(plan.output_splits, plan.down_splits)
        sums = num_rows * max(hidden * parts, sizes.qkv * plan.qkv_splits)
        with torch.inference_mode(False), torch.cuda.device(device):
            self._function, self._adapted = (
                nvrtc.CudaFunction(code, name, num_threads=_THREADS, shared_bytes=plan.shared_bytes(num_rows))
                for name in ("dense_layer", "adapted_dense_layer")
            )
            self._rows = {
                "middle_rows": space(num_rows, hidden),
                "middle_scaled": space(num_rows, hidden),
                "inner_rows": space(num_rows, sizes.inner),
                "next_scaled": space(num_rows, hidden),
                "partial": space(sums, dtype=torch.float32),
                "middle_squares": space(hidden // 64, num_rows, dtype=torch.float32),
                "next_squares": space(hidden // 64, num_rows, dtype=torch.float32),
                "passed": space(8, dtype=torch.int32),
                "exchanged": space((2 * hidden // 64 + sizes.qkv // 128) * num_rows, dtype=torch.int32),
            }

    def _struct(self, index: int, layer: DenseWeights) -> _LayerStruct:
        """A copy of the layer's arguments; they are described again if its weights have moved."""
        addresses = tuple(part.data_ptr() if isinstance(part, Tensor) else part for part in layer)
        known = self._structs.get(index)
        if known is None or known[0] != addresses:
            self._structs[index] = known = addresses, self._describe(layer)
        return _LayerStruct.from_buffer_copy(known[1])

    def _describe(self, layer: DenseWeights) -> _LayerStruct:
        rows = self._rows
        columns = min(self.num_rows, _MOST_COLUMNS)
        struct = _LayerStruct(
            output_weight=_map(layer.output, 64), middle=_map(rows["middle_scaled"], columns),
            gate_weight=_gate_map(layer.gate_up), inner=_map(rows["inner_rows"], columns),
            down_weight=_map(layer.down, 64), next=_map(rows["next_scaled"], columns),
            next_weight=_TensorMap() if layer.qkv is None else _map(layer.qkv, 64),
            epsilons=(c_float * 4)(*layer.epsilons), has_next=int(layer.qkv is not None),
        )  # fmt: skip
        named = {name: getattr(layer, name) for name in _POINTERS if hasattr(layer, name)} | rows
        for name, tensor in named.items():
            setattr(struct, name, None if tensor is None else tensor.data_ptr())
        return struct

    def run(
        self,
        index: int,
        layer: DenseWeights,
        attended: Tensor,
        residual: Tensor,
        turns: tuple[Tensor, Tensor],
        slots: Tensor,
        adapters: StepAdapters | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The output of layer `index` [rows, hidden], and the next layer's queries [rows, query].

        Writes the next layer's K and V. After the last layer the queries are undefined.

        Args:
            attended: output of the layer's attention, [rows, query].
            residual: the layer's input [rows, hidden].
            turns: cosines and sines [rows, head_dim].
            slots: [rows] int64.
        """
        attended, residual, cosines, sines, slots = (part.contiguous() for part in (attended, residual, *turns, slots))
        struct = self._struct(index, layer)
        output = torch.empty_like(residual)
        query = attended.new_empty(len(attended), self.sizes.query)
        struct.attended = _map(attended, min(self.num_rows, _MOST_COLUMNS))
        struct.num_rows = len(attended)
        given = {
            "residual": residual, "cosines": cosines, "sines": sines, "slots": slots, "next_rows": output,
            "query": query,
        }  # fmt: skip
        for name, tensor in given.items():
            setattr(struct, name, tensor.data_ptr())
        # Space that has to live until the launch.
        shrunk = None if adapters is None else self._add_adapters(struct, adapters, attended)
        with torch.cuda.device(self._device):
            # Blocks of an early launch start one by one, and meet all the same: kernels of one priority start in turn,
            # so none takes a multiprocessor from blocks still to come. Cooperative launches wait for the kernel before;
            # the first one is, since the driver refuses it if the blocks do not fit at once.
            is_early = self._starts_early and self._has_run and torch.cuda.current_stream().priority == 0
            function = self._function if adapters is None else self._adapted
            (function.launch_early if is_early else function.launch_at_once)(self._num_blocks, struct)
        self._has_run = True
        del shrunk
        return output, query

    def _add_adapters(self, struct: _LayerStruct, adapters: StepAdapters, attended: Tensor) -> Tensor:
        """Describe adapters to the kernel; returns space that it uses."""
        found = [factors for factors in adapters.factors if factors is not None]
        width = max((factors.down.shape[1] * factors.down.shape[2] for factors in found), default=0)
        space = attended.new_empty(_MAX_SLICES, self.num_rows, width, dtype=torch.float32)
        for own, factors in zip(struct.low_rank, adapters.factors, strict=True):
            if factors is not None:
                own.down, own.up, own.rank = factors.down.data_ptr(), factors.up.data_ptr(), factors.up.shape[1]
                struct.num_slots = len(factors.up)
        order, starts, row_slots = adapters.rows
        given = {"attended_rows": attended, "row_slots": row_slots, "order": order, "starts": starts, "shrunk": space}
        for name, tensor in given.items():
            setattr(struct, name, tensor.data_ptr())
        return space


def _map(tensor: Tensor, num_rows: int) -> _TensorMap:
    """A map of [rows, depth] for boxes of `num_rows` rows; rows outside are 0."""
    rows, depth = tensor.shape
    return _tensor_map(tensor, (depth, rows), (depth,), (_PANEL, num_rows))


def _gate_map(tensor: Tensor) -> _TensorMap:
    """A map of gate and up [2 * inner, depth] for boxes of 64 rows, eight of one and eight of the other in turn."""
    rows, depth = tensor.shape
    return _tensor_map(tensor, (depth, 8, 2, rows // 16), (depth, rows // 2 * depth, 8 * depth), (_PANEL, 8, 2, 4))


def _tensor_map(tensor: Tensor, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> _TensorMap:
    memory = ctypes.create_string_buffer(128 + 64)  # older Pythons do not align structures
    address = -(-ctypes.addressof(memory) // 64) * 64
    rank = len(sizes)
    nvrtc.check(
        nvrtc.driver().cuTensorMapEncodeTiled(
            c_void_p(address), _BF16, rank, c_void_p(tensor.data_ptr()), (c_uint64 * rank)(*sizes),
            (c_uint64 * (rank - 1))(*(2 * stride for stride in strides)), (c_uint32 * rank)(*box),
            (c_uint32 * rank)(*[1] * rank), 0, _SWIZZLE_128_BYTES, _L2_PROMOTION_256_BYTES, 0,
        ),
        f"describe a tensor of {tuple(tensor.shape)} to the copy engine",
    )  # fmt: skip
    return _TensorMap.from_buffer_copy(ctypes.string_at(address, 128))


def source_text() -> str:
    """The kernel's source files, concatenated."""
    return nvrtc.joined_sources(_HOPPER, nvrtc.BFLOAT16, *sorted(_SOURCES.glob("[0-9]*")))


def _plan(sizes: DenseSizes, device: torch.device, num_rows: int) -> tuple[int, Plan]:
    """Blocks of a launch, and the division of its products."""
    properties: Any = torch.cuda.get_device_properties(device)
    num_blocks: int = min(properties.multi_processor_count, _MOST_BLOCKS)
    shared_bytes: int = properties.shared_memory_per_block_optin
    return num_blocks, Plan.of(sizes, num_rows, num_processors=num_blocks, shared_bytes=shared_bytes)


@cache
def machine_code(sizes: DenseSizes, device: torch.device, num_rows: int, *, has_norms: bool, has_bias: bool) -> bytes:
    """Machine code of the kernel for up to `num_rows`, cached on disk; compilation takes seconds."""
    definitions = definitions_of(sizes, _plan(sizes, device, num_rows)[1], num_rows)
    options = {"HAS_NORMS": int(has_norms), "HAS_BIAS": int(has_bias)}
    return nvrtc.compile_source(source_text(), "sm_90a", definitions | options | TUNING)


def definitions_of(sizes: DenseSizes, plan: Plan, num_rows: int) -> dict[str, Any]:
    return {
        "TYPE": "bf16", "HIDDEN": sizes.hidden, "INNER": sizes.inner, "HEADS": sizes.num_heads,
        "KV_HEADS": sizes.num_kv_heads, "HEAD_DIM": sizes.head_dim, "ROWS": num_rows,
        "WEIGHT_SLOTS": plan.weight_slots, "INPUT_SLOTS": plan.input_slots, "O_SPLITS": plan.output_splits,
        "DOWN_SPLITS": plan.down_splits, "QKV_SPLITS": plan.qkv_splits, "GATE_BLOCKS": plan.gate_blocks,
        "FLIGHT": min(_FLIGHT_OF_LARGE, plan.weight_slots) if sizes.num_bytes > _LARGE_BYTES else plan.weight_slots,
    }  # fmt: skip
