"""All between two layers' attention in one launch, in steps of up to 128 rows on Hopper (`kernels/dense_layer.py`).

Serves layers that run by kernels (`kernel_layers.py`). A launch returns a layer's output and the next layer's queries;
the next layer starts with attention if it gets this output, else as without. Each number of rows that the kernel is
compiled for is compared with the layers by kernels at start, or is not used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanovllm.attention import LAYER_CACHE, LAYER_KIND, STEP_SLOT_MAPPING, AttentionLayer, attend_in_step, step_tensors
from nanovllm.device import find_kernel
from nanovllm.errors import NotFusedError
from nanovllm.fast.layers.decoder_block import Parts, check_plain_cache, describe_blocks
from nanovllm.fast.layers.distances import check_change, difference_of_rows, in_another_way, rewriting
from nanovllm.fast.layers.kernel_layers import KernelLayer, KernelLayers
from nanovllm.fast.layers.layer_equations import LayerEquations
from nanovllm.fast.layers.merged_linears import MergedJoined, is_plain_linear
from nanovllm.fast.layers.packed_layers import PackedLayers
from nanovllm.model import Change

logger = logging.getLogger("nanovllm")

LEAST_ROWS = 9  # fewest rows of the kernel where a layer stack serves fewer rows faster


class _Passed(NamedTuple):
    """Inputs of the next layer, from the last launch."""

    layer: int  # index of the next layer
    hidden_states: Tensor
    position_embeddings: Any
    query: Tensor  # [num_rows, num_heads * head_dim]


class _Step:
    """Kernels by number of rows, and the running step's inputs of the next layer."""

    def __init__(self, least_rows: int) -> None:
        self.least_rows = least_rows
        self.kernels: dict[int, Any] = {}
        self.passed: _Passed | None = None

    def kernel_for(self, num_rows: int) -> Any | None:
        sizes = [size for size in self.kernels if size >= num_rows >= self.least_rows]
        return self.kernels[min(sizes)] if sizes else None

    def query_for(self, index: int, hidden_states: Tensor, position_embeddings: Any) -> Tensor | None:
        """The layer's queries, if the launch before computed them from these hidden states; else None."""
        passed = self.passed
        self.passed = None
        if passed is None or passed.layer != index or passed.hidden_states is not hidden_states:
            return None
        return passed.query if passed.position_embeddings is position_embeddings else None


class DenseLayer(KernelLayer):
    """A layer by kernels that runs all after its attention in one launch, where a step's rows have a kernel.

    Args:
        plain: the layer without.
        following: the next layer; None for the last one.

    Attributes:
        adapters: `FactorSlots` of a layer in steps with adapters.
    """

    adapters: Any = None

    def __init__(self, plain: KernelLayer, index: int, following: DenseLayer | None, step: _Step) -> None:
        super().__init__(*plain.parts)
        self.is_first = plain.is_first
        self._index = index
        self._following = following
        self._step = step

    def __call__(self, hidden_states: Tensor, *args: Any, position_embeddings: Any, **kwargs: Any) -> Tensor:
        """See `KernelLayer`."""
        kernel = None if self.is_skipped else self._step.kernel_for(hidden_states.shape[1])
        if kernel is None:
            return self.by_kernels(hidden_states, *args, position_embeddings=position_embeddings, **kwargs)
        query = self._step.query_for(self._index, hidden_states, position_embeddings)
        output, query = self.launch(kernel, hidden_states, query, position_embeddings, kwargs)
        if self._following is not None:
            self._step.passed = _Passed(self._index + 1, output, position_embeddings, query)
        return output

    def launch(
        self, kernel: Any, hidden_states: Tensor, query: Tensor | None, turns: Any, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """The layer's output [1, num_rows, hidden_size] and the next one's queries [num_rows, ...]; writes its K and V.

        Args:
            query: the layer's queries, its K and V being written; None to compute and write them.
        """
        if query is None:
            attended = self._attention.attended(self.normed(hidden_states), turns, attend_in_step, kwargs)
        else:
            module = self._attention.attention
            fused = self._attention
            cache, (handle, _) = getattr(module, LAYER_CACHE), step_tensors(module, kwargs)
            heads = query.unflatten(1, (-1, cache.shape[3])).transpose(0, 1)[None]
            attended = attend_in_step(heads, cache[0], cache[1], handle, fused.scaling, getattr(module, LAYER_KIND))
        rows = hidden_states[0]
        angles = tuple(part[0] for part in turns)
        slots = kwargs[STEP_SLOT_MAPPING]
        attended = attended[0].flatten(1)
        output, query = kernel.run(self._index, self._weights(), attended, rows, angles, slots, self._step_adapters())
        return output[None], query

    def normed(self, hidden_states: Tensor) -> Tensor:
        norm, epsilon = self._norms[0]
        result: Tensor = self._kernels["norm"](hidden_states, norm.weight, epsilon)
        return result

    def rotated(self, hidden_states: Tensor, turns: Any, slots: Tensor) -> Tensor:
        """Queries [num_rows, num_heads, head_dim] of this layer by kernels; writes its K and V."""
        return self._attention.rotated(self.normed(hidden_states), turns, self.cache, slots)

    @property
    def cache(self) -> Any:
        return getattr(self._attention.attention, LAYER_CACHE)

    def _step_adapters(self) -> Any:
        if self.adapters is None:
            return None
        following = self._following
        products = self._attention.output, self._gate, self._down, following and following._attention.qkv
        make: Any = find_kernel("dense_layer", "StepAdapters")
        return make([self.adapters.of_products.get(product) for product in products], self.adapters.rows)

    def _weights(self) -> Any:
        """The kernel's tensors, where they are now."""
        make: Any = find_kernel("dense_layer", "DenseWeights")
        attention, (post, epsilon), following = self._attention, self._norms[1], self._following
        own = attention.output.weight, self._gate.all_weights, self._down.weight, post.weight
        if following is None:
            return make(*own, *(None,) * 7, (epsilon, 0.0, 0.0, 0.0))
        (norm, next_epsilon), fused = following._norms[0], following._attention
        norms = [part.weight for part in fused.norms] or [None, None]
        cache = getattr(fused.attention, LAYER_CACHE)
        parts = fused.qkv.all_weights, norm.weight, *norms, fused.qkv.all_biases, cache[0], cache[1]
        return make(*own, *parts, (epsilon, next_epsilon, fused.epsilon, fused.epsilon))


def with_adapters(layers: Sequence[DenseLayer], adapters: Any) -> list[DenseLayer]:
    """Layers for steps with adapters, which no stack serves.

    Args:
        layers: those of other steps.
        adapters: `FactorSlots`.
    """
    step = _Step(1)
    step.kernels = layers[0]._step.kernels
    found: list[DenseLayer] = []
    for layer in reversed(layers):
        own = copy(layer)
        own.is_first = True  # adapters change layers differently, so no layer is like the first in a trial
        own.adapters, own._step, own._following = adapters, step, found[0] if found else None
        found.insert(0, own)
    return found


class DenseLayers:
    """The decoder layers of a model by these launches; `calls()` replaces the modules' calls.

    Raises NotFusedError if the layers are of another kind, or if there is no kernel for them.

    Args:
        modules, layers: decoder layers and their attention, in one order.
        calls: replacements of the modules' calls, by kernels.
    """

    def __init__(
        self, modules: Sequence[nn.Module], layers: Sequence[AttentionLayer], calls: dict[nn.Module, Any]
    ) -> None:
        plain = [call for module in modules if isinstance(call := calls.get(module), KernelLayer)]
        blocks = [call.parts[0] for call in plain]
        if len(blocks) != len(modules):
            raise NotFusedError("they do not run by kernels")
        self._make: Any = find_kernel("dense_layer", "DenseLayers")
        if self._make is None:
            raise NotFusedError("there is no kernel for them")
        self._sizes, self._options = _served(blocks[0], layers[0])
        for block in blocks:
            _check(block)
        self._device = blocks[0].norms["input"].module.weight.device
        self._modules = modules
        self._calls = calls
        self._blocks = blocks
        self._step = _Step(_least_rows(self._sizes))
        self._num_rows: Any = find_kernel("dense_layer", "compiled_rows")(self._sizes)  # type: ignore[misc]
        self._launch_error: Any = find_kernel("nvrtc", "CudaError")
        self._layers: list[DenseLayer] = []
        for index in reversed(range(len(modules))):
            following = self._layers[0] if self._layers else None
            self._layers.insert(0, DenseLayer(plain[index], index, following, self._step))
        self.equations = LayerEquations(modules, blocks)

    def calls(self) -> dict[nn.Module, Any]:
        """Replacements of the modules' calls; raises NotFusedError if none was compared."""
        if not self._step.kernels:
            raise NotFusedError("no step of so many decodes fits, to compare them")
        return dict(zip(self._modules, self._layers, strict=True))

    def comparing_calls(self) -> dict[nn.Module, Callable[..., Any]]:
        """Calls that run each layer by kernels and compare the launch with it. They raise NotFusedError."""
        own = {module: partial(self._compare, index) for index, module in enumerate(self._modules)}
        return self._calls | own

    def _compare(
        self, index: int, hidden_states: Tensor, *args: Any, position_embeddings: Any, **kwargs: Any
    ) -> Tensor:
        layer = self._layers[index]
        before = hidden_states.clone()
        slots = kwargs[STEP_SLOT_MAPPING]
        expected = layer.by_kernels(hidden_states, *args, position_embeddings=position_embeddings, **kwargs)
        if (kernel := self._kernel(before.shape[1])) is None:
            return expected
        with in_another_way("they are called"):
            own, query = layer.launch(kernel, before, None, position_embeddings, kwargs)
            kind = self._blocks[index].kind  # padding comes last
            count = int((slots > 0).sum())
            check_change(kind, before[0, :count], expected[0, :count], own[0, :count])
            if index + 1 < len(self._layers):
                following = self._layers[index + 1]
                right = following.rotated(own, position_embeddings, slots).flatten(1)
                if (differs := difference_of_rows(query[:count], right[:count])) is not None:
                    raise NotFusedError(f"the next queries of {kind} differ {differs}")
                with rewriting(kind, following.cache, slots[:count]):
                    layer.launch(kernel, before, None, position_embeddings, kwargs)
        return expected

    def _kernel(self, num_rows: int) -> Any | None:
        """The kernel of a compared step, used from then on; None for rows that run without."""
        size = next((size for size in self._num_rows if size >= num_rows >= self._step.least_rows), None)
        if size is None:
            return None
        if size not in self._step.kernels:
            try:
                self._step.kernels[size] = self._make(self._sizes, self._device, size, **self._options)
            except self._launch_error as error:
                raise NotFusedError(str(error)) from error
        return self._step.kernels[size]


def uncompiled_calls(
    model: nn.Module,
    modules: Sequence[nn.Module],
    layers: Sequence[AttentionLayer],
    attention: Iterable[Change],
    calls: dict[nn.Module, Callable[..., Any]],
    *,
    compare: Callable[..., None],
) -> dict[nn.Module, Callable[..., Any]]:
    """`calls` with layers replaced by `KernelLayers`, `PackedLayers` or `DenseLayers`; raises NotFusedError.

    Args:
        calls: replacements of other modules' calls.
        compare: runs steps with an object's `comparing_calls`, while its `equations` watches: some rows, or, given 1,
            many decodes.
    """
    kernel_layers = KernelLayers(model, modules, layers, attention)
    compare(kernel_layers)
    with torch.no_grad():
        by_kernels = calls | kernel_layers.calls()
    try:
        if any(isinstance(module, MergedJoined) for module in modules[0].modules()):
            packed = PackedLayers(modules, by_kernels)
            compare(packed)
            return by_kernels | packed.calls()
        dense = DenseLayers(modules, layers, by_kernels)
        compare(dense, 1)
        return by_kernels | dense.calls()
    except NotFusedError as error:
        logger.info("layers run in several launches: %s", error)
        return by_kernels


def dense_layer_compilations(
    modules: Sequence[nn.Module], layers: Sequence[AttentionLayer], device: torch.device, max_rows: int
) -> list[Callable[[], Any]]:
    """Calls that compile the kernel for steps of up to `max_rows`, for threads at start; empty if it is not used."""
    compile_code: Any = find_kernel("dense_layer", "machine_code")
    if compile_code is None:
        return []
    try:
        block = describe_blocks(modules[:1], layers[:1])[0]
        sizes, options = _served(block, layers[0])
        _check(block)
    except NotFusedError:
        return []
    if max_rows < _least_rows(sizes):
        return []

    def call(num_rows: int) -> None:
        with suppress(find_kernel("nvrtc", "CudaError")):  # type: ignore[arg-type]
            compile_code(sizes, device, num_rows, **options)

    all_sizes: Any = find_kernel("dense_layer", "compiled_rows")(sizes)  # type: ignore[misc]
    return [partial(call, size) for size in all_sizes if size < max(17, 2 * max_rows)]


def _served(block: Parts, layer: AttentionLayer) -> tuple[Any, dict[str, bool]]:
    """The kernel's sizes and options for a layer; raises NotFusedError if it does not support them."""
    check_plain_cache(layer)
    make: Any = find_kernel("dense_layer", "DenseSizes")
    traits = layer.traits
    sizes = make(*block.sizes, traits.num_heads, traits.num_kv_heads, traits.head_dim)
    device = block.norms["input"].module.weight.device
    reason = find_kernel("dense_layer", "why_not")(sizes, layer.dtype, device)  # type: ignore[misc]
    most: Any = find_kernel("dense_layer", "MAX_LAYER_BYTES")
    if reason is None and sizes.num_bytes > most:
        reason = f"their weights of {sizes.num_bytes / 2**20:.0f} MiB a layer are more than {most / 2**20:.0f}"
    if reason is not None:
        raise NotFusedError(reason)
    return sizes, {"has_norms": "q" in block.norms, "has_bias": block.linears["q"].bias is not None}


def _least_rows(sizes: Any) -> int:
    """Rows from which a step's layers run by it."""
    largest: Any = find_kernel("layer_stack", "MAX_LAYER_BYTES")
    return LEAST_ROWS if largest is not None and sizes.num_bytes <= largest else 1


def _check(block: Parts) -> None:
    """Raise NotFusedError for a layer with linear layers of another kind, or with biases besides q's, k's and v's."""
    linears = block.linears
    if not all(is_plain_linear(linear) for linear in linears.values()):
        raise NotFusedError(f"{block.kind} has projections that are no linear layers")
    if any(linears[name].bias is not None for name in ("o", "gate", "up", "down")):
        raise NotFusedError(f"{block.kind} has a bias after attention or within its MLP")
    weights = [part.weight for part in (*linears.values(), *(norm.module for norm in block.norms.values()))]
    if not all(weight.dtype == torch.bfloat16 and weight.is_contiguous() for weight in weights):
        raise NotFusedError(f"{block.kind} has weights that are not contiguous bfloat16")
