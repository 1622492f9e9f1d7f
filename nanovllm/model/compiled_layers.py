"""Compiles a model's decoder layers: one function serves all of them, at any number of rows."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from nanovllm.attention.block_mask import own_code
from nanovllm.device import find_kernel
from nanovllm.model.weight_watch import modules_of

# A layer's code is laid out for the first step that runs it, that of few rows and of many apart. With few, small
# kernels that do not depend on each other are launched as one; with many, each is laid out better by itself.
FEW_ROWS = 512
FEW_ROWS_OPTIONS: Any = {"combo_kernels": True}


def compile_calls(model: nn.Module, layers: Sequence[nn.Module]) -> dict[nn.Module, Callable[..., Any]]:
    """A replacement for each module's call; compilation itself happens in the first calls.

    Args:
        layers: the decoder layers of `model`, all of one kind.
    """
    if next(model.parameters()).device.type == "cpu":
        compiled = torch.compile(own_code(_call), fullgraph=True, dynamic=True)
        return {layer: partial(compiled, layer) for layer in layers}
    few = torch.compile(own_code(_call), fullgraph=True, dynamic=False, backend=_compile_for_few)
    many = torch.compile(own_code(_call), fullgraph=True, dynamic=False)
    calls: dict[nn.Module, Callable[..., Any]] = {layer: partial(_call_compiled, few, many, layer) for layer in layers}
    for module in _small_modules(model, layers):  # there every small kernel takes a microsecond or two
        calls[module] = partial(torch.compile(own_code(_call), dynamic=True), module)
    return calls


def _compile_for_few(module: GraphModule, inputs: Any) -> Any:
    from torch._inductor.compile_fx import compile_fx  # seconds of imports

    join_last_sum(module)
    return compile_fx(module, inputs, config_patches=FEW_ROWS_OPTIONS)


def join_last_sum(module: GraphModule) -> None:
    """Let the product that a layer ends with add the residual itself, which would take a launch of its own.

    The residual must be a tensor of the product's shape and dtype; nothing is joined where the graph lacks them.
    """
    if find_kernel("skinny_linear", "linear_and_add") is None:
        return
    linear_and_add = torch.ops.nanovllm.linear_and_add.default
    for output in module.graph.output_node().all_input_nodes:
        if output.target not in (operator.add, torch.add) or len(output.args) != 2 or output.kwargs:
            continue
        for last, residual in (output.args, output.args[::-1]):
            if _is_product(last) and residual is not last and _are_alike(last, residual, output):
                with module.graph.inserting_before(output):
                    joined = module.graph.call_function(linear_and_add, (*last.args, residual))
                output.replace_all_uses_with(joined)
                module.graph.erase_node(output)
                module.graph.erase_node(last)
                break
    module.recompile()


def _is_product(value: Any) -> TypeGuard[Node]:
    """Whether it is a product of two tensors with one reader."""
    linear = torch.ops.nanovllm.linear
    if not isinstance(value, Node) or value.target not in (linear, linear.default) or value.kwargs:
        return False
    return len(value.users) == 1


def _are_alike(*values: Any) -> bool:
    of: list[Any] = [value.meta.get("example_value") if isinstance(value, Node) else None for value in values]
    if not all(isinstance(example, Tensor) for example in of):
        return False
    return all(example.shape == of[0].shape and example.dtype == of[0].dtype for example in of)


def _call(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return layer._call_impl(*args, **kwargs)


def _call_compiled(few: Any, many: Any, layer: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A layer of which nothing but the number of rows becomes a symbol, so that the rest is laid out for its sizes."""
    num_rows = hidden_states.shape[1]
    for tensor in tree_leaves((hidden_states, args, kwargs)):
        if isinstance(tensor, Tensor):
            for dim in range(min(2, tensor.dim())):  # [num_rows] or [1, num_rows, ...]
                if tensor.shape[dim] == num_rows:
                    torch._dynamo.maybe_mark_dynamic(tensor, dim)
    return (few if num_rows <= FEW_ROWS else many)(layer, hidden_states, *args, **kwargs)


def _small_modules(model: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """What a model computes outside of its layers, such as norms and rotary embeddings; no products."""
    within = {module for layer in layers for module in modules_of(layer)}
    products = (nn.Embedding, nn.Linear, nn.Dropout, nn.Identity, nn.ModuleList)
    return [
        module
        for module in modules_of(model)
        if module not in within and not module._modules and not isinstance(module, products)
    ]
