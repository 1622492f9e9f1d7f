"""All Llama-style decoder layers in one launch for few decodes: `layer_stack_cuda/`.

A step of few rows runs some 300 kernels of 2-3 µs, a third of it for reading weights. Here one thread block
stays on each multiprocessor for all layers and owns rows of every weight. A separate warp prefetches them into shared
memory, also while the block waits for inputs from the others. Blocks exchange words that carry their layer's number, so
a part of a layer starts when its inputs are there, without barriers::

    input norm, q k v | q and k norm, rotary, KV write, attention | merge | o, sum | norm, gate up | down, sum |

The products are by matrix instructions with a weight's rows as their first operand: 1 to 8 decodes cost the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import c_double, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.fast.kernels import nvrtc
from nanovllm.fast.kernels.token_steps import (  # fmt: skip
    NOTHING_PACKED,
    PACKED_BYTES,
    SPACES,
    STEP_INPUTS,
    PackedInputs,
    StepStruct,
    StepWeights,
    TokenStep,
)

NUM_ROWS = (4, 8)  # numbers of rows that are compiled, padding included
TUNING = {
    "SPLIT": 128,  # tokens of a split of a decode's context
    "ALONE": 256,  # tokens of a context that is not split
    "FLIGHT": 0,  # slots of weights in flight at once; more delay reads between blocks. 0: by the layers' size
    "HEAD_FLIGHT": 4,  # the same while the head is read
    "PATIENCE": 0,  # reads before a wait traps, for tests; 0: never
}
_WARPS = 8
_MAX_SPLITS = 32  # most splits of a decode's context
_MAX_SLOT_BYTES = 176_000  # more leave too little L1 cache for K and V
_PIECES = (1024, 512, 256)
_OWN_BYTES = 8192  # bytes of static shared memory
# Largest weights of a layer: a gain at 31 and 122 MB; 386 MB are read faster between two attentions at a time
# (`dense_layer.py`).
MAX_LAYER_BYTES = 128 * 2**20
_LARGE_BYTES = 48 * 2**20  # weights of a layer from which on two slots are in flight
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
    def qkv(self) -> int:
        """Outputs of the first product."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def num_bytes(self) -> int:
        """Bytes of a layer's weights."""
        heads = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        return 2 * self.hidden * (heads + 3 * self.inner)

    def num_blocks(self, available: int) -> int:
        """Blocks of a launch on `available` multiprocessors: each owns two rows or more of every weight."""
        return min(available, self.hidden // 2, self.inner // 2, self.qkv // 2)

    def shared_bytes(self, num_blocks: int, slots: int) -> int:
        rows = ((self.hidden, 16), (self.qkv, 16), (self.inner, 8))  # (rows of a weight, rows of a tile)
        tiles = max(-(-2 * -(-count // 2 // num_blocks) // size) for count, size in rows)
        groups = self.num_heads // self.num_kv_heads
        of_head = _WARPS * (self.head_dim + 4) + self.head_dim // 2 + 16
        part = max(min(tiles, 4) * _WARPS * 128, groups * of_head + self.head_dim)
        return slots * (8 * (2 * self.piece + 64) + 16) + 2 * 4 * part

    def slots(self, num_blocks: int, available: int) -> int:
        """Slots of 8 pieces that fit into `available` bytes of shared memory, besides the kernel's variables."""
        most = _MAX_SLOT_BYTES // (16 * self.piece)
        return next((n for n in range(most, 0, -1) if self.shared_bytes(num_blocks, n) <= available - _OWN_BYTES), 0)


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
    epsilons: tuple[float, float, float, float]  # epsilons of the input, post-attention, q and k norms


class _LayerStruct(ctypes.Structure):
    _fields_ = [*((name, c_void_p) for name in LayerWeights._fields[:-1]), ("epsilons", c_double * 4)]


def _struct(layer: LayerWeights) -> _LayerStruct:
    addresses = (None if part is None else part.data_ptr() for part in layer[:-1])
    return _LayerStruct(*addresses, (c_double * 4)(*layer.epsilons))


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
    if sizes.num_bytes > MAX_LAYER_BYTES:
        return f"their weights of {sizes.num_bytes / 2**20:.0f} MiB a layer are read faster a layer at a time"
    if sizes.num_heads > _MAX_GROUPS * sizes.num_kv_heads:
        return f"more than {_MAX_GROUPS} query heads share a KV head"
    properties: Any = torch.cuda.get_device_properties(device)
    num_blocks = sizes.num_blocks(properties.multi_processor_count)
    if sizes.hidden > 64 * num_blocks:
        return f"{sizes.hidden} hidden states are too many for {num_blocks} multiprocessors"
    available = properties.shared_memory_per_block_optin
    if sizes.slots(num_blocks, available) < 4:
        return f"shared memory of {available} bytes does not hold enough of their weights"
    return None


class LayerStack:
    """The layers of one engine.

    Args:
        layers: weights of the layers in order; `why_not` must be None for their sizes.
        scaling: factor of the attention scores.
    """

    def __init__(self, layers: Sequence[LayerWeights], sizes: StackSizes, scaling: float, device: torch.device) -> None:
        self._layers = layers  # keeps the targets of the pointers alive
        self._sizes = sizes
        self._scaling = scaling
        self._device = device
        structs = (_LayerStruct * len(layers))(*map(_struct, layers))
        self._num_blocks = _num_blocks(sizes, device)
        rows = NUM_ROWS[-1]
        query = sizes.num_heads * sizes.head_dim
        splits = max(1, min(_MAX_SPLITS, self._num_blocks // sizes.num_kv_heads))
        counts = sizes.qkv, query, sizes.hidden, sizes.inner, sizes.hidden
        partial = splits * sizes.num_heads * (sizes.head_dim + 2)
        with torch.inference_mode(False), torch.cuda.device(device):
            self._table = torch.frombuffer(bytearray(structs), dtype=torch.int64).to(device)
            self._spaces = {
                name: torch.zeros(rows, count, dtype=torch.int64, device=device)
                for name, count in zip(SPACES, (*(count // 2 for count in counts), partial, 1), strict=True)
            }
            self._best = torch.zeros(rows, 2 * self._num_blocks, dtype=torch.int64, device=device)
            self._function = self._load()

    def _load(self) -> nvrtc.CudaFunction:
        sizes = self._sizes
        first = self._layers[0]
        has_norms = first.q_norm is not None
        has_biases = first.q_bias is not None
        code = machine_code(sizes, self._device, has_norms=has_norms, has_biases=has_biases)
        shared_bytes = sizes.shared_bytes(self._num_blocks, _slots(sizes, self._device))
        return nvrtc.CudaFunction(code, "layer_stack", num_threads=32 * (_WARPS + 1), shared_bytes=shared_bytes)

    def run(
        self, hidden: Tensor, cosines: Tensor, sines: Tensor, rows: DecodeRows, *, first: int = 0, count: int = 0
    ) -> Tensor:
        """The layers' output [num_rows, hidden], 0 for padding; writes the rows' K and V.

        Args:
            hidden: [num_rows, hidden], num_rows one of NUM_ROWS.
            cosines, sines: [num_rows, head_dim].
            first, count: range of layers to run; all by default.
        """
        given = [part.contiguous() for part in (hidden, cosines, sines)]
        output = torch.empty_like(given[0])
        names = "positions", "slots", "tables", "table_starts", "counts", "input", "cosines", "sines"
        step = StepStruct.of(
            layers=self._table, scaling=self._scaling, num_layers=count or len(self._layers), num_rows=len(hidden),
            output=output, **dict(zip(names, (*rows, *given), strict=True)), **self._spaces,
        )  # fmt: skip
        step.layers += first * ctypes.sizeof(_LayerStruct)
        self._launch(step, NOTHING_PACKED)
        return output

    def token_step(
        self, weights: StepWeights, inputs: Mapping[str, Tensor | int], num_rows: int, sampled: Tensor, *,
        non_finite: int, gamma: int, logits: Tensor | None = None,
    ) -> TokenStep:  # fmt: skip
        """Steps from tokens to tokens, of `num_rows` rows, padding included.

        Args:
            inputs: tensors by the names of STEP_INPUTS; those of `DrawTensors` have one sample for each row that is not
                padding. All are on the device, or all are offsets in `TokenStep.packed`.
            sampled: [most samples] int64, tokens of the step before, replaced by those of this one. A negative token id
                -1 - i is the i-th.
            non_finite, gamma: arguments of `gumbel_draw.draw_on_gpu`.
            logits: [num_rows, vocab_size] bfloat16, to be written.
        """
        step = StepStruct.of(
            layers=self._table, scaling=self._scaling, num_layers=len(self._layers), num_rows=num_rows,
            embedding=weights.embedding, norm=weights.norm, head=weights.head, cosines=weights.cosines,
            sines=weights.sines, norm_epsilon=weights.epsilon, vocab_size=weights.vocab_size, sampled=sampled,
            num_sampled=len(sampled), best=self._best, logits=logits, non_finite=non_finite, gamma=gamma,
            is_packed=int(isinstance(inputs["tables"], int)),
            **{STEP_INPUTS[name]: part for name, part in inputs.items()}, **self._spaces,
        )  # fmt: skip
        return TokenStep(self._launch, step, (weights, inputs, sampled, logits))

    def _launch(self, step: StepStruct, packed: PackedInputs) -> None:
        with torch.cuda.device(self._device):
            self._function.launch_at_once(self._num_blocks, step, packed)


def source_text() -> str:
    """The kernel's source files, concatenated."""
    return nvrtc.joined_sources(nvrtc.BFLOAT16, *sorted(_SOURCES.glob("[0-9]*")))


def _num_blocks(sizes: StackSizes, device: torch.device) -> int:
    properties: Any = torch.cuda.get_device_properties(device)
    return sizes.num_blocks(properties.multi_processor_count)


def _slots(sizes: StackSizes, device: torch.device) -> int:
    properties: Any = torch.cuda.get_device_properties(device)
    return sizes.slots(_num_blocks(sizes, device), properties.shared_memory_per_block_optin)


@cache
def machine_code(sizes: StackSizes, device: torch.device, *, has_norms: bool, has_biases: bool) -> bytes:
    """Machine code of the kernel, cached on disk; compilation takes four seconds."""
    major, minor = torch.cuda.get_device_capability(device)
    definitions = {
        "HIDDEN": sizes.hidden, "INNER": sizes.inner, "HEADS": sizes.num_heads, "KV_HEADS": sizes.num_kv_heads,
        "HEAD_DIM": sizes.head_dim, "BLOCK_SIZE": sizes.block_size, "PIECE": sizes.piece, "ROWS": NUM_ROWS[-1],
        "SLOTS": _slots(sizes, device), "GRID": _num_blocks(sizes, device), "PACKED_BYTES": PACKED_BYTES,
        "HAS_NORMS": int(has_norms), "HAS_BIAS": int(has_biases), **TUNING,
        "FLIGHT": TUNING["FLIGHT"] or (1 if sizes.num_bytes < _LARGE_BYTES else 2),
    }  # fmt: skip
    return nvrtc.compile_source(source_text(), f"sm_{major}{minor}", definitions)
