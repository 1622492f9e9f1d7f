"""Linear layers with their weights in the order that a CPU's matrix products read fastest.

Products of few rows take half the time. Only for a model that nobody else uses: a packed copy would not follow an
owner's updates.
"""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_int64, c_void_p
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.kernels.cpp import LANES, Kernels
from nanovllm.model.weight_watch import modules_of

PANEL = 2 * LANES  # outputs that stand together in a packed weight
_ONE_DNN_DTYPES = (torch.float32, torch.bfloat16)


class ProductStruct(ctypes.Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("num_outputs", c_int64), ("depth", c_int64)]


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


class PackedLinear:
    """What a linear layer's `forward` becomes when its weight is packed."""

    def __init__(self, linear: nn.Linear, kernels: Kernels) -> None:
        self._product = PackedProduct([linear])
        self._call = kernels.linear

    def __call__(self, states: Tensor) -> Tensor:
        return self._multiply(states, states.new_empty(*states.shape[:-1], self._product.num_outputs))

    def _multiply(self, states: Tensor, output: Tensor) -> Tensor:
        states = states.contiguous()
        num_rows = output.numel() // self._product.num_outputs
        pointers = states.data_ptr(), output.data_ptr()
        self._call(ctypes.byref(self._product.struct), *pointers, num_rows, torch.get_num_threads())
        return output


class PackedHead(PackedLinear):
    """The same for a model's output embedding: gives float32 logits, so that rounding makes no ties among them.

    They are valid until the next call: fresh memory would be cleared by the system, page by page, in every step.
    """

    def __init__(self, linear: nn.Linear, kernels: Kernels) -> None:
        super().__init__(linear, kernels)
        self._call = kernels.linear_unrounded
        self._output = torch.empty(0, dtype=torch.float32, device="cpu")

    def __call__(self, states: Tensor) -> Tensor:
        shape = (*states.shape[:-1], self._product.num_outputs)
        if self._output.numel() < math.prod(shape):
            with torch.inference_mode(False):  # as for the caches
                self._output = torch.empty(math.prod(shape), dtype=torch.float32, device="cpu")
        return self._multiply(states, self._output[: math.prod(shape)].view(shape))


class OneDnnLinear:
    """The same with oneDNN's blocked format: slower with few rows, but it knows AMX and needs no compiler."""

    def __init__(self, linear: nn.Linear) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self._bias = linear.bias

    def __call__(self, states: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(states, self._weight, self._bias, "none", [], "")


def pack_linear_layers(
    model: nn.Module, kernels: Kernels | None, *, spare: Collection[nn.Linear], packed: Collection[nn.Linear]
) -> None:
    """Pack every linear layer, for our own products if there are kernels, else for oneDNN.

    Args:
        spare: layers whose plain weights may be freed.
        packed: layers that others have packed already.
    """
    for linear in modules_of(model):
        if type(linear) is not nn.Linear or linear in packed:
            continue
        if kernels is not None and can_pack([linear], kernels.dtype):
            is_head = linear is model.get_output_embeddings()  # type: ignore[operator]
            vars(linear)["forward"] = (PackedHead if is_head else PackedLinear)(linear, kernels)
        elif torch.backends.mkldnn.is_available() and linear.weight.dtype in _ONE_DNN_DTYPES:
            vars(linear)["forward"] = OneDnnLinear(linear)
        else:
            continue
        let_go([linear], spare)


def let_go(linears: Iterable[nn.Linear], spare: Collection[nn.Linear]) -> None:
    """Free the plain weights of those linear layers that are among the spare ones."""
    for linear in linears:
        if linear in spare:
            linear.weight.data = linear.weight.data.new_empty(0)


@contextmanager
def plain_weights_hidden(model: nn.Module) -> Iterator[None]:
    """The linear layers work, but who reads their weights past them fails: so it shows whether they can be let go."""
    hidden = [(linear, linear.weight.data) for linear in with_own_weights(model)]
    try:
        for linear, weight in hidden:
            vars(linear)["forward"] = partial(F.linear, weight=weight, bias=linear.bias)
            linear.weight.data = weight.new_empty(0)
        yield
    finally:
        for linear, weight in hidden:
            linear.weight.data = weight
            vars(linear).pop("forward", None)


def with_own_weights(model: nn.Module) -> set[nn.Linear]:
    """Linear layers whose weight is no other module's too (as tied embeddings are)."""
    modules = modules_of(model)
    owners = Counter(id(parameter) for module in modules for parameter in module._parameters.values())
    return {module for module in modules if type(module) is nn.Linear and owners[id(module.weight)] == 1}
