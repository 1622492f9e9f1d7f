"""Linear layers of 8-bit floats on a GPU; their inputs are rounded to 8-bit floats too, each row by its own scale.

A GPU multiplies two matrices of 8-bit floats (e4m3) at twice bfloat16's rate, and reads half of its bytes. cuBLAS does
so fastest with one scale for each matrix, for any number of rows; so the scales of outputs and of rows multiply its
sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from nanovllm.errors import UnsupportedModelError

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # number of e4m3
_LEAST_SCALE = 2.0**-100  # scale of a row of zeros
_MULTIPLE = 16  # outputs and inputs that the products take
_LEAST_CAPABILITY = (8, 9)  # least capability with products of 8-bit floats


def why_not(num_outputs: int, num_inputs: int, device: torch.device) -> str | None:
    """Why a weight has no product of 8-bit floats on the device; None if it has."""
    if num_outputs % _MULTIPLE or num_inputs % _MULTIPLE:
        return f"{num_outputs} x {num_inputs} weights are not multiples of {_MULTIPLE}"
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return f"{device} does not multiply 8-bit floats"
    return None


class PlacedLinear(nn.Module):
    """A quantised linear layer in a GPU's own form, which has no plain weight."""

    is_packed = False

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError("quantised weights are not loaded from a state dict. Load the model without quantization.")

    @property
    def weight(self) -> NoReturn:
        # Not AttributeError, which `nn.Module` would report as a missing attribute.
        raise UnsupportedModelError(
            "a module of this model reads the weight of a linear layer by itself, which is quantised. "
            'Set quantization="dequantize".'
        )


class ScaledLinear(PlacedLinear):
    """A linear layer with e4m3 weights and rounded inputs; outputs have the input's dtype.

    Args:
        values: [out_features, in_features] e4m3, multiples of 16.
        scales: [out_features] float32 that values are to be multiplied with.
        bias: [out_features] or None.
    """

    # They compute rows apart.
    operators: ClassVar[frozenset[str]] = frozenset({"_scaled_mm", "abs", "amax", "clamp", "div", "reshape"})
    values: Tensor
    scales: Tensor
    unit: Tensor
    bias: nn.Parameter | None

    def __init__(self, values: Tensor, scales: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = values.shape
        self.register_buffer("values", values)
        self.register_buffer("scales", scales)
        self.register_buffer("unit", torch.ones((), device=values.device))
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))

    @classmethod
    def joined(cls, linears: Sequence[ScaledLinear]) -> ScaledLinear:
        """One layer with the outputs of all; none or each has a bias."""
        biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
        values = torch.cat([linear.values.view(torch.uint8) for linear in linears]).view(E4M3)
        return cls(values, torch.cat([linear.scales for linear in linears]), torch.cat(biases) if biases else None)

    @property
    def kind(self) -> tuple[type, bool]:
        """Equal for layers that can be joined."""
        return type(self), self.bias is None

    def forward(self, states: Tensor) -> Tensor:
        rows = states.reshape(-1, self.in_features)
        values, scales = rounded(rows)
        dtype = torch.bfloat16 if rows.dtype == torch.bfloat16 else torch.float32  # float16 would overflow
        sums = torch._scaled_mm(values, self.values.t(), self.unit, self.unit, out_dtype=dtype)
        product = sums * scales * self.scales
        if self.bias is not None:
            product = product + self.bias
        return product.to(states.dtype).view(*states.shape[:-1], self.out_features)

    def dequantise(self) -> Tensor:
        """The weight, [out_features, in_features] float32."""
        return self.values.float() * self.scales[:, None]

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def rounded(values: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 of the same shape, float32 scales [..., 1] that restore them), a scale for the last dimension."""
    numbers = values.float()
    scales = (numbers.abs().amax(dim=-1, keepdim=True) / LARGEST).clamp(min=_LEAST_SCALE)
    return (numbers / scales).clamp(-LARGEST, LARGEST).to(E4M3), scales
