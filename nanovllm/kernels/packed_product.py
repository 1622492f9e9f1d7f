"""The structures that the C++ kernels read: packed weights, norms and a decoder layer of them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor, nn

LANES = 16  # elements that the kernels compute at once
PANEL = 2 * LANES  # adjacent outputs in a packed weight


class ProductStruct(ctypes.Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("num_outputs", c_int64), ("depth", c_int64)]


class NormStruct(ctypes.Structure):
    _fields_ = [("weight", c_void_p), ("epsilon", c_float)]


class LayerStruct(ctypes.Structure):
    _fields_ = [
        *((name, NormStruct) for name in ("input_norm", "post_attention_norm", "query_norm", "key_norm")),
        *((name, ProductStruct) for name in ("qkv", "attention_output", "gate_up", "down")),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
    ]


def can_pack(linears: Sequence[nn.Linear], dtype: torch.dtype, *, interleave: bool = False) -> bool:
    """Whether `PackedProduct` takes these layers, side by side."""
    if interleave and len({linear.out_features for linear in linears}) > 1:
        return False
    return (
        all(type(linear) is nn.Linear and linear.weight.dtype == dtype for linear in linears)
        and sum(linear.out_features for linear in linears) % PANEL == 0
        and len({linear.in_features for linear in linears}) == 1
        and linears[0].in_features % 2 == 0
    )


def pack(weight: Tensor) -> Tensor:
    """[num_outputs, depth] in the order in which `csrc/products.h` reads it."""
    num_outputs, depth = weight.shape
    step = 2 if weight.dtype == torch.bfloat16 else 1
    panels = weight.view(num_outputs // PANEL, PANEL, depth // step, step)
    return panels.transpose(1, 2).contiguous()  # [num_panels, depth / step, PANEL, step]


def _interleaved(first: Tensor, second: Tensor) -> Tensor:
    """Rows of both in turn, sixteen by sixteen."""
    return torch.stack((first.unflatten(0, (-1, LANES)), second.unflatten(0, (-1, LANES))), dim=1).flatten(0, 2)


class PackedProduct:
    """Linear layers that read the same input, side by side and packed.

    Args:
        linears: `can_pack` must hold.
        interleave: of two layers, in each panel 16 outputs of the first and the same 16 of the second.
    """

    def __init__(self, linears: Sequence[nn.Linear], *, interleave: bool = False) -> None:
        join = (lambda tensors: _interleaved(*tensors)) if interleave else torch.cat
        self._weight = pack(join([linear.weight.detach() for linear in linears]))
        self._bias = None
        if any(linear.bias is not None for linear in linears):
            self._bias = join([
                linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
                for linear in linears
            ])  # fmt: skip
        self.num_outputs = sum(linear.out_features for linear in linears)
        bias = None if self._bias is None else self._bias.data_ptr()
        self.struct = ProductStruct(self._weight.data_ptr(), bias, self.num_outputs, linears[0].in_features)
