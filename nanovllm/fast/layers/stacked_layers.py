"""All Llama-style decoder layers in one launch, for steps of few decodes on a GPU (`fast/kernels/layer_stack.py`).

`decoder_block.py` recognises the layers; the kernel is then compared with each layer in a few steps. A model with
differences in a layer or between two layers runs layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.attention import STEP_HANDLE, STEP_SLOT_MAPPING, AttentionLayer, LayerCache, running_step
from nanovllm.device import find_kernel
from nanovllm.errors import NotFusedError
from nanovllm.fast.attention.flex_gpu import GpuFlexPlan
from nanovllm.fast.layers.decoder_block import Parts, check_attention, check_plain_cache, describe_blocks
from nanovllm.fast.layers.distances import check_change, rewriting
from nanovllm.fast.layers.kernel_layers import KernelLayer
from nanovllm.fast.layers.layer_equations import LayerEquations
from nanovllm.fast.layers.merged_linears import is_plain_linear
from nanovllm.model import ModelBinding


class StackedLayers:
    """The decoder layers of a model as one launch; `calls()` replaces the modules' calls.

    Raises NotFusedError if the layers are of another kind, or if there is no kernel for them.

    Args:
        modules, layers, caches: decoder layers, their attention, its K and V, all in one order.
        calls: used in steps without the stack.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        layers: Sequence[AttentionLayer],
        caches: Sequence[LayerCache],
        calls: dict[nn.Module, Callable[..., Any]],
        block_size: int,
    ) -> None:
        stack = find_kernel("layer_stack", "LayerStack")
        if stack is None:
            raise NotFusedError("there is no kernel for them")
        self._blocks = describe_blocks(modules, layers)
        device = caches[0][0].device
        self.caches: Sequence[Any] = caches
        sizes = _sizes(self._blocks[0], layers[0], block_size)
        reason = find_kernel("layer_stack", "why_not")(sizes, layers[0].dtype, device)  # type: ignore[misc]
        if reason is not None:
            raise NotFusedError(reason)
        weights = [_weights(block, cache) for block, cache in zip(self._blocks, caches, strict=True)]
        if len({block.sizes for block in self._blocks}) > 1:
            raise NotFusedError("the layers are of different sizes")
        if len({tuple(part is None for part in layer) for layer in weights}) > 1:
            raise NotFusedError("some of the layers have norms or biases that others have not")
        self.modules = modules
        self.layered_calls = calls
        self.equations = LayerEquations(modules, self._blocks)
        self.num_compared = 0  # layers, each in several steps
        self.is_on = True
        self.num_rows: tuple[int, ...] = find_kernel("layer_stack", "NUM_ROWS")  # type: ignore[assignment]
        self.rows_type: Any = find_kernel("layer_stack", "DecodeRows")
        self._launch_error: Any = find_kernel("nvrtc", "CudaError")
        try:
            self.stack = stack(weights, sizes, layers[0].scaling, device)
        except self._launch_error as error:  # type: ignore[misc]
            raise NotFusedError(str(error)) from error

    def calls(self) -> dict[nn.Module, Callable[..., Any]]:
        """Replacements of the modules' calls: the first runs all layers, the others pass its output on."""
        return {module: partial(self._call, module) for module in self.modules}

    def _call(self, module: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        rows = self._rows(hidden_states, kwargs)
        if rows is None:
            return self.layered_calls.get(module, module._call_impl)(hidden_states, *args, **kwargs)
        return self._run(rows, hidden_states, **kwargs) if module is self.modules[0] else hidden_states

    def _rows(self, hidden_states: Tensor, kwargs: Any) -> Any | None:
        """The rows of the running step, if it consists of few decodes only; else None."""
        plan = running_step(kwargs[STEP_HANDLE]).plan
        if not self.is_on or not isinstance(plan, GpuFlexPlan):
            return None
        step = plan.steps[0]
        num_decodes = len(step.decode_blocks)
        if len(step.tile_rows) or num_decodes not in self.num_rows or hidden_states.shape[:2] != (1, num_decodes):
            return None
        return self.rows_type(
            step.decode_positions, kwargs[STEP_SLOT_MAPPING], step.tables, step.decode_tables, step.decode_blocks
        )

    def _run(
        self,
        rows: Any,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        first: int = 0,
        count: int = 0,
        **kwargs: Any,
    ) -> Tensor:
        cosines, sines = (part[0] for part in position_embeddings)
        output: Tensor = self.stack.run(hidden_states[0], cosines, sines, rows, first=first, count=count)
        return output[None]

    def comparing_calls(self) -> dict[nn.Module, Callable[..., Any]]:
        """Calls that run each module and compare the kernel's layer with it, while `equations` watches.

        A layer by kernels (`KernelLayer`) runs instead of its module, with which it was compared.
        Outputs of all layers but the last may be read only by the next layer: a stack does not return them. The calls
        raise NotFusedError.
        """
        passed: list[tuple[Any, Any]] = []  # (output, position embeddings) of each layer in this pass

        def call(index: int, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            before: Any = args[0] if args else kwargs.get("hidden_states")
            plain = before._plain if isinstance(before, _ForNextLayer) else before
            if args:
                args = plain, *args[1:]
            elif "hidden_states" in kwargs:
                kwargs["hidden_states"] = plain
            by_kernels: Any = self.layered_calls.get(module)
            is_compared = isinstance(by_kernels, KernelLayer)
            expected = (by_kernels if is_compared else module._call_impl)(*args, **kwargs)
            try:
                embeddings = kwargs["position_embeddings"]
                if index == 0:
                    passed.clear()
                elif len(passed) != index or passed[-1][0] is not before or passed[-1][1] is not embeddings:
                    raise NotFusedError("something is computed between the layers, or they are called in another order")
                rows = self._rows(plain, kwargs)
                if rows is None:
                    raise NotFusedError("they are called with other rows than the step's")
                slots = rows.slot_mapping[rows.block_counts > 0]
                with rewriting(type(module).__name__, self.caches[index], slots):
                    own = self._run(rows, plain, position_embeddings=embeddings, first=index, count=1)
            except self._launch_error as error:
                raise NotFusedError(str(error)) from error
            except (TypeError, KeyError, AttributeError, IndexError) as error:
                raise NotFusedError(f"{type(module).__name__} is called in another way: {error!r}") from error
            self._compare(index, plain, expected, own, rows, None if is_compared else kwargs)
            self.num_compared += 1
            output = expected if module is self.modules[-1] else _ForNextLayer.wrap(expected)
            passed.append((output, embeddings))
            return output

        return {module: partial(call, index, module) for index, module in enumerate(self.modules)}

    def _compare(self, index: int, before: Any, expected: Any, own: Tensor, rows: Any, kwargs: Any) -> None:
        kind = self._blocks[index].kind
        if not isinstance(expected, Tensor) or expected.shape != own.shape:
            raise NotFusedError(f"{kind} returns something else than one tensor of its input's shape")
        count = int((rows.block_counts > 0).sum())  # padding comes last
        if kwargs is not None:
            self.equations.check(index, kwargs, expected, [1] * count)
        check_change(kind, before[0, :count], expected[0, :count], own[0, :count])


class _ForNextLayer(Tensor):
    """A layer's output that raises NotFusedError if anything but the next layer reads it.

    A model may add an early layer's output after the last layer, which no comparison of single layers shows.
    """

    _plain: Tensor

    @staticmethod
    def wrap(tensor: Tensor) -> _ForNextLayer:
        marked = tensor.as_subclass(_ForNextLayer)
        vars(marked)["_plain"] = tensor
        return marked

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _READ_NO_ELEMENT:
            name = getattr(func, "__name__", str(func))
            raise NotFusedError(f"something between the layers or behind them reads a layer's output ({name})")
        return super().__torch_function__(func, types, args, kwargs or {})


_READ_NO_ELEMENT: tuple[Any, ...] = (
    Tensor.size, Tensor.dim, Tensor.numel,
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "requires_grad")),
)  # fmt: skip


def may_stack_layers(binding: ModelBinding) -> bool:
    """Whether a binding's layers have attention alone, and neither an all-reduce, an owner nor a head that drafts."""
    if getattr(binding.passes, "head_layer", None) is not None:
        return False
    return binding.passes_keywords and not (binding.is_live or binding.ranks or binding.mixers)


def unstack_layers(binding: ModelBinding) -> None:
    """Run layer by layer from now on: a stack reads weights by their old addresses."""
    if binding.stacked is not None:
        binding.uninstall()
        binding.calls = binding.stacked.layered_calls
        binding.stacked = None


def stacked_layers(
    modules: Sequence[nn.Module],
    layers: Sequence[AttentionLayer],
    caches: Sequence[LayerCache],
    block_size: int,
    calls: dict[nn.Module, Callable[..., Any]],
    *,
    compare: Callable[[StackedLayers], None],
) -> StackedLayers:
    """The layers as a stack, compared with their modules; raises NotFusedError.

    Args:
        calls: replacements of modules' calls, without a stack.
        compare: runs some steps with `comparing_calls`, while `equations` watches.
    """
    stacked = StackedLayers(modules, layers, caches, calls, block_size)
    compare(stacked)
    if not stacked.num_compared:
        raise NotFusedError("the KV cache has no room to compare them")
    return stacked


def compile_calls_of(
    modules: Sequence[nn.Module], layers: Sequence[AttentionLayer], device: torch.device, block_size: int
) -> list[Callable[[], Any]]:
    """Calls that compile the kernel for these layers, for threads at start; empty if it does not support them."""
    compile_code: Any = find_kernel("layer_stack", "machine_code")
    if compile_code is None:
        return []
    try:
        block = describe_blocks(modules[:1], layers[:1])[0]
        check_attention(layers)
        sizes = _sizes(block, layers[0], block_size)
    except NotFusedError:
        return []
    if find_kernel("layer_stack", "why_not")(sizes, layers[0].dtype, device) is not None:  # type: ignore[misc]
        return []
    has_biases = any(bias is not None for bias in _biases(block))
    has_norms = "q" in block.norms

    def call() -> None:
        with suppress(find_kernel("nvrtc", "CudaError")):  # type: ignore[arg-type]
            compile_code(sizes, device, has_norms=has_norms, has_biases=has_biases)

    return [call]


def _sizes(block: Parts, layer: AttentionLayer, block_size: int) -> Any:
    check_plain_cache(layer)
    sizes: Any = find_kernel("layer_stack", "StackSizes")
    traits = layer.traits
    return sizes(*block.sizes, traits.num_heads, traits.num_kv_heads, traits.head_dim, block_size)


def _biases(block: Parts) -> list[Tensor | None]:
    return [block.linears[name].bias for name in ("q", "k", "v")]


def _weights(block: Parts, cache: LayerCache) -> Any:
    """The layer's tensors in the kernel's order; raises NotFusedError."""
    linears = list(block.linears.values())
    if not all(is_plain_linear(linear) for linear in linears):
        raise NotFusedError(f"{block.kind} has projections that are no linear layers")
    if any(linear.bias is not None for linear in linears[3:]):
        raise NotFusedError(f"{block.kind} has a bias behind attention or within its MLP")
    norms = [block.norms.get(place) for place in ("input", "post", "q", "k")]
    biases = _biases(block)
    if any(bias is not None for bias in biases):
        biases = [
            linear.weight.new_zeros(linear.out_features) if bias is None else bias.detach()
            for linear, bias in zip(linears, biases, strict=False)
        ]
    weights = [linear.weight.detach() for linear in linears]
    tensors = [*weights, *(norm and norm.module.weight.detach() for norm in norms), *biases, cache[0], cache[1]]
    if not all(part.dtype == torch.bfloat16 and part.is_contiguous() for part in tensors if part is not None):
        raise NotFusedError(f"{block.kind} has weights that are not contiguous bfloat16")
    make: Any = find_kernel("layer_stack", "LayerWeights")
    return make(*tensors, tuple(norm.epsilon if norm else 0.0 for norm in norms))
