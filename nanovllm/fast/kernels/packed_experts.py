"""Products of routed experts with packed weights of 4 or 8 bits on a GPU: `packed_rows_cuda/5_experts.cu`.

Up to `MAX_PAIRS` pairs of a row and one of its experts, the packed weight of each chosen expert is read once for all of
its rows, or once for each 24 of them. For more pairs experts are widened first, some at a time, for PyTorch's
`grouped_mm`; in float16, for which that reads the rows' numbers on the host, rows are taken in parts instead.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_float, c_int, c_void_p
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.fast.kernels import nvrtc, packed_rows
from nanovllm.fast.kernels.packed_rows import (
    CHUNK,
    TILE,
    Weights,
    chunk_bytes,
    function_of,
    memory_of_processor,
    num_processors,
    weights_of,
)

MAX_PAIRS = 4096
MAX_EXPERTS = 512
MAX_WIDTH = 16384  # inputs of a row, so that one fits into shared memory
HALF = TILE // 2  # outputs of a tile that are a gate's
_FEW_ROWS = 8
_FEW_PAIRS = 512  # most pairs of the kernel for few rows
_PAIRS_OF_EXPERT = 10  # most pairs an expert for which two groups of rows are faster than three
_SPLITS = (4, 8)  # warps of a tile in the kernel for few rows; in the other, one
_SLOT_BYTES = (3456, 2304)  # the most of a slot with up to two groups of rows and with more
_BLOCKS = (3, 2)  # blocks of a multiprocessor in the kernel for few rows, as memory allows; in the other, one
_OTHER_BYTES = 16 * 1024  # a block's shared memory without rings and rows, at most
_LEAST_SHARED_BYTES = 228 * 1024  # a multiprocessor's
_COMPARED_ROWS = (1, 7, 70)  # rows of a comparison: of each kernel, and of several parts of one
_SCRATCH_BYTES = 1 << 30  # bytes of experts that are widened at a time


class Experts(NamedTuple):
    """One projection of all experts.

    Attributes:
        codes: [experts, tiles, chunks, bytes], of `pack_codes`.
        scales, shifts: [experts, tiles, groups, 8, runs of a chunk, 2], of `pack_factors`.
        units: [experts, outputs] float32.
        bias: [experts, outputs].
        width: inputs.
        form: text of the weights' `Form`.
        gate: alpha, limit and addend of a gate that ends the product, or nothing: (up + addend) * gate *
            sigmoid(alpha * gate), with up from -limit to limit and gate up to it. Outputs of a tile are 8 gates, then
            the 8 that they multiply.
    """

    codes: Tensor
    scales: Tensor | None
    shifts: Tensor | None
    units: Tensor | None
    bias: Tensor | None
    width: int
    form: str
    gate: Sequence[float] = ()

    @property
    def outputs(self) -> int:
        """Outputs before the gate."""
        return self.codes.shape[1] * TILE

    @property
    def results(self) -> int:
        """Outputs after it."""
        return self.outputs // 2 if self.gate else self.outputs

    def part(self, start: int, stop: int) -> Weights:
        """Some experts, as the kernels take them."""
        tensors = (self.codes, self.scales, self.shifts, self.units)
        codes, scales, shifts, units = (None if each is None else each[start:stop].flatten(0, 1) for each in tensors)
        assert codes is not None
        return weights_of(codes, scales, shifts, units, self.outputs, self.width)


class _Call(ctypes.Structure):
    _fields_ = [
        ("weights", Weights), *((name, c_void_p) for name in ("states", "bias", "output", "ids", "slots")),
        *((name, c_int) for name in ("experts", "pairs", "top_k", "num_slots", "gathers", "most")),
        *((name, c_float) for name in ("alpha", "limit", "plus")),
    ]  # fmt: skip


def gated_order(gates: Tensor, ups: Tensor) -> Tensor:
    """Outputs in the order of `Experts.gate`: numbers of gates and of ups, multiples of 8."""
    return torch.stack((gates.view(-1, HALF), ups.view(-1, HALF)), dim=1).flatten()


def apply_gate(products: Tensor, gate: Sequence[float]) -> Tensor:
    """[..., outputs] in the order of `gated_order` -> [..., outputs / 2] in float32."""
    alpha, limit, addend = gate
    gates, ups = products.float().unflatten(-1, (-1, 2, HALF)).unbind(-2)
    gates = gates.clamp(max=limit)
    return ((ups.clamp(-limit, limit) + addend) * gates * torch.sigmoid(alpha * gates)).flatten(-2)


def why_not_experts(num_experts: int, outputs: int, width: int, device: torch.device) -> str | None:
    """Why experts of these sizes have no kernel on a device; None if they have."""
    if device.type == "cuda" and memory_of_processor(device) < _LEAST_SHARED_BYTES:
        return f"{torch.cuda.get_device_name(device)} has too little shared memory"
    if outputs % TILE or width % TILE:
        return f"{outputs} x {width} weights are not multiples of {TILE}"
    if width > MAX_WIDTH:
        return f"{width} inputs are more than {MAX_WIDTH}"
    return f"{num_experts} experts are more than {MAX_EXPERTS}" if num_experts > MAX_EXPERTS else None


class _Plan(NamedTuple):
    """Constants of a kernel.

    Attributes:
        warps: number in a block.
        blocks: number on a multiprocessor.
        split: warps that share a tile.
        groups: number of 8 rows each, for which a weight is widened once.
        chunks: number in a slot.
        pairs: the most.
        slots: number in a warp's ring.
    """

    warps: int
    blocks: int
    split: int
    groups: int
    chunks: int
    pairs: int
    slots: int = 2

    def ring_bytes(self, form: str) -> int:
        """A block's shared memory for weights."""
        return self.warps * self.slots * self.chunks * chunk_bytes(form)

    def row_bytes(self, form: str, device: torch.device) -> int:
        """A block's shared memory for rows."""
        return memory_of_processor(device) // self.blocks - _OTHER_BYTES - self.ring_bytes(form)


def _few(form: str, blocks: int, split: int) -> _Plan:
    return _Plan(8, blocks, split, 1, max(1, _SLOT_BYTES[0] // chunk_bytes(form)), _FEW_PAIRS)


def _more(form: str, groups: int) -> _Plan:
    of_slot = _SLOT_BYTES[groups > 2] // chunk_bytes(form)
    return _Plan(12 if groups == 2 else 16, 1, 1, groups, max(1, of_slot), MAX_PAIRS)


@cache
def _kernel(form: str, is_gated: bool, plan: _Plan, device: torch.device) -> nvrtc.CudaFunction:
    own = {
        "WARPS": plan.warps, "BLOCKS": plan.blocks, "SPLIT": plan.split, "GROUPS": plan.groups, "SLOTS": plan.slots,
        "CHUNKS": plan.chunks, "GATED": int(is_gated), "MAX_PAIRS": plan.pairs, "MAX_EXPERTS": MAX_EXPERTS,
    }  # fmt: skip
    shared = plan.row_bytes(form, device) + plan.ring_bytes(form)
    return function_of("5_experts.cu", "packed_experts", form, own, device, 32 * plan.warps, shared)


def compile_kernels(experts: Experts, device: torch.device) -> None:
    """Make the kernels of a projection, which is not possible while a graph is captured."""
    plans = [_more(experts.form, 2), _more(experts.form, 3)]
    plans += [_few(experts.form, blocks, split) for blocks in _BLOCKS for split in _SPLITS]
    calls: list[Callable[[], object]] = [
        partial(_kernel, experts.form, bool(experts.gate), plan, device) for plan in plans
    ]
    calls.append(partial(packed_rows.widening, experts.form, device))
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda call: call(), calls))


def expert_products(
    rows: Tensor, expert_ids: Tensor, top_k: int, experts: Experts, slots: Tensor | None, *, gathers: bool
) -> Tensor:
    """The product of each pair's row with its expert's weight, [num_pairs, results], in the order of the pairs.

    Args:
        rows: [num_rows, width] where `gathers`, each the row of `top_k` consecutive pairs; else [num_pairs, width].
        expert_ids: [num_pairs] int64. Pairs of no expert get zeros.
        slots: int64, of the rows' K and V; 0 for padding, as are further rows. None if no row is padding.
    """
    rows = rows.contiguous()
    expert_ids = expert_ids.contiguous()
    if not rows.is_cuda or rows.dtype != packed_rows.dtype_of(experts.form):
        return _by_dequantised(rows, expert_ids, top_k, experts, gathers)
    with torch.cuda.device(rows.device):
        if len(expert_ids) > MAX_PAIRS and rows.dtype == torch.bfloat16:
            return _by_widened(rows, expert_ids, top_k, experts, gathers)
        output = rows.new_empty(len(expert_ids), experts.results)
        num_rows = MAX_PAIRS // top_k
        for start in range(0, len(expert_ids) // top_k, num_rows):
            pairs = slice(start * top_k, (start + num_rows) * top_k)
            own = rows[start : start + num_rows] if gathers else rows[pairs]
            _multiply(
                own, expert_ids[pairs], top_k, experts, None if slots is None else slots[start:], output[pairs], gathers
            )
    return output


def largest_distance(experts: Experts) -> float:
    """Largest relative error of a row's products, of steps of few and of more rows from the dequantised weights'."""
    num_experts, device = len(experts.codes), experts.codes.device
    generator = torch.Generator(device).manual_seed(0)
    worst = 0.0
    for num_rows in _COMPARED_ROWS:
        rows = torch.randn(num_rows, experts.width, generator=generator, device=device)
        rows = rows.to(packed_rows.dtype_of(experts.form))
        ids = torch.randint(num_experts, (num_rows,), generator=generator, device=device)
        own = expert_products(rows, ids, 1, experts, None, gathers=True).float()
        right = _by_dequantised(rows, ids, 1, experts, True).float()
        distances = (own - right).norm(dim=1) / right.norm(dim=1)
        worst = max(worst, distances.nan_to_num(math.inf).max().item())
    return worst


def _multiply(
    rows: Tensor, expert_ids: Tensor, top_k: int, experts: Experts, slots: Tensor | None, output: Tensor, gathers: bool
) -> None:
    """Write the products of up to `MAX_PAIRS` pairs."""
    device = rows.device
    num_experts = len(experts.codes)
    num_pairs = len(expert_ids)
    num_rows = num_pairs // top_k
    plan = plan_of(experts, num_rows, num_pairs, device)
    row_bytes = _row_bytes(experts.codes.shape[2])
    most = min(num_rows, 8 * plan.groups, plan.row_bytes(experts.form, device) // row_bytes)
    call = _Call(
        experts.part(0, num_experts), rows.data_ptr(), None if experts.bias is None else experts.bias.data_ptr(),
        output.data_ptr(), expert_ids.data_ptr(), None if slots is None else slots.data_ptr(), num_experts, num_pairs,
        top_k, 0 if slots is None else len(slots), gathers, most, *experts.gate,
    )  # fmt: skip
    num_blocks = num_processors(device) * plan.blocks
    kernel = _kernel(experts.form, bool(experts.gate), plan, device)
    kernel.launch_early(num_blocks, call, shared_bytes=plan.ring_bytes(experts.form) + most * row_bytes)


def plan_of(experts: Experts, num_rows: int, num_pairs: int, device: torch.device) -> _Plan:
    """The kernel of a step: of those for few rows, one that needs the fewest turns of a warp.

    Its tiles are counted as if each pair had an expert to itself.
    """
    form = experts.form
    num_experts, tiles, chunks, _ = experts.codes.shape
    if num_rows > _FEW_ROWS or num_pairs > _FEW_PAIRS:
        return _more(form, 2 if num_pairs <= _PAIRS_OF_EXPERT * num_experts else 3)
    fits = [n for n in _BLOCKS if num_rows * _row_bytes(chunks) <= _few(form, n, 1).row_bytes(form, device)]
    blocks = fits[0] if fits else _BLOCKS[-1]
    of_block = -(-min(num_pairs, num_experts) * tiles // (num_processors(device) * blocks))
    plans = [_few(form, blocks, split) for split in _SPLITS]
    return min(plans, key=lambda plan: -(-of_block * plan.split // plan.warps) * -(-chunks // plan.split))


def _row_bytes(chunks: int) -> int:
    """Bytes of a row in shared memory, without conflicts."""
    return 2 * chunks * CHUNK + 16


def _by_dequantised(rows: Tensor, expert_ids: Tensor, top_k: int, experts: Experts, gathers: bool) -> Tensor:
    """The reference for any device and dtype: experts are dequantised one after another, in float32."""
    output = rows.new_zeros(len(expert_ids), experts.results)
    for expert in range(len(experts.codes)):
        pairs = (expert_ids == expert).nonzero()[:, 0]
        if len(pairs) == 0:
            continue
        weight = _dequantised(experts, expert)
        bias = None if experts.bias is None else experts.bias[expert].float()
        products = F.linear(rows[pairs // top_k if gathers else pairs].float(), weight, bias)
        output[pairs] = (apply_gate(products, experts.gate) if experts.gate else products).to(rows.dtype)
    return output


def dequantised_experts(experts: Experts) -> Tensor:
    """[experts, outputs, width] float32, in the order of the tiles."""
    return torch.stack([_dequantised(experts, expert) for expert in range(len(experts.codes))])


def _dequantised(experts: Experts, expert: int) -> Tensor:
    scales, shifts, units = (
        None if each is None else each[expert] for each in (experts.scales, experts.shifts, experts.units)
    )
    return packed_rows.dequantised(
        experts.codes[expert], scales, shifts, units, experts.outputs, experts.width, experts.form
    )


def _widened(experts: Experts, start: int, stop: int) -> Tensor:
    """Plain weights of some experts, [experts, outputs, width]."""
    dtype = packed_rows.dtype_of(experts.form)
    weight = torch.empty(stop - start, experts.outputs, experts.width, dtype=dtype, device=experts.codes.device)
    _, tiles, chunks, _ = experts.codes.shape
    packed = experts.part(start, stop)
    packed.outputs *= stop - start
    widen = packed_rows.widening(experts.form, weight.device)
    widen.launch(-(-(stop - start) * tiles * chunks // 8), packed, c_void_p(weight.data_ptr()))
    return weight


def _by_widened(rows: Tensor, expert_ids: Tensor, top_k: int, experts: Experts, gathers: bool) -> Tensor:
    """Products of many pairs by PyTorch, in bfloat16. Nothing is read on the host."""
    from nanovllm.fast.kernels.expert_rows import sort_by_expert

    num_experts, num_pairs = len(experts.codes), len(expert_ids)
    order, ends = sort_by_expert(expert_ids, num_experts, top_k, None)
    output = rows.new_empty(num_pairs + 1, experts.results)  # the last is of pairs without an expert
    places = torch.arange(num_pairs, device=rows.device)
    at_once = max(1, _SCRATCH_BYTES // (2 * experts.outputs * experts.width))
    for start in range(0, num_experts, at_once):
        stop = min(start + at_once, num_experts)
        weight = _widened(experts, start, stop)
        before = ends[start - 1] if start else 0
        pairs = order[(places + before).clamp(max=num_pairs - 1)]
        products = F.grouped_mm(
            rows[pairs // top_k if gathers else pairs], weight.transpose(1, 2), offs=ends[start:stop] - before
        )
        if experts.bias is not None:
            products += experts.bias[expert_ids[pairs]]
        results = apply_gate(products, experts.gate).to(rows.dtype) if experts.gate else products
        output[torch.where(places + before < ends[stop - 1], pairs, num_pairs)] = results
    return output[:num_pairs]
