"""Linear layers of 4- and 8-bit weights on a GPU, in the tiles that its tensor cores multiply."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from nanovllm.models.experts import KEPT_EXPERTS
from nanovllm.models.quantised.blocks import QuantisedLinear
from nanovllm.models.quantised.kept_experts import dequantise_experts
from nanovllm.models.quantised.parts import QuantisedParts
from nanovllm.models.quantised.scaled import E4M3, PlacedLinear, ScaledLinear, why_not

if TYPE_CHECKING:
    from nanovllm.fast.kernels.packed_rows import Form

logger = logging.getLogger("nanovllm")

_LONGEST_RUN = 128  # runs with equal scales are joined up to this length
_LEAST_RUN = 16
_MOST_SCALE = 2**7  # kernels multiply those of 8-bit floats by 2^120
_CHUNK = 64  # inputs that the kernels take together, of runs that divide it or are multiples of it
_TILE = 16  # outputs that the kernels take together


class TiledFactors(NamedTuple):
    """Factors and shifts of the codes of a weight: arguments of `TiledLinear`."""

    form: Form
    scales: Tensor | None
    shifts: Tensor | None
    units: Tensor | None


class TiledLinear(PlacedLinear):
    """A linear layer with a weight that is packed for `packed_rows.py`; outputs have the input's dtype.

    Args:
        form: constants of its kernels.
        sizes: (out_features, in_features).
        codes, scales, shifts: the packed weight; None for scales if only units multiply.
        units: [out_features] float32 or None.
        bias: [out_features] or None.
    """

    operators: ClassVar[frozenset[str]] = frozenset({"packed_linear"})  # they compute rows apart
    is_packed = True  # a product is one launch: nothing is to be compiled with it
    codes: Tensor
    scales: Tensor | None
    shifts: Tensor | None
    units: Tensor | None
    bias: nn.Parameter | None

    def __init__(
        self, form: Form, sizes: tuple[int, int], codes: Tensor, scales: Tensor | None = None,
        shifts: Tensor | None = None, units: Tensor | None = None, bias: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.form = form
        self.out_features, self.in_features = sizes
        for name, tensor in (("codes", codes), ("scales", scales), ("shifts", shifts), ("units", units)):
            self.register_buffer(name, tensor)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))

    @classmethod
    def joined(cls, linears: Sequence[TiledLinear]) -> TiledLinear:
        """One layer with the outputs of all, which are of one kind."""

        def join(name: str) -> Tensor | None:
            tensors = [getattr(linear, name) for linear in linears]
            return None if tensors[0] is None else torch.cat(tensors)

        first = linears[0]
        sizes = sum(linear.out_features for linear in linears), first.in_features
        codes = torch.cat([linear.codes for linear in linears])
        return cls(first.form, sizes, codes, join("scales"), join("shifts"), join("units"), join("bias"))

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for layers that can be joined: tiles of several layers cannot share outputs."""
        alone = id(self) if self.out_features % _TILE else 0
        return self.form, self.units is None, self.bias is None, alone

    def forward(self, states: Tensor) -> Tensor:
        products: Tensor = torch.ops.nanovllm.packed_linear(
            states, self.codes, self.scales, self.shifts, self.units, self.bias, self.out_features, self.form.text
        )
        return products

    def dequantise(self) -> Tensor:
        """The weight, [out_features, in_features] float32."""
        from nanovllm.fast.kernels.packed_rows import dequantised

        parts = self.codes, self.scales, self.shifts, self.units
        return dequantised(*parts, self.out_features, self.in_features, self.form.text)

    def extra_repr(self) -> str:
        form = self.form
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"kind={form.kind} in runs of {form.run or self.in_features}"
        )


def why_not_packed(device: torch.device) -> str | None:
    """Why a device has no products of packed weights; None if it has."""
    from nanovllm.fast.kernels.packed_rows import why_not

    return why_not(device)


def place(model: nn.Module, device: torch.device) -> None:
    """Replace quantised linear layers and routed experts by those of a GPU, one after another; the log counts them.

    Those without a kernel are dequantised; other modules stay where they are.
    """
    from nanovllm.fast.kernels.packed_rows import compile_kernels

    num_slow = 0
    counts: dict[str, int] = {}
    forms: set[Form] = set()
    for parent in [module for module in model.modules() if module._modules]:
        for name, child in parent._modules.items():
            if type(child) is not QuantisedLinear:
                continue
            placed = placed_linear(child, device)
            parent._modules[name] = placed
            child.free()
            what = "packed products" if isinstance(placed, TiledLinear) else "products of 8-bit floats"
            what = "dequantised weights" if type(placed) is nn.Linear else what
            counts[what] = counts.get(what, 0) + 1
            if isinstance(placed, TiledLinear):
                forms.add(placed.form)
                num_slow += child.dtype == torch.float32
    counts |= _place_experts(model, device)
    for form in forms:
        compile_kernels(form, device)
    if counts:
        logger.info("quantised layers by %s", ", ".join(f"{what}: {count}" for what, count in counts.items()))
    if num_slow:  # activations are float32
        logger.warning("%d layers have no kernel for their quantised weights: each step dequantises them", num_slow)


def _place_experts(model: nn.Module, device: torch.device) -> dict[str, int]:
    """Replace modules of quantised experts; returns how many have kernels and how many are dequantised."""
    from nanovllm.models.quantised.tiled_experts import check_kernels, tiled_experts

    num_packed = 0
    sizes: list[tuple[int, int]] = []  # bytes of each module that is dequantised, before and after
    for parent in [module for module in model.modules() if module._modules]:
        for name, child in parent._modules.items():
            if child is None or KEPT_EXPERTS not in vars(child):
                continue
            if (placed := tiled_experts(child, device)) is not None:
                parent._modules[name] = placed
                num_packed += 1
                continue
            kept = sum(each.nbytes for each in child.parameters())
            dequantise_experts(child, device)
            sizes.append((kept, sum(each.nbytes for each in child.parameters())))
    check_kernels(model, device)
    if sizes:
        kept, plain = (sum(each) / 1e9 for each in zip(*sizes, strict=True))
        logger.warning(
            "%d modules of experts have no kernel for their quantised weights: dequantised they take %.1f GB, not %.1f",
            len(sizes), plain, kept,
        )  # fmt: skip
    found = {"packed experts": num_packed, "dequantised experts": len(sizes)}
    return {what: count for what, count in found.items() if count}


def placed_linear(linear: QuantisedLinear, device: torch.device) -> nn.Module:
    """The layer on a GPU: with packed weights, with 8-bit floats, or else a plain one in its dtype."""
    moved = QuantisedLinear(linear.form, linear.blocks.to(device), linear.bias, dtype=linear.dtype)
    bias = None if linear.bias is None else linear.bias.detach().to(device)
    parts = moved.quantised_parts() if moved.has_parts else None
    found: nn.Module | None = None
    if parts is not None:
        found = _of_floats(parts, bias) if kind_of(parts) == "float8" else None
        if found is None and why_not_packed(device) is None:
            found = tiled_linear(parts, bias, linear.dtype)
    if found is not None:
        return found
    plain: Any = nn.Linear(moved.in_features, moved.out_features, linear.bias is not None, device="meta")
    plain.weight = nn.Parameter(moved.dequantise().to(linear.dtype), requires_grad=False)
    plain.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    layer: nn.Module = plain
    return layer


def _of_floats(parts: QuantisedParts, bias: Tensor | None) -> ScaledLinear | None:
    """A layer of 8-bit floats with a scale an output; None for other runs or sizes."""
    outputs, width = parts.values.shape
    is_whole = parts.scales.shape[1] == 1
    if not is_whole or why_not(outputs, width, parts.values.device) is not None:
        return None
    return ScaledLinear(parts.values.view(E4M3), parts.scales[:, 0].float().contiguous(), bias)


def tiled_linear(
    parts: QuantisedParts, bias: Tensor | None = None, dtype: torch.dtype = torch.bfloat16
) -> TiledLinear | None:
    """A layer of packed tiles for inputs of a dtype; None for runs that the kernels do not have."""
    from nanovllm.fast.kernels.packed_rows import pack_codes

    factors = tiled_factors(parts, dtype)
    if factors is None:
        return None
    outputs, width = parts.values.shape
    codes = pack_codes(parts.values.view(torch.uint8), factors.form.kind)
    return TiledLinear(factors.form, (outputs, width), codes, *factors[1:], bias)


def tiled_factors(parts: QuantisedParts, dtype: torch.dtype) -> TiledFactors | None:
    """Packed factors of parts, which need no values but a shape of them; None for runs or scales without a kernel."""
    from nanovllm.fast.kernels.packed_rows import Form, pack_factors

    width = parts.values.shape[1]
    runs = _runs_of(parts)
    if runs is None or width % _LEAST_RUN:
        return None
    kind = kind_of(parts)
    numbers = torch.float16 if dtype == torch.float16 else torch.bfloat16
    units = None if parts.units is None else parts.units[:, 0].float()
    run = width // runs.scales.shape[1]
    zero, how, shifts = _shifts_of(runs, kind)
    packed = packed_shifts = None
    kept = torch.float32
    if run == width and not how:
        units = runs.scales[:, 0].float() if units is None else runs.scales[:, 0].float() * units
        run = 0
    else:
        scales = runs.scales * 2 if kind == "float4" else runs.scales  # parts hold half of them
        kept = _dtype_of(scales, shifts, numbers)
        if kind == "float8" and scales.abs().max() >= _MOST_SCALE:
            return None
        packed = pack_factors(scales.to(kept), run)
        packed_shifts = None if shifts is None else pack_factors(shifts.to(kept), run)
    units = None if units is None else units.contiguous()  # kernels take no strides
    return TiledFactors(Form(numbers, kind, zero, kept, how, run), packed, packed_shifts, units)


def kind_of(parts: QuantisedParts) -> str:
    """The kernels' name of the values."""
    if parts.num_bits > 4:
        return "float8" if parts.is_float else "int8"
    return "float4" if parts.is_float else "int4"


def _runs_of(parts: QuantisedParts) -> QuantisedParts | None:
    """The same in runs that the kernels have: a row, 16, 32, or a multiple of 64; None if there are none."""
    runs = _in_longer_runs(parts)
    run = parts.values.shape[1] // runs.scales.shape[1]
    if run == parts.values.shape[1] and runs.minima is None and runs.zeros is None:
        return runs
    least = math.gcd(run, _CHUNK)
    if least < _LEAST_RUN:
        return None
    return _repeated(runs, run // least) if run % _CHUNK else runs


def _dtype_of(scales: Tensor, shifts: Tensor | None, numbers: torch.dtype) -> torch.dtype:
    """The dtype of packed factors: that of numbers if it holds them, so that pairs of weights are widened together."""
    if all(each is None or torch.equal(each.to(numbers).float(), each.float()) for each in (scales, shifts)):
        return numbers
    return torch.float32 if shifts is not None and shifts.dtype != scales.dtype else scales.dtype


def _shifts_of(parts: QuantisedParts, kind: str) -> tuple[int, str, Tensor | None]:
    """(constant zero point, how shifts are applied, shifts)."""
    if parts.zeros is not None:
        return 0, "subtracted", parts.zeros.to(parts.scales.dtype)
    if parts.minima is None:
        return 0, "", None
    if kind == "int4" and torch.equal(parts.minima, -8 * parts.scales):
        return 8, "", None
    return 0, "added", parts.minima


def _in_longer_runs(parts: QuantisedParts) -> QuantisedParts:
    """The same with neighbouring runs joined where their factors are equal."""
    width = parts.values.shape[1]
    while (count := parts.scales.shape[1]) % 2 == 0 and 2 * width // count <= _LONGEST_RUN:
        factors = [parts.scales, parts.minima, parts.zeros]
        if not all(each is None or torch.equal(each[:, ::2], each[:, 1::2]) for each in factors):
            break
        minima, zeros = (None if each is None else each[:, ::2] for each in factors[1:])
        parts = parts._replace(scales=parts.scales[:, ::2], minima=minima, zeros=zeros)
    return parts


def _repeated(parts: QuantisedParts, times: int) -> QuantisedParts:
    """The same in shorter runs."""
    if times == 1:
        return parts
    repeat = [None if each is None else each.repeat_interleave(times, 1) for each in (parts.minima, parts.zeros)]
    return parts._replace(scales=parts.scales.repeat_interleave(times, 1), minima=repeat[0], zeros=repeat[1])
