"""Decoder layers with packed weights of 4 and 8 bits, in steps of few rows: four products and attention a layer.

Serves layers that run by kernels (`kernel_layers.py`). Norms, the gate and residual sums are computed in the launches
of the products (`kernels/packed_rows.py`): in a small step, launches of their own take as long as the packed weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.attention import STEP_SLOT_MAPPING, attend_in_step
from nanovllm.device import find_kernel
from nanovllm.errors import NotFusedError
from nanovllm.fast.layers.distances import difference_of_rows, in_another_way
from nanovllm.fast.layers.kernel_layers import KernelLayer
from nanovllm.fast.layers.layer_equations import LayerEquations


class PackedLayer(KernelLayer):
    """A layer by kernels that computes steps of few rows in the launches of its products.

    Raises NotFusedError if its parts are of another kind.

    Args:
        plain: the layer without.
    """

    def __init__(self, plain: KernelLayer) -> None:
        super().__init__(*plain.parts)
        self.is_first = plain.is_first
        block, attention = plain.parts[0], self._attention
        self._linears = {
            "qkv": _packed(attention.qkv), "o": _packed(attention.output),
            "gate": _packed(self._gate), "down": _packed(self._down),
        }  # fmt: skip
        linears = self._linears.values()
        if None in linears:
            raise NotFusedError(f"{block.kind} has projections that are not packed")
        if {linear.form.dtype for linear in linears} != {self._norms[0][0].weight.dtype}:
            raise NotFusedError(f"{block.kind} has norms of another dtype than its packed products")
        if self._linears["gate"].out_features % (2 * find_kernel("packed_rows", "TILE")):  # type: ignore[operator]
            raise NotFusedError(f"{block.kind} has gates that share a tile with what they gate")
        self._product: Any = find_kernel("packed_rows", "fused_product")
        self._rest: Any = find_kernel("packed_rows", "Rest")
        self._fits: Any = find_kernel("packed_rows", "fits")
        self._num_compared: int | None = None  # rows to compare with the modules'
        self.was_compared = False

    def serves(self, num_rows: int) -> bool:
        """Whether a step of so many rows runs in these launches."""
        return all(
            self._fits(num_rows, linear.in_features, linear.form.text)
            for linear in (self._linears["qkv"], self._linears["gate"])
        )

    def __call__(self, hidden_states: Tensor, *args: Any, position_embeddings: Any, **kwargs: Any) -> Tensor:
        """See `KernelLayer`."""
        if self.is_skipped or not self.serves(hidden_states.shape[1]):
            return self.by_kernels(hidden_states, *args, position_embeddings=position_embeddings, **kwargs)
        return self.fused(hidden_states, position_embeddings, kwargs)

    def fused(self, hidden_states: Tensor, turns: Any, kwargs: dict[str, Any]) -> Tensor:
        """The layer's output [1, num_rows, hidden_size]; writes its K and V. Rows of padding become zeros."""
        slots = kwargs[STEP_SLOT_MAPPING]
        rows = hidden_states[0]
        (first, epsilon), (second, second_epsilon) = self._norms
        products = self._run("qkv", rows, norm=first.weight, epsilon=epsilon, slots=slots)
        attended = self._attention.attended_by(products[None], turns, attend_in_step, kwargs)
        middle = self._run("o", attended[0].flatten(1), residual=rows, slots=slots)
        inner = self._run("gate", middle, norm=second.weight, epsilon=second_epsilon, gated=True, slots=slots)
        return self._run("down", inner, residual=middle, slots=slots)[None]

    def compare(self, num_rows: int, *args: Any) -> None:
        """`fused`, with the first rows of each launch compared with the modules; raises NotFusedError."""
        self._num_compared = num_rows
        try:
            self.fused(*args)
        finally:
            self._num_compared = None
        self.was_compared = True

    def _run(self, name: str, rows: Tensor, **rest: Any) -> Tensor:
        linear = self._linears[name]
        parts = linear.codes, linear.scales, linear.shifts, linear.units
        output: Tensor = self._product(
            rows, parts, linear.bias, linear.out_features, linear.form.text, self._rest(**rest)
        )
        if (count := self._num_compared) is not None:
            expected = self._by_modules(linear, rows, **rest)
            if (differs := difference_of_rows(output[:count], expected[:count])) is not None:
                raise NotFusedError(f"the launch of {name} computes something else: its rows differ {differs}")
        return output

    def _by_modules(
        self, linear: Any, rows: Tensor, *, slots: Tensor, norm: Tensor | None = None, epsilon: float = 0.0,
        residual: Tensor | None = None, gated: bool = False,
    ) -> Tensor:  # fmt: skip
        """The result of a launch by the module and by kernels one by one."""
        if norm is not None:
            rows = self._kernels["norm"](rows, norm, epsilon)
        product: Tensor = linear(rows)
        if gated:
            product = self._kernels["gated"](product)
        return product if residual is None else product + residual


def _packed(linear: Any) -> Any:
    """The packed layer of a projection or of several that are joined; None for another one."""
    joined = getattr(linear, "joined_layer", linear)
    return joined if getattr(joined, "is_packed", False) else None


class PackedLayers:
    """The decoder layers of a model by these launches; `calls()` replaces the modules' calls.

    Raises NotFusedError if the layers are of another kind.

    Args:
        modules: decoder layers.
        calls: replacements of the modules' calls, by kernels.
    """

    def __init__(self, modules: Sequence[nn.Module], calls: dict[nn.Module, Any]) -> None:
        plain = [call for module in modules if isinstance(call := calls.get(module), KernelLayer)]
        if len(plain) != len(modules):
            raise NotFusedError("they do not run by kernels")
        self._modules = modules
        self._calls = calls
        self._layers = [PackedLayer(call) for call in plain]
        self.equations = LayerEquations(modules, [call.parts[0] for call in plain])

    def calls(self) -> dict[nn.Module, Any]:
        """Replacements of the modules' calls; raises NotFusedError if one was not compared."""
        if not all(layer.was_compared for layer in self._layers):
            raise NotFusedError("no step of few rows fits, to compare them")
        return dict(zip(self._modules, self._layers, strict=True))

    def comparing_calls(self) -> dict[nn.Module, Callable[..., Any]]:
        """Calls that run each layer by kernels and compare these launches with it. They raise NotFusedError."""
        own = {module: partial(self._compare, index) for index, module in enumerate(self._modules)}
        return self._calls | own

    def _compare(
        self, index: int, hidden_states: Tensor, *args: Any, position_embeddings: Any, **kwargs: Any
    ) -> Tensor:
        layer = self._layers[index]
        before = hidden_states.clone()
        expected = layer.by_kernels(hidden_states, *args, position_embeddings=position_embeddings, **kwargs)
        if layer.serves(before.shape[1]):
            count = int((kwargs[STEP_SLOT_MAPPING] > 0).sum())  # padding comes last
            with in_another_way("they are called", RuntimeError), torch.no_grad():
                layer.compare(count, before, position_embeddings, kwargs)
        return expected
