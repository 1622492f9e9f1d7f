"""Lets C++ kernels update recurrent states of decodes, in layers where they agree with the module's own functions."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanovllm.core.errors import KernelBuildError
from nanovllm.model.mixers import Mixers, StatePart
from nanovllm.model.state_layers import StateLayer, StateName
from nanovllm.process.device import find_kernel

if TYPE_CHECKING:
    from nanovllm.kernels.cpp_states import StateKernels

logger = logging.getLogger("nanovllm")

# Relative to the norm. In bfloat16 the kernels round less than torch, which rounds each intermediate result.
_TOLERANCE = {True: 3e-2, False: 1e-4}


def add_kernels(mixers: Mixers) -> None:
    """Compile the kernels and give them to the layers that they serve; call it while the module is installed.

    Without a compiler layers keep torch's operations. Raises ProcessorClassError.
    """
    load = find_kernel("cpp_states", "load_state_kernels")
    if load is None:
        return
    try:
        use_kernels(mixers, load())
    except KernelBuildError as error:
        logger.warning("recurrent states take torch's operations: the C++ kernels are unavailable: %s", error)


def use_kernels(mixers: Mixers, kernels: StateKernels) -> None:
    """Set `kernel_forward` of each layer for which they agree; one layer of each class and size is tried."""
    mixers.kernels = kernels
    refused: dict[Any, str | None] = {}  # by class and states
    for layer in mixers.layers:
        kind = type(layer.module), *layer.states.items()
        forward, layer.in_place = layer.with_functions(kernels.by_name)
        if kind not in refused:
            refused[kind] = _first_difference(mixers, layer, forward) if layer.in_place else "it calls other functions"
        if refused[kind] is None:
            layer.kernel_forward = forward
        layer.example = {}
    for (module_class, *_), reason in refused.items():
        if reason is not None:
            logger.info("decodes of %s update states by torch's operations: %s", module_class.__name__, reason)


def _first_difference(mixers: Mixers, layer: StateLayer, by_kernel: Callable[..., Any]) -> str | None:
    """Why kernels do not serve a layer; None if three decodes with random states give the same with and without."""
    generator = torch.Generator("cpu").manual_seed(0)
    pool = [
        torch.randn(6, *shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
        for shape, dtype in layer.states.values()
    ]
    reads, writes = (torch.tensor(slots, device="cpu") for slots in ([1, 2, 4], [1, 3, 5]))
    part = StatePart(slice(3), True, reads, writes)
    mixers.set_parts([part])

    def run(forward: Callable[..., Any], in_place: frozenset[StateName]) -> list[Tensor]:
        own = [state.clone() for state in pool]
        output = mixers.compute(layer, own, forward, layer.example, part, None, in_place)
        outputs = output if isinstance(output, tuple) else (output,)
        return [each[:, :3].double() for each in outputs] + [state[1:].double() for state in own]

    expected = run(MethodType(type(layer.module).forward, layer.module), frozenset())
    try:
        found = run(by_kernel, layer.in_place)
    except ValueError as error:
        return f"they do not serve {error}"
    tolerance = _TOLERANCE[any(each.dtype == torch.bfloat16 for each in layer.module.parameters())]
    for one, other in zip(found, expected, strict=True):
        distance = (one - other).norm() / other.norm().clamp(min=1e-6)
        if not bool(distance <= tolerance):  # NaN is wrong too
            return f"results differ by {distance.item():.1e} of their size"
    return None
