"""Structs for the C++ kernels: packed weights, norms and decoder layers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int64, c_void_p
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.fast.host.memory import HugePages

LANES = 16  # elements per vector of the kernels
PANEL = 2 * LANES  # adjacent outputs in a packed weight
TILE_ROWS = 16  # rows of a processor's matrix tile


class ProductStruct(ctypes.Structure):
    _fields_ = [
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("num_outputs", c_int64),
        ("depth", c_int64),
        ("panels", c_void_p),  # null if all are plain
    ]


class NormStruct(ctypes.Structure):
    _fields_ = [("weight", c_void_p), ("epsilon", c_float)]


_PARTS = 3  # most linear layers of a product


class LowRankStruct(ctypes.Structure):
    """Factors of one adapter for a product, by the product's linear layers; null pointers for none."""

    _fields_ = [("down", c_void_p * _PARTS), ("up", c_void_p * _PARTS), ("ranks", c_int64 * _PARTS)]


class AdapterRowsStruct(ctypes.Structure):
    """Slots [num_rows] int32 of a step's rows, or null, and memory [num_rows, parts, max_rank] of the dtype."""

    _fields_ = [("slots", c_void_p), ("shrunk", c_void_p), ("max_rank", c_int64)]


class LayerStruct(ctypes.Structure):
    _fields_ = [
        *((name, NormStruct) for name in ("input_norm", "post_attention_norm", "query_norm", "key_norm")),
        *((name, ProductStruct) for name in ("qkv", "attention_output", "gate_up", "down")),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("adapters", c_void_p),  # null without adapters
        ("low_rank", c_void_p * 4),  # `LowRankStruct`s of all slots, for each product
    ]


class StackedLayerStruct(ctypes.Structure):
    """A layer of a stack, with pointers to its K and V and the scale of its scores."""

    _fields_ = [("layer", c_void_p), ("key_cache", c_void_p), ("value_cache", c_void_p), ("scaling", c_float)]


class AttentionRowsStruct(ctypes.Structure):
    """Arguments of attention that are equal for all layers of a step, for both kernels (decodes and chunks)."""

    _fields_ = [
        *((name, c_void_p) for name in ("decode_tables", "contexts", "members", "group_starts", "shared")),
        *((name, c_int64) for name in ("num_decodes", "num_groups", "decode_width")),
        *((name, c_void_p) for name in ("chunk_tables", "first_rows", "starts", "counts")),
        *((name, c_int64) for name in ("num_chunks", "chunk_width", "page_size")),
    ]


class WorkspaceStruct(ctypes.Structure):
    """Buffers shared by all layers of an engine; see `fast/layers/fused_layers.py`."""

    _fields_ = [(name, c_void_p) for name in ("queries", "attended", "scratch", "even_output", "odd_output")]


# (bits of a value, bytes of a scale, length of a run) -> number of the panel kind in `csrc/widening.h`, of integers and
# of floats; length 0: the whole depth.
_KINDS = {(8, 4, 0): 1, (8, 2, 32): 2, (8, 4, 16): 3, (4, 2, 32): 4, (4, 4, 32): 5, (5, 2, 32): 6, (5, 4, 32): 7}
_KIND_WITH_ZEROS = 8  # 4 bits, in runs of 32 with scales of 2 bytes
_FLOAT_KINDS = {(4, 2, 32): 9, (4, 2, 16): 10, (8, 4, 0): 11, (8, 4, 128): 12, (8, 4, 32): 13}


def can_pack(linears: Sequence[Any], dtype: torch.dtype, *, interleave: bool = False) -> bool:
    """Whether `PackedProduct` can pack these layers together: linear layers, plain or quantised, of that dtype."""
    sizes = {linear.out_features for linear in linears}
    kinds = {_kind_of(linear) for linear in linears}
    if interleave and (len(sizes) > 1 or len(kinds) > 1):
        return False
    num_outputs = [sum(linear.out_features for linear in run) for _, run in groupby(linears, _kind_of)]
    return (
        all(kind is not None for kind in kinds)
        and all(_dtype_of(linear) == dtype for linear in linears)
        and all(number % PANEL == 0 for number in num_outputs)
        and len({linear.in_features for linear in linears}) == 1
        and linears[0].in_features % 2 == 0
    )


def _kind_of(linear: Any) -> str | None:
    """The block format of a quantised layer, "" for a linear layer; None for others, or if `forward` is overridden."""
    if "forward" in vars(linear):
        return None
    if type(linear) is nn.Linear:
        return ""
    return linear.kind if hasattr(linear, "quantised_parts") else None


def _dtype_of(linear: Any) -> torch.dtype:
    dtype: torch.dtype = linear.dtype if _kind_of(linear) else linear.weight.dtype
    return dtype


def pack(*weights: Tensor, interleave: bool = False, memory: HugePages | None = None) -> Tensor:
    """Pack weights [num_outputs, depth], float32 or bfloat16, in the order of `csrc/products.h`, concatenated.

    Returns [num_panels, depth / step, PANEL, step], where `step` elements take four bytes; allocated from `memory` if
    given. With interleave each panel has 16 outputs of the first of two weights and the same 16 of the second.
    """
    dtype = weights[0].dtype
    step = 4 // weights[0].element_size()
    words = [_words(weight) for weight in weights]  # each [num_outputs, depth / step]
    if not interleave and any(len(part) % PANEL for part in words):
        words = [torch.cat(words)]
    num_panels = sum(len(part) for part in words) // PANEL
    length = words[0].shape[1]
    packed = (memory or HugePages(0)).allocate([num_panels, length, PANEL], torch.int32)
    if interleave:
        places = packed.unflatten(2, (2, LANES)).unbind(2)
    else:
        places = packed.split([len(part) // PANEL for part in words])
    for part, place in zip(words, places, strict=True):
        place.copy_(part.unflatten(0, (num_panels if interleave else len(place), -1)).transpose(1, 2))
    return packed.view(dtype).unflatten(2, (PANEL, step))


def _words(weight: Tensor) -> Tensor:
    """A matrix as int32 words, which copy five times as fast as single elements."""
    if not weight.is_contiguous() or weight.storage_offset() * weight.element_size() % 4:
        weight = weight.clone(memory_format=torch.contiguous_format)
    return weight.detach().view(torch.int32)


def packed_bytes(linears: Sequence[Any]) -> int:
    """Most bytes of these layers in `HugePages`: Q6_K grows from 210 bytes to 320."""
    plain, quantised = (
        [linear.blocks if _kind_of(linear) else linear.weight for linear in linears if bool(_kind_of(linear)) == which]
        for which in (False, True)
    )
    return sum(weight.nbytes for weight in plain) + 2 * sum(blocks.nbytes for blocks in quantised)


def _interleaved(first: Tensor, second: Tensor) -> Tensor:
    """Rows of both in turn, 16 at a time."""
    return torch.stack((first.unflatten(0, (-1, LANES)), second.unflatten(0, (-1, LANES))), dim=1).flatten(0, 2)


def _by_fours(panels: Tensor) -> Tensor:
    """[num_panels, PANEL, num_runs, bytes] reordered for the kernels: four bytes of each output in turn."""
    return panels.unflatten(3, (-1, 4))[..., [0, 2, 1, 3]].permute(0, 2, 3, 1, 4)


def pack_quantised(parts: Any) -> tuple[Tensor, int]:
    """Pack quantised rows: panels [num_panels, bytes] uint8, and their kind.

    Args:
        parts: weight as of `models/quantised/parts.py`.
    """
    values, scales, num_bits = parts.values, parts.scales, parts.num_bits
    depth = values.shape[1]
    num_runs = scales.shape[1]
    run = depth // num_runs
    factors = [each for each in (scales, parts.minima, None if parts.zeros is None else parts.zeros.half())
               if each is not None]  # fmt: skip
    is_whole = num_runs == 1 and scales.element_size() == 4 and len(factors) == 1
    kinds = _FLOAT_KINDS if parts.is_float else _KINDS
    kind = kinds[num_bits, scales.element_size(), 0 if is_whole else run] if parts.zeros is None else _KIND_WITH_ZEROS
    panels = values.unflatten(0, (-1, PANEL)).unflatten(2, (num_runs, run))  # [num_panels, PANEL, num_runs, run]
    if num_bits < 8:
        low, high = panels.unflatten(3, (-1, 2, 4)).unbind(4)  # each [num_panels, PANEL, num_runs, run / 8, 4]
        pieces = [_by_fours((low & 15 | high << 4).flatten(3))]
    else:
        pieces = [_by_fours(F.pad(panels, (0, -run % 4)))]
    if num_bits == 5:
        highest = torch.cat((panels[..., ::2], panels[..., 1::2]), dim=3) >> 4
        bits = highest.unflatten(3, (-1, 8)) << torch.arange(8, dtype=torch.uint8, device="cpu")
        pieces.insert(0, bits.sum(dim=4, dtype=torch.uint8).transpose(1, 2))
    pieces = [each.unflatten(0, (-1, PANEL)).transpose(1, 2) for each in factors] + pieces
    whole = [piece.contiguous().view(torch.uint8).flatten(2) for piece in pieces]  # [num_panels, num_runs, bytes]
    packed = torch.cat(whole, dim=2).flatten(1)
    if parts.units is not None:
        packed = torch.cat((parts.units.view(torch.uint8).reshape(len(packed), -1), packed), dim=1)
    return packed, kind


class PackedProduct:
    """Packed product of linear layers that read the same input.

    Args:
        linears: `can_pack` must hold; may be of different kinds.
        interleave: True for two layers: each panel has 16 outputs of the first and the same 16 of the second.
        memory: holds the packed weight; newly allocated by default.
    """

    def __init__(self, linears: Sequence[Any], *, interleave: bool = False, memory: HugePages | None = None) -> None:
        memory = memory or HugePages(packed_bytes(linears))
        join = (lambda tensors: _interleaved(*tensors)) if interleave else torch.cat
        self._bias = self._panels = None
        if any(linear.bias is not None for linear in linears):
            self._bias = join([
                torch.zeros(linear.out_features, dtype=_dtype_of(linear), device="cpu")
                if linear.bias is None else linear.bias.detach()
                for linear in linears
            ])  # fmt: skip
        self.num_outputs = sum(linear.out_features for linear in linears)
        self._ends = list(accumulate(linear.out_features for linear in linears))
        self._is_interleaved = interleave
        depth = linears[0].in_features
        if all(_kind_of(linear) == "" for linear in linears):
            self._weight = pack(*(linear.weight for linear in linears), interleave=interleave, memory=memory)
        else:
            self._weight, self._panels = _panels_of_kinds(linears, join, memory)
        bias, panels = (None if part is None else part.data_ptr() for part in (self._bias, self._panels))
        self.struct = ProductStruct(self._weight.data_ptr(), bias, self.num_outputs, depth, panels)

    def write(self, number: int, name: str, values: Tensor) -> None:
        """Write the "weight" or "bias" of the layer `number` anew; layers are plain."""
        first = 0 if self._is_interleaved or not number else self._ends[number - 1]
        rows = torch.arange(first, first + len(values), device="cpu")
        if self._is_interleaved:
            rows = rows // LANES * PANEL + rows % LANES + number * LANES
        if name == "bias":
            assert self._bias is not None
            self._bias[rows] = values
        else:
            panels = self._weight.view(torch.int32).squeeze(3).transpose(1, 2)
            panels[rows // PANEL, rows % PANEL] = _words(values)


def _panels_of_kinds(
    linears: Sequence[Any], join: Callable[[list[Tensor]], Tensor], memory: HugePages
) -> tuple[Tensor, Tensor]:
    """Packed panels of layers of several kinds, uint8, and their (offset, kind) [num_panels, 2] int64."""
    segments = []
    places = []
    offset = 0
    for kind_name, run in groupby(linears, _kind_of):
        layers = list(run)
        if kind_name == "":
            panels = pack(join([layer.weight.detach() for layer in layers])).flatten(1).view(torch.uint8)
            kind = 0
        else:
            first, *others = (layer.quantised_parts() for layer in layers)
            panels, kind = pack_quantised(first.joined(others, join))
        segments.append(panels.flatten())
        places += [(offset + number * panels.shape[1], kind) for number in range(len(panels))]
        offset += panels.numel()
    weight = memory.allocate([offset], torch.uint8)
    torch.cat(segments, out=weight)
    return weight, torch.tensor(places, dtype=torch.int64, device="cpu")
