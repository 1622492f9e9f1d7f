"""Lets kernels update recurrent states of decodes, and other functions compute several chunks in one call.

Both serve layers where they agree with the module's own functions.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanovllm.device import find_kernel
from nanovllm.errors import KernelBuildError
from nanovllm.features.states.mixers import Mixers, StatePart
from nanovllm.features.states.state_chunks import Chunk, ChunkFunctions, StepChunks
from nanovllm.features.states.state_layers import StateLayer, StateName

if TYPE_CHECKING:
    from nanovllm.fast.kernels.cpp_states import StateKernels
    from nanovllm.fast.kernels.triton_states import TritonStateKernels

logger = logging.getLogger("nanovllm")

# Relative to the norm. In bfloat16 the kernels round less than torch, which rounds each intermediate result.
_TOLERANCE = {True: 3e-2, False: 1e-4}


def add_kernels(mixers: Mixers) -> None:
    """Give kernels, C++ on a CPU and Triton on a GPU, to the layers that they serve, while the module is installed.

    Without a compiler layers keep torch's operations. Raises ProcessorClassError.
    """
    file = "cpp_states" if mixers.device.type == "cpu" else "triton_states"
    if (load := find_kernel(file, "load_state_kernels")) is not None:
        try:
            use_kernels(mixers, load())
        except KernelBuildError as error:
            logger.warning("recurrent states take torch's operations: the C++ kernels are unavailable: %s", error)
    use_chunks(mixers)
    for layer in mixers.layers:
        layer.example = {}


def use_kernels(mixers: Mixers, kernels: StateKernels | TritonStateKernels) -> None:
    """Set `kernel_forward` of each layer for which they agree; one layer of each class and size is tried."""
    mixers.kernels = kernels
    refused: dict[Any, str | None] = {}  # (class, states) -> reason, None if they agree
    for layer in mixers.layers:
        kind = type(layer.module), *layer.states.items()
        forward, layer.in_place = layer.with_functions(kernels.by_name)
        if kind not in refused:
            refused[kind] = _first_difference(mixers, layer, forward) if layer.in_place else "it calls other functions"
        if refused[kind] is None:
            layer.kernel_forward = forward
    for (module_class, *_), reason in refused.items():
        if reason is not None:
            logger.info("decodes of %s update states by torch's operations: %s", module_class.__name__, reason)


def use_chunks(mixers: Mixers) -> None:
    """Set `chunks` of each layer that computes several chunks in one call as it computes each of them."""
    refused: set[Any] = set()  # classes and states, by kernels or without
    tried: set[Any] = set()
    for layer in mixers.layers:
        for kernels in (mixers.kernels, None) if mixers.kernels is not None and mixers.kernels.prefills else (None,):
            kind = kernels is None, type(layer.module), *layer.states.items()
            functions = ChunkFunctions(layer.functions, layer.chunk, kernels)
            forward, updated = layer.with_functions(functions.by_name)
            if updated != layer.states.keys() or kind in refused:  # it has further functions
                continue
            layer.chunks, layer.chunk_forward = functions, forward
            if kind in tried or _computes_chunks(mixers, layer):
                tried.add(kind)
                break
            refused.add(kind)
            layer.chunks = layer.chunk_forward = None


def _computes_chunks(mixers: Mixers, layer: StateLayer) -> bool:
    """Whether chunks give the same in one call and in several; some of them begin a sequence."""
    generator, device = torch.Generator("cpu").manual_seed(0), mixers.device
    lengths, reads, writes = (layer.chunk + 5, 3, layer.chunk, 1), (None, 1, 2, None), (3, 1, 4, 5)
    bounds = itertools.pairwise(itertools.accumulate(lengths, initial=0))
    chunks = [Chunk(slice(*rows), read, write) for rows, read, write in zip(bounds, reads, writes, strict=True)]
    num_rows = len(layer.example[layer.arguments[0]][0])

    def random(*shape: int, like: Tensor) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu").to(like)

    given = {
        name: random(1, sum(lengths), *value.shape[2:], like=value)
        if isinstance(value, Tensor) and value.shape[:2] == (1, num_rows)
        else value
        for name, value in layer.example.items()
    }
    pool = _random_pool(layer, device)
    forward = MethodType(type(layer.module).forward, layer.module)
    expected, found = ([state.clone() for state in pool] for _ in range(2))
    output: Any = None
    for rows, read, write in chunks:
        own = None if read is None else slice(read, read + 1)
        part = StatePart(rows, False, own, slice(write, write + 1))
        output = mixers.compute(layer, expected, forward, given, part, output)
    try:
        together = mixers.compute_chunks(layer, found, given, StepChunks(chunks, device))
    except Exception as error:  # a function that is called in another way
        reason: str | None = f"it fails: {error!r}"
    else:
        reason = _difference(layer, [*_tensors(together), *found], [*_tensors(output), *expected])
    if reason is not None:
        name = type(layer.module).__name__
        logger.info("%s computes one chunk after another, since several together would differ: %s", name, reason)
    return reason is None


def _first_difference(mixers: Mixers, layer: StateLayer, by_kernel: Callable[..., Any]) -> str | None:
    """Why kernels do not serve a layer; None if three decodes with random states give the same with and without."""
    device = mixers.device
    pool = _random_pool(layer, device)
    reads, writes = (torch.tensor(slots, device=device) for slots in ([1, 2, 4], [1, 3, 5]))
    part = StatePart(slice(3), True, reads, writes)
    mixers.set_parts([part])

    def run(forward: Callable[..., Any], in_place: frozenset[StateName]) -> list[Tensor]:
        own = [state.clone() for state in pool]
        output = mixers.compute(layer, own, forward, layer.example, part, None, in_place)
        return [each[:, :3] for each in _tensors(output)] + [state[1:] for state in own]

    expected = run(MethodType(type(layer.module).forward, layer.module), frozenset())
    try:
        found = run(by_kernel, layer.in_place)
    except ValueError as error:
        return f"they do not serve {error}"
    except Exception as error:  # whatever a compiler raises
        return f"they fail: {error!r}"
    return _difference(layer, found, expected)


def _random_pool(layer: StateLayer, device: torch.device) -> list[Tensor]:
    """Six slots of each state."""
    generator = torch.Generator("cpu").manual_seed(1)
    return [
        torch.randn(6, *shape, generator=generator, dtype=torch.float32, device="cpu").to(device, dtype)
        for shape, dtype in layer.states.values()
    ]


def _tensors(output: Any) -> tuple[Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)


def _difference(layer: StateLayer, found: list[Tensor], expected: list[Tensor]) -> str | None:
    """The first distance beyond rounding, in words; None if there is none."""
    tolerance = _TOLERANCE[any(each.dtype == torch.bfloat16 for each in layer.module.parameters())]
    for one, other in zip(found, expected, strict=True):
        distance = (one.double() - other.double()).norm() / other.double().norm().clamp(min=1e-6)
        if not bool(distance <= tolerance):  # NaN is wrong too
            return f"results differ by {distance.item():.1e} of their size"
    return None
