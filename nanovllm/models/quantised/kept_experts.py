"""Routed experts with quantised weights: blocks [num_experts, outputs, bytes a row] in place of each projection.

They are dequantised expert by expert, only for experts that a step's rows ask for, until CPU kernels have packed them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nanovllm.models.experts import KEPT_EXPERTS, PackedExperts, ProductOfExperts, first_projection
from nanovllm.models.quantised.blocks import QuantisedLinear
from nanovllm.models.quantised.rows import RowFormat

if TYPE_CHECKING:
    from nanovllm.fast.kernels.cpp import Kernels


def is_experts(module: nn.Module) -> bool:
    """Whether a module uses the experts interface of `transformers`, by the attributes that its decorator sets."""
    return {"is_transposed", "has_gate", "has_bias"} <= vars(module).keys()


def projections_of(module: Any) -> tuple[str, str]:
    """Names of the two parameters that hold the experts' weights."""
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def keep_experts(module: Any, forms: dict[str, RowFormat], dtype: torch.dtype) -> None:
    """Let a module compute with blocks, which its parameters hold already.

    Args:
        forms: format of each of `projections_of`.
        dtype: dtype of activations and biases.
    """
    module.kind = "; ".join(form.name for form in forms.values())
    vars(module)["forward"] = vars(module)[KEPT_EXPERTS] = KeptExperts(module, forms, dtype)


def dequantise_experts(module: Any, device: torch.device) -> None:
    """Undo `keep_experts`: plain weights on a device, in the dtype of activations."""
    kept = vars(module).pop(KEPT_EXPERTS)
    del vars(module)["forward"]
    for name, experts in zip(projections_of(module), kept.projections, strict=True):
        weights = [linear.to(device).dequantise().to(linear.dtype) for linear in experts.linears]
        weight = torch.stack(weights)
        plain = weight.transpose(1, 2).contiguous() if module.is_transposed else weight
        setattr(module, name, nn.Parameter(plain, requires_grad=False))


class KeptExperts(PackedExperts):
    """Replaces the `forward` of a module of experts."""

    def __init__(self, module: Any, forms: dict[str, RowFormat], dtype: torch.dtype) -> None:
        self._module = module
        self._num_experts = module.num_experts
        self._call: Any = None
        biases = (first_projection(module)[1], module.down_proj_bias if module.has_bias else None)
        linears = [
            _linears(form, getattr(module, name).data, bias, dtype)
            for (name, form), bias in zip(forms.items(), biases, strict=True)
        ]
        self._up, self._down = (_DequantisedExperts(each) for each in linears)

    @property
    def projections(self) -> tuple[Any, Any]:
        """The two projections, each with the `linears` of its experts until they are packed."""
        return self._up, self._down

    def pack(self, kernels: Kernels) -> None:
        """Compute by packed products from now on, if all projections have them, and free the blocks."""
        from nanovllm.fast.kernels.packed_product import PANEL

        products = (self._up, self._down)
        if not all(linear.out_features % PANEL == 0 and kernels.can_pack([linear])
                   for each in products for linear in each.linears):  # fmt: skip
            return
        self._call = kernels.linear
        self._up, self._down = (_PackedBlocks(each.linears) for each in products)
        for name in projections_of(self._module):
            weight = getattr(self._module, name)
            weight.data = weight.data.new_empty(0)


def _linears(form: RowFormat, blocks: Tensor, bias: Tensor | None, dtype: torch.dtype) -> list[QuantisedLinear]:
    """The experts of one projection, each a view."""
    return [
        QuantisedLinear(form, each, None if bias is None else bias[number], dtype=dtype)
        for number, each in enumerate(blocks)
    ]


class _DequantisedExperts:
    """One projection of all experts, dequantised where rows ask for it."""

    def __init__(self, linears: list[QuantisedLinear]) -> None:
        self.linears = linears

    def __call__(self, call: Any, rows: Tensor, counts: list[int]) -> Tensor:
        parts = rows.split([*counts, len(rows) - sum(counts)])
        found = [linear(part) for linear, part in zip(self.linears, parts, strict=False) if len(part)]
        missing = parts[-1].new_zeros(len(parts[-1]), self.linears[0].out_features)  # rows of no expert
        return torch.cat([*found, missing])


class _PackedBlocks(ProductOfExperts):
    """One projection of all experts, packed in one memory."""

    def __init__(self, linears: list[QuantisedLinear]) -> None:
        from nanovllm.fast.host.memory import HugePages
        from nanovllm.fast.kernels.packed_product import PackedProduct, packed_bytes

        memory = HugePages(packed_bytes(linears))
        self._products = [PackedProduct([linear], memory=memory) for linear in linears]
        self._structs = [product.struct for product in self._products]
        self._num_outputs = linears[0].out_features
