"""Routed experts of 4- and 8-bit weights on a GPU, in the tiles of `tiled.py`: packed weights are all that it keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from nanovllm.errors import UnsupportedModelError
from nanovllm.models.experts import KEPT_EXPERTS, first_projection, slots_in_step
from nanovllm.models.quantised.blocks import QuantisedLinear
from nanovllm.models.quantised.kept_experts import projections_of
from nanovllm.models.quantised.parts import QuantisedParts
from nanovllm.models.quantised.tiled import kind_of, tiled_factors, why_not_packed

if TYPE_CHECKING:
    from nanovllm.fast.kernels.packed_experts import Experts

_DTYPES = (torch.bfloat16, torch.float16)  # dtypes of activations that the kernels take
_TILE = 16  # outputs that the kernels take together
_PROBES = 256  # results of a gate that are compared
_MOST_DISTANCE = 0.015  # relative error of a row, as between parts of a layer in bfloat16


def _run(
    rows: Tensor, expert_ids: Tensor, parts: Sequence[Tensor | None], width: int, form: str, gate: Sequence[float],
    top_k: int, gathers: bool,
) -> Tensor:  # fmt: skip
    """`expert_products` of the running step's rows.

    Args:
        parts: codes, scales, shifts, units and biases of `Experts`.
    """
    from nanovllm.fast.kernels.packed_experts import Experts, expert_products

    codes, scales, shifts, units, bias = parts
    assert codes is not None
    experts = Experts(codes, scales, shifts, units, bias, width, form, tuple(gate))
    return expert_products(rows, expert_ids, top_k, experts, slots_in_step(), gathers=gathers)


def _fake(
    rows: Tensor, expert_ids: Tensor, parts: Sequence[Tensor | None], width: int, form: str, gate: Sequence[float],
    top_k: int, gathers: bool,
) -> Tensor:  # fmt: skip
    codes = parts[0]
    assert codes is not None
    outputs = codes.shape[1] * _TILE
    return rows.new_empty(expert_ids.shape[0], outputs // 2 if gate else outputs)


@cache
def _operator() -> Any:
    from nanovllm.fast.kernels.operators import define_operator

    return define_operator("nanovllm::packed_experts", _run, _fake)


class TiledProjection(nn.Module):
    """One projection of all experts.

    Args:
        experts: the packed weights.
    """

    codes: Tensor
    scales: Tensor | None
    shifts: Tensor | None
    units: Tensor | None
    bias: Tensor | None

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        _operator()
        self.width = experts.width
        self.form = experts.form
        self.gate = list(experts.gate)
        for name in ("codes", "scales", "shifts", "units", "bias"):
            self.register_buffer(name, getattr(experts, name))

    def forward(self, rows: Tensor, expert_ids: Tensor, top_k: int, gathers: bool) -> Tensor:
        products: Tensor = torch.ops.nanovllm.packed_experts(
            rows, expert_ids, self._parts, self.width, self.form, self.gate, top_k, gathers
        )
        return products

    @property
    def _parts(self) -> list[Tensor | None]:
        return [self.codes, self.scales, self.shifts, self.units, self.bias]

    @property
    def experts(self) -> Experts:
        """The argument of the constructor, as the buffers are now."""
        from nanovllm.fast.kernels.packed_experts import Experts

        parts = self.scales, self.shifts, self.units, self.bias
        return Experts(self.codes, *parts, self.width, self.form, tuple(self.gate))

    def extra_repr(self) -> str:
        outputs = self.codes.shape[1] * _TILE
        return f"experts={len(self.codes)}, in_features={self.width}, out_features={outputs}, gate={self.gate}"


class TiledExperts(nn.Module):
    """Takes the place of a module of experts, which it does not keep.

    Args:
        up, down: projections.
        act: function between them, for a gate that does not end the product; None if it does.
        norm: module for each expert's results, or None.
    """

    operators: ClassVar[frozenset[str]] = frozenset({"packed_experts"})  # they compute rows apart

    def __init__(
        self, up: TiledProjection, down: TiledProjection, act: Callable[[Tensor], Tensor] | None, norm: nn.Module | None
    ) -> None:
        super().__init__()
        self.up = up
        self.down = down
        self.norm = norm
        self._act = act

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        num_rows, top_k = top_k_index.shape
        expert_ids = top_k_index.reshape(-1)
        rows = self.up(hidden_states, expert_ids, top_k, True)
        if self._act is not None:
            rows = self._act(rows)
        rows = self.down(rows, expert_ids, top_k, False)
        if self.norm is not None:
            rows = self.norm(rows)
        weighted = (rows * top_k_weights.reshape(-1, 1)).view(num_rows, top_k, -1)
        return weighted.sum(dim=1).to(hidden_states.dtype)

    def dequantise(self) -> tuple[Tensor, Tensor]:
        """Weights of both projections, [num_experts, outputs, inputs] float32, with outputs as they are packed."""
        from nanovllm.fast.kernels.packed_experts import dequantised_experts

        return dequantised_experts(self.up.experts), dequantised_experts(self.down.experts)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError("quantised weights are not loaded from a state dict. Load the model without quantization.")


class _Gate(NamedTuple):
    """A gate that ends a product: numbers of `Experts.gate`, and the order of its outputs."""

    numbers: tuple[float, float, float]
    order: Tensor


def tiled_experts(module: Any, device: torch.device) -> TiledExperts | None:
    """The experts of a module with blocks, packed on a GPU; None for weights or sizes that the kernels do not have."""
    from nanovllm.fast.kernels.packed_experts import why_not_experts

    linears: list[list[QuantisedLinear]] = [each.linears for each in vars(module)[KEPT_EXPERTS].projections]
    firsts = [each[0] for each in linears]
    if firsts[0].dtype not in _DTYPES or why_not_packed(device) is not None:
        return None
    if any(why_not_experts(len(linears[0]), one.out_features, one.in_features, device) for one in firsts):
        return None
    gate = _gate_of(module, firsts[0].out_features) if module.has_gate else None
    biases = first_projection(module)[1], module.down_proj_bias if module.has_bias else None
    packed = [_packed(each, bias, own, device) for each, bias, own in zip(linears, biases, (gate, None), strict=True)]
    if packed[0] is None or packed[1] is None:
        return None
    act = None
    if gate is None:
        for name in projections_of(module):
            getattr(module, name).data = torch.empty(0)
        module.to(device)
        act = module._apply_gate if module.has_gate else module.act_fn
    norm = module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None
    return TiledExperts(TiledProjection(packed[0]), TiledProjection(packed[1]), act, norm)


def check_kernels(model: nn.Module, device: torch.device) -> None:
    """Make the kernels of a model's packed experts, and compare each with the dequantised weights on some rows.

    Raises UnsupportedModelError if one computes something else.
    """
    from nanovllm.fast.kernels import packed_experts

    kinds: dict[tuple[str, bool], Experts] = {}
    for module in model.modules():
        if isinstance(module, TiledProjection):
            kinds[module.form, bool(module.gate)] = module.experts
    for experts in kinds.values():
        packed_experts.compile_kernels(experts, device)
        if (distance := packed_experts.largest_distance(experts)) > _MOST_DISTANCE:
            raise UnsupportedModelError(
                f"the kernel of packed experts differs from their dequantised weights by {distance:.2e} on this GPU. "
                'Set quantization="dequantize", and report the GPU and the checkpoint\'s format.'
            )


def _packed(
    linears: Sequence[QuantisedLinear], bias: Tensor | None, gate: _Gate | None, device: torch.device
) -> Experts | None:
    """One projection; None for weights that the kernels do not have."""
    from nanovllm.fast.kernels.packed_experts import Experts

    first = linears[0]
    order = slice(None) if gate is None else gate.order.to(device)
    found = _codes_and_factors(linears, order, device) if first.has_parts else None
    tiled = None if found is None else tiled_factors(found[1], first.dtype)
    if found is None or tiled is None:
        return None
    form, *factors = tiled
    scales, shifts, units = (None if each is None else each.unflatten(0, (len(linears), -1)) for each in factors)
    own_bias = None if bias is None else bias.detach().to(device, form.dtype)[:, order].contiguous()
    numbers = () if gate is None else gate.numbers
    return Experts(found[0], scales, shifts, units, own_bias, first.in_features, form.text, numbers)


def _codes_and_factors(
    linears: Sequence[QuantisedLinear], order: slice | Tensor, device: torch.device
) -> tuple[Tensor, QuantisedParts] | None:
    """Packed codes of all experts, and their parts joined without values; None for parts of several shapes.

    Args:
        order: outputs of each expert as they are packed.
    """
    from nanovllm.fast.kernels.packed_rows import pack_codes

    codes: list[Tensor] = []
    factors: list[QuantisedParts] = []
    for linear in linears:
        blocks = linear.blocks.to(device)[order]
        parts = QuantisedLinear(linear.form, blocks, dtype=linear.dtype).quantised_parts()
        codes.append(pack_codes(parts.values.view(torch.uint8), kind_of(parts)))
        factors.append(parts._replace(values=parts.values.to("meta")))
    if len({(each.scales.shape, each.num_bits) for each in factors}) > 1:
        return None
    return torch.stack(codes), factors[0].joined(factors[1:], torch.cat)


def _gate_of(module: Any, outputs: int) -> _Gate | None:
    """The gate of a module as the kernels have it, if it computes the same; None for others.

    Gates and ups are halves of the outputs, or take turns.
    """
    from nanovllm.fast.kernels.packed_experts import HALF, apply_gate, gated_order

    if outputs % (2 * HALF):
        return None
    generator = torch.Generator().manual_seed(0)
    sizes = 10 ** (6 * torch.rand(_PROBES // HALF, outputs, generator=generator) - 2)  # a limit shows in any of them
    probe = sizes * torch.randn(sizes.shape, generator=generator).sign()
    expected = module._apply_gate(probe)
    alphas = {1.0, _number_of(module, "alpha", "swiglu_alpha")}
    limits = {math.inf, _number_of(module, "limit", "swiglu_limit")}
    evens = torch.arange(0, outputs, 2)
    halves = torch.arange(outputs // 2)
    for gates, ups in ((evens, evens + 1), (halves, halves + outputs // 2)):
        order = gated_order(gates, ups)
        for numbers in ((alpha, limit, plus) for alpha in alphas for limit in limits for plus in (0.0, 1.0)):
            if torch.allclose(apply_gate(probe[:, order], numbers), expected, rtol=1e-5, atol=1e-6):
                return _Gate(numbers, order)
    return None


def _number_of(module: Any, *names: str) -> float:
    """An attribute of the first of these names that is a number; 1 without one."""
    found = (getattr(module, name, None) for name in names)
    return next((float(each) for each in found if isinstance(each, (int, float))), 1.0)
