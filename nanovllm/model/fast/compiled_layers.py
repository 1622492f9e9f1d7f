"""Compiles a model's decoder layers: one function serves all of them, at any number of rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from nanovllm.attention.block_mask import own_code
from nanovllm.model.fast.joined_sums import join_last_sum
from nanovllm.model.fast.packed_linears import warn_of_dequantising
from nanovllm.model.module_watch import modules_of

# A GPU's layers are compiled twice: for few rows, where independent small kernels share a launch, and for many, where
# each kernel apart is faster.
FEW_ROWS = 512
FEW_ROWS_OPTIONS: Any = {"combo_kernels": True}
# Versions of a layer's code: one for each kind of layer, and more where layers share K and V (Gemma 3n). PyTorch's own
# limit is 8, beyond which there is an error.
MOST_VERSIONS = 64


def decoder_layers(model: nn.Module, attention: Iterable[nn.Module]) -> list[nn.Module]:
    """The list item around each attention module: the unit of compilation."""
    layer_of: dict[nn.Module, nn.Module] = {}
    for module in model.modules():  # lists within lists come later, so that the innermost counts
        if isinstance(module, nn.ModuleList):
            layer_of |= {part: layer for layer in module for part in modules_of(layer)}
    return [layer_of[module] for module in attention if module in layer_of]


def compile_calls(model: nn.Module, layers: Sequence[nn.Module]) -> dict[nn.Module, Callable[..., Any]]:
    """A replacement for each module's call; compilation itself happens in the first calls.

    Args:
        layers: the decoder layers of `model`, all of one kind.
    """
    if next(model.parameters()).device.type == "cpu":
        warn_of_dequantising(model)
        compiled = _compiled(fullgraph=True, dynamic=True)
        return {layer: partial(compiled, layer) for layer in layers}
    few = _compiled(fullgraph=True, dynamic=False, backend=_compile_for_few)
    many = _compiled(fullgraph=True, dynamic=False, backend=_compile_for_many)
    calls: dict[nn.Module, Callable[..., Any]] = {layer: partial(_call_compiled, few, many, layer) for layer in layers}
    for module in _small_modules(model, layers):  # there every small kernel takes a microsecond or two
        calls[module] = partial(_compiled(dynamic=True), module)
    return calls


def _compiled(**options: Any) -> Callable[..., Any]:
    """`_call`, compiled in up to MOST_VERSIONS by whichever thread calls it."""
    compiler: Any = torch.compile
    if "recompile_limit" in inspect.signature(compiler).parameters:
        return cast(Callable[..., Any], compiler(own_code(_call), recompile_limit=MOST_VERSIONS, **options))
    compiled = compiler(own_code(_call), **options)

    def call(*args: Any, **kwargs: Any) -> Any:
        config = torch._dynamo.config  # what is set there may hold for one thread alone
        config.recompile_limit = max(config.recompile_limit, MOST_VERSIONS)
        return compiled(*args, **kwargs)

    return call


def _compile_for_few(module: GraphModule, inputs: Any) -> Any:
    return _compile(module, inputs, FEW_ROWS_OPTIONS)


def _compile_for_many(module: GraphModule, inputs: Any) -> Any:
    return _compile(module, inputs, {})


def _compile(module: GraphModule, inputs: Any, options: Any) -> Any:
    from torch._inductor.compile_fx import compile_fx  # seconds of imports

    join_last_sum(module)
    return compile_fx(module, inputs, config_patches=options)


def _call(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return layer._call_impl(*args, **kwargs)


def _call_compiled(few: Any, many: Any, layer: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A layer compiled with only the number of rows as a symbol, so that the code fits all other sizes."""
    num_rows = hidden_states.shape[-2]
    for tensor in tree_leaves((hidden_states, args, kwargs)):
        if isinstance(tensor, Tensor):
            # [num_rows], [1, num_rows, ...] or several streams of hidden states, [num_streams, 1, num_rows, ...]
            for dim in range(min(2, tensor.dim()) if tensor.dim() < 4 else tensor.dim() - 1):
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
