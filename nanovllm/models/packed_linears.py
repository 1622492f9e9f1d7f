"""Packs weights of linear layers in the order that CPU products read fastest.

Products of few rows take half the time. Not for live modules: a packed copy would not follow the owner's updates.
"""

from __future__ import annotations

import ctypes
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.errors import UnsupportedModelError
from nanovllm.fast.host.memory import HugePages, available_memory
from nanovllm.model import modules_of
from nanovllm.models.experts import KEPT_EXPERTS
from nanovllm.models.guard import Hiding
from nanovllm.models.quantised.blocks import QuantisedLinear

if TYPE_CHECKING:
    from nanovllm.fast.kernels.cpp import Kernels

logger = logging.getLogger("nanovllm")

AnyLinear = nn.Linear | QuantisedLinear
Result = TypeVar("Result")

_PACKED_DTYPES = (torch.float32, torch.bfloat16)
_CHECKED_AT_ONCE = 1 << 20  # elements of a weight, 8 MiB of float64


class PackedLinear:
    """Replaces the `forward` of a linear layer by a packed product.

    Args:
        num_outputs: outputs of the layer, fewer than the weight has if zero outputs pad it.
        memory: holds the packed weight; newly allocated by default.
    """

    _function = "linear"

    def __init__(
        self,
        linear: AnyLinear,
        kernels: Kernels,
        num_outputs: int | None = None,
        *,
        memory: HugePages | None = None,
    ) -> None:
        from nanovllm.fast.kernels.packed_product import PackedProduct

        self._product = PackedProduct([linear], memory=memory)
        self._call = getattr(kernels, self._function)
        self._num_outputs = num_outputs or linear.out_features

    def __call__(self, states: Tensor) -> Tensor:
        return self._multiply(states, states.new_empty(*states.shape[:-1], self._product.num_outputs))

    def write(self, name: str, values: Tensor) -> None:
        """Write the layer's "weight" or "bias" anew."""
        self._product.write(0, name, values)

    def _multiply(self, states: Tensor, output: Tensor) -> Tensor:
        states = states.contiguous()
        num_rows = output.numel() // self._product.num_outputs
        pointers = states.data_ptr(), output.data_ptr()
        self._call(ctypes.byref(self._product.struct), *pointers, num_rows, torch.get_num_threads())
        is_whole = self._num_outputs == self._product.num_outputs
        return output if is_whole else output[..., : self._num_outputs].contiguous()


class PackedHead(PackedLinear):
    """Replaces the `forward` of the output embedding; returns float32 logits, so that rounding makes no ties.

    They are valid until the next call: the system would clear fresh memory, page by page, in every step. Logits of a
    padded weight are a copy.
    """

    _function = "linear_unrounded"
    _output = torch.empty(0, dtype=torch.float32, device="cpu")

    def __call__(self, states: Tensor) -> Tensor:
        shape = (*states.shape[:-1], self._product.num_outputs)
        if self._output.numel() < math.prod(shape):
            with torch.inference_mode(False):  # an inference tensor could not be written outside inference mode
                self._output = torch.empty(math.prod(shape), dtype=torch.float32, device="cpu")
        return self._multiply(states, self._output[: math.prod(shape)].view(shape))


class OneDnnLinear:
    """A packed linear layer in oneDNN's blocked format: slower with few rows, but supports AMX without a compiler."""

    @staticmethod
    def can_pack(dtype: torch.dtype) -> bool:
        """Whether oneDNN supports this dtype on this processor: bfloat16 requires AVX-512."""
        if dtype == torch.bfloat16:
            return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        return torch.backends.mkldnn.is_available() and dtype in _PACKED_DTYPES

    def __init__(self, linear: nn.Linear) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self._bias = linear.bias

    def __call__(self, states: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(states, self._weight, self._bias, "none", [], "")

    def write(self, weight: Tensor) -> None:
        """Reorder another weight of the layer."""
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)

    def is_right(self, linear: nn.Linear) -> bool:
        """Whether outputs of a few random rows match a float64 product, which oneDNN does not compute.

        The layer's own `forward` is no reference: in bfloat16 it is oneDNN too.
        """
        generator = torch.Generator("cpu").manual_seed(0)
        # Relative to a row's norm: rounding to bfloat16 is up to 2^-8, a third of it on average; a bias may add one.
        tolerance = 5e-3 if linear.weight.dtype == torch.bfloat16 else 1e-4
        num_parts = min(-(-linear.weight.numel() // _CHECKED_AT_ONCE), linear.out_features)
        with torch.no_grad():
            rows = torch.randn(3, linear.in_features, generator=generator, device="cpu").to(linear.weight.dtype)
            parts = (part.chunk(num_parts, dim=-1) for part in (self(rows), linear.weight.T))
            biases = [None] * num_parts if linear.bias is None else linear.bias.chunk(num_parts)
            for own, weight, bias in zip(*parts, biases, strict=False):
                expected = rows.double() @ weight.double() + (0.0 if bias is None else bias.double())
                distances = (own.double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)
                if not bool((distances <= tolerance).all()):  # NaN is wrong too
                    return False
        return True


def memory_for_packing(model: nn.Module) -> HugePages | None:
    """Memory for all packed weights in addition to the plain ones; None if both do not fit."""
    from nanovllm.fast.kernels.packed_product import packed_bytes

    num_bytes = packed_bytes([module for module in modules_of(model) if isinstance(module, AnyLinear)])
    return None if available_memory() <= 2 * num_bytes else HugePages(num_bytes)


def pack_linear_layers(
    model: nn.Module,
    kernels: Kernels | None,
    *,
    unshared: Collection[nn.Linear],
    packed: Collection[AnyLinear],
    memory: HugePages | None = None,
) -> None:
    """Pack every linear layer: for our kernels if there are any, else for oneDNN.

    Args:
        unshared: layers with plain weights that may be freed.
        packed: layers packed already, to skip.
        memory: memory for our kernels' weights; newly allocated by default.
    """
    if memory is not None and not packed:
        memory.forget_tensors()  # weights packed for layers that could not be fused
    one_dnn_is_right: dict[tuple[int, ...], bool] = {}  # result of the check by the weight's shape
    linears: Iterable[Any] = modules_of(model)
    for linear in linears:
        if type(linear) not in (nn.Linear, QuantisedLinear) or linear in packed or "forward" in vars(linear):
            continue
        if kernels is not None and kernels.can_pack([whole := _with_whole_panels(linear)]):
            is_head = linear is model.get_output_embeddings()  # type: ignore[operator]
            form = PackedHead if is_head else PackedLinear
            vars(linear)["forward"] = form(whole, kernels, linear.out_features, memory=memory)
        elif type(linear) is nn.Linear and OneDnnLinear.can_pack(linear.weight.dtype):
            by_one_dnn = OneDnnLinear(linear)
            shape = tuple(linear.weight.shape)
            if shape not in one_dnn_is_right:
                one_dnn_is_right[shape] = by_one_dnn.is_right(linear)
                if not one_dnn_is_right[shape]:
                    logger.warning("layers of %s are not packed: oneDNN's product is wrong on this processor", shape)
            if not one_dnn_is_right[shape]:
                continue
            vars(linear)["forward"] = by_one_dnn
        else:
            continue
        free_weights([linear], unshared)
    warn_of_dequantising(model)


def _with_whole_panels(linear: AnyLinear) -> AnyLinear:
    """A quantised layer padded to whole panels of outputs, as for an odd vocabulary; other layers unchanged."""
    from nanovllm.fast.kernels.packed_product import PANEL

    return linear.padded(PANEL) if isinstance(linear, QuantisedLinear) else linear


def warn_of_dequantising(model: nn.Module) -> None:
    """Warn of layers that run without a kernel and dequantise their weights in each step."""
    modules: list[Any] = modules_of(model)
    slow = [one for one in modules if isinstance(one, QuantisedLinear) and one.blocks.numel()]
    slow += [one for one in modules if KEPT_EXPERTS in vars(one) and one.down_proj.numel()]
    if slow:
        logger.warning("%d layers have no kernel for their quantised weights: each step dequantises them", len(slow))


def free_weights(linears: Iterable[AnyLinear], unshared: Collection[nn.Module]) -> None:
    """Free weights of packed layers: quantised ones, and plain ones that no other module shares."""
    for linear in linears:
        if isinstance(linear, QuantisedLinear):  # a tied embedding keeps the blocks
            linear.free()
        elif linear in unshared:
            linear.weight.data = linear.weight.data.new_empty(0)


def with_weights_hidden(model: nn.Module, check: Callable[[Hiding], Result]) -> tuple[Result, set[nn.Linear]]:
    """(result of a check of the model, layers with plain weights that may be freed after packing).

    Args:
        check: uses its argument to hide weights in one of its passes, and compares this pass with others. It raises
            UnsupportedModelError if a pass fails or differs, as when a module reads a weight directly. A model's first
            pass must see the weights, since modules may cache values derived from them.
    """
    unshared = with_own_weights(model)
    try:
        return check(partial(_weights_hidden, unshared)), unshared
    except UnsupportedModelError:
        pass
    return check(nullcontext), set()


@contextmanager
def _weights_hidden(linears: Iterable[nn.Linear]) -> Iterator[None]:
    """Empty these layers' `weight` for modules that read it directly, while the layers themselves still work."""
    hidden = [(linear, linear.weight.data) for linear in linears]
    try:
        for linear, weight in hidden:
            vars(linear)["forward"] = partial(F.linear, weight=weight, bias=linear.bias)
            linear.weight.data = weight.new_empty(0)
        yield
    finally:
        for linear, weight in hidden:
            linear.weight.data = weight
            vars(linear).pop("forward", None)  # ours: layers with an overridden forward are excluded


def with_own_weights(model: nn.Module) -> set[nn.Linear]:
    """Linear layers with an unshared weight (tied embeddings share theirs) and without an overridden `forward`."""
    modules = modules_of(model)
    owners = Counter(id(parameter) for module in modules for parameter in module._parameters.values())
    linears = [module for module in modules if type(module) is nn.Linear and "forward" not in vars(module)]
    return {linear for linear in linears if owners[id(linear.weight)] == 1}
