"""Routed experts through the experts interface of `transformers`: rows sorted by expert, one product per expert.

The library's `grouped_mm` counts each expert's rows on the device, so CUDA graphs can capture it. On a CPU packed
products take 0.6 to 0.9 of its time in float32 (docs/results/cpu.md).
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from nanovllm.attention import steps_in_force
from nanovllm.device import find_kernel
from nanovllm.model import modules_of

if TYPE_CHECKING:
    from nanovllm.fast.kernels.cpp import Kernels

EXPERTS_NAME = "nanovllm"
# The attribute of a model's config that selects our experts.
EXPERTS = {"_experts_implementation_internal": EXPERTS_NAME}
PACKED_EXPERTS = "nanovllm_packed_experts"  # attribute of a packed experts module, not of a live one
KEPT_EXPERTS = "nanovllm_kept_experts"  # attribute of a module with weights in quantised blocks


def experts_function(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Experts implementation for `transformers` during an engine's step.

    Args:
        hidden_states: [num_rows, hidden_size].
        top_k_index, top_k_weights: [num_rows, top_k], experts of each row and their weights.

    Returns [num_rows, hidden_size].
    """
    packed: PackedExperts | None = vars(module).get(PACKED_EXPERTS)
    if packed is not None:
        return packed(hidden_states, top_k_index, top_k_weights)
    if _HAS_OPERATORS and hidden_states.is_cuda and hidden_states.dtype == module.down_proj.dtype == torch.bfloat16:
        return _by_operators(module, hidden_states, top_k_index, top_k_weights)
    output: Tensor = grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    return output


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, experts_function)


def is_kept(module: nn.Module) -> bool:
    """Whether a module computes with weights that stay quantised."""
    return hasattr(module, "dequantise") or KEPT_EXPERTS in vars(module)


def slots_in_step() -> Tensor | None:
    """Slots of the running step's rows, 0 for padding; None if steps of several engines run."""
    slots = next(iter(steps_in_force.values())).slots if len(steps_in_force) == 1 else None
    return slots[0] if slots is not None and slots.dim() == 2 else slots  # a row for each kind of layers


def _sort_in_step(expert_ids: Tensor, num_experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    """`sort_by_expert` of `fast/kernels/expert_rows.py` for the running step's rows, without its padding."""
    from nanovllm.fast.kernels.expert_rows import sort_by_expert

    return sort_by_expert(expert_ids, num_experts, top_k, slots_in_step())


# Whether the operators of experts on a GPU are registered.
_HAS_OPERATORS = torch.version.cuda is not None and find_kernel("expert_rows", "expert_products") is not None
if _HAS_OPERATORS:
    _sort = torch.library.custom_op("nanovllm::sort_by_expert", _sort_in_step, mutates_args=())

    @_sort.register_fake
    def _(expert_ids, num_experts, top_k):
        return torch.empty_like(expert_ids), expert_ids.new_empty(num_experts, dtype=torch.int32)


def _by_operators(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """`experts_function` by `fast/kernels/expert_rows.py`: for few rows, and as the library for many."""
    (num_rows, top_k), expert_ids = top_k_index.shape, top_k_index.reshape(-1)
    order, ends = torch.ops.nanovllm.sort_by_expert(expert_ids, module.num_experts, top_k)
    multiply = torch.ops.nanovllm.expert_products
    pairs = (expert_ids, order, ends, module.is_transposed)
    rows = multiply(hidden_states, *first_projection(module), *pairs, top_k)
    rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
    rows = multiply(rows, module.down_proj, module.down_proj_bias if module.has_bias else None, *pairs, 0)
    if getattr(module, "has_post_expert_norm", False):  # older releases have none
        rows = module.post_expert_norm(rows)
    output: Tensor = (rows * top_k_weights.reshape(-1, 1)).view(num_rows, top_k, -1).sum(dim=1).to(hidden_states.dtype)
    return output


def kernel_calls(model: nn.Module, num_rows: int) -> list[Callable[[], Any]]:
    """A call of the kernels of each kind of experts on a GPU, for `num_rows` rows of zeros."""
    calls: dict[tuple[Any, ...], Callable[[], Any]] = {}
    for module in experts_of(model) if _HAS_OPERATORS else []:
        weight = module.down_proj
        if weight.is_cuda and weight.dtype == torch.bfloat16:
            states = weight.new_zeros(num_rows, weight.shape[2 if module.is_transposed else 1])
            routes = torch.arange(module.num_experts, device=weight.device)[None, :1].expand(num_rows, 1)
            calls[type(module), weight.shape] = partial(_by_operators, module, states, routes, states[:, :1])
    return [*calls.values()]


def experts_of(model: nn.Module) -> list[Any]:
    """Modules that use the experts interface, recognised by the attributes set by the library's decorator."""
    return [module for module in modules_of(model) if {"is_transposed", "has_gate", "has_bias"} <= vars(module).keys()]


def why_not_captured(model: nn.Module) -> str | None:
    """The reason why a CUDA graph cannot capture the experts of compiled layers; None if it can.

    For dtypes other than bfloat16 the library reads the number of each expert's rows on the host.
    """
    for module in experts_of(model):
        weight = module.down_proj
        if weight.device.type == "cuda" and weight.dtype != torch.bfloat16:
            return (
                f"{type(module).__name__} has experts in {weight.dtype}, and those in torch.bfloat16 alone (set "
                "dtype='bfloat16') are multiplied in compiled layers without reading their rows' numbers on the host"
            )
    return None


class PackedExperts:
    """All experts of one module, with weights packed for the C++ products.

    Args:
        module: `can_pack_experts` must hold.
    """

    def __init__(self, module: Any, kernels: Kernels) -> None:
        self._module = module
        self._call = kernels.linear
        self._num_experts: int = module.num_experts
        first, bias = first_projection(module)
        self.names = "gate_up_proj" if module.has_gate else "up_proj", "down_proj"
        self._up: Any = _PlainProduct(first, bias, module.is_transposed)
        self._down: Any = _PlainProduct(
            module.down_proj, module.down_proj_bias if module.has_bias else None, module.is_transposed
        )

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Shape of a plain weight, which may have been freed."""
        shape: tuple[int, ...] = (self._up if name == self.names[0] else self._down).shape
        return shape

    def write(self, name: str, weight: Tensor) -> None:
        """Pack other values of a weight."""
        product = _PlainProduct(
            weight, (self._up if name == self.names[0] else self._down).bias, self._module.is_transposed
        )
        if name == self.names[0]:
            self._up = product
        else:
            self._down = product

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        module, (num_rows, top_k) = self._module, top_k_index.shape
        expert_ids, order = torch.sort(top_k_index.reshape(-1))  # [num_rows * top_k]
        counts = torch.bincount(expert_ids, minlength=self._num_experts).tolist()[: self._num_experts]
        rows = self._up(self._call, hidden_states[order // top_k], counts)
        rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
        rows = self._down(self._call, rows, counts)
        if getattr(module, "has_post_expert_norm", False):  # older releases have none
            rows = module.post_expert_norm(rows)
        rows = rows * top_k_weights.reshape(-1)[order, None]
        in_order = torch.empty_like(rows)
        in_order[order] = rows
        return in_order.view(num_rows, top_k, -1).sum(dim=1).to(hidden_states.dtype)


class ProductOfExperts:
    """One projection of all experts, packed: a struct of each."""

    _structs: list[Any]
    _num_outputs: int

    def __call__(self, call: Any, rows: Tensor, counts: list[int]) -> Tensor:
        """[num_rows, num_outputs] from rows [num_rows, depth] sorted by expert; zero after the last expert's rows."""
        rows = rows.contiguous()
        output = rows.new_empty(len(rows), self._num_outputs)
        row_bytes = rows[:1].nbytes
        output_bytes = output[:1].nbytes
        at = rows.data_ptr()
        to = output.data_ptr()
        num_threads = torch.get_num_threads()
        done = 0
        for struct, count in zip(self._structs, counts, strict=True):
            if count:
                call(ctypes.byref(struct), at + done * row_bytes, to + done * output_bytes, count, num_threads)
                done += count
        output[done:] = 0
        return output


class _PlainProduct(ProductOfExperts):
    """One with plain weights."""

    def __init__(self, weight: Tensor, bias: Tensor | None, is_transposed: bool) -> None:
        from nanovllm.fast.kernels.packed_product import ProductStruct, pack

        self.shape = tuple(weight.shape)
        self.bias = bias
        by_output = weight.detach().transpose(1, 2) if is_transposed else weight.detach()
        num_experts, self._num_outputs, depth = by_output.shape
        self._weight = torch.stack([pack(expert) for expert in by_output.contiguous()])
        self._bias = None if bias is None else bias.detach().contiguous()
        self._structs = [
            ProductStruct(
                self._weight[expert].data_ptr(),
                None if self._bias is None else self._bias[expert].data_ptr(),
                self._num_outputs,
                depth,
            )
            for expert in range(num_experts)
        ]


def first_projection(module: Any) -> tuple[Tensor, Tensor | None]:
    name = "gate_up_proj" if module.has_gate else "up_proj"
    return getattr(module, name), getattr(module, f"{name}_bias") if module.has_bias else None


def can_pack_experts(module: Any, dtype: torch.dtype) -> bool:
    """Whether `PackedExperts` supports this module, for kernels of that dtype."""
    from nanovllm.fast.kernels.packed_product import PANEL

    for weight in (first_projection(module)[0], module.down_proj):
        depth, num_outputs = weight.shape[1:] if module.is_transposed else weight.shape[:0:-1]
        if type(weight) is not nn.Parameter or weight.dtype != dtype or num_outputs % PANEL or depth % 2:
            return False
    return len(module.down_proj) == module.num_experts


def pack_experts(model: nn.Module, kernels: Kernels) -> None:
    """Pack the experts of a model that is not live, and free plain weights that no other module shares."""
    owners = Counter(id(parameter) for module in modules_of(model) for parameter in module._parameters.values())
    for module in experts_of(model):
        if (kept := vars(module).get(KEPT_EXPERTS)) is not None:
            kept.pack(kernels)
        elif can_pack_experts(module, kernels.dtype):
            vars(module)[PACKED_EXPERTS] = PackedExperts(module, kernels)
            for weight in (first_projection(module)[0], module.down_proj):
                if owners[id(weight)] == 1:
                    weight.data = weight.data.new_empty(0)
