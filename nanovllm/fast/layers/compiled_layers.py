"""Compiles a model's decoder layers: one compiled function for all layers and any number of rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from nanovllm.device import own_code
from nanovllm.fast.layers.few_experts import calls_of_few
from nanovllm.fast.layers.joined_sums import join_last_sum
from nanovllm.fast.layers.small_top_ks import choose_by_kernel
from nanovllm.model import modules_of

# On a GPU layers are compiled for few rows, where small kernels share launches, and for many: there that is slower.
FEW_ROWS = 512
FEW_ROWS_OPTIONS: Any = {"combo_kernels": True}
# Compiled versions: one per kind of layer, more where layers share K and V (Gemma 3n). PyTorch allows 8 by default.
MOST_VERSIONS = 64


def compile_calls(model: nn.Module, layers: Sequence[nn.Module]) -> dict[nn.Module, Callable[..., Any]]:
    """Compiled replacements of the modules' calls; each compiles at its first call.

    Args:
        layers: the decoder layers of `model`, all of one kind.
    """
    if next(model.parameters()).device.type == "cpu":
        compiled = _compiled(fullgraph=True, dynamic=True)
        return {layer: partial(compiled, layer) for layer in layers}
    few = _compiled(fullgraph=True, dynamic=False, backend=_compile_for_few)
    few = calls_of_few(few, layers, _compiled, _compile_for_few)
    many = _compiled(fullgraph=True, dynamic=False, backend=_compile_for_many)
    calls: dict[nn.Module, Callable[..., Any]] = {layer: partial(_call_compiled, few, many, layer) for layer in layers}
    for module in _small_modules(model, layers):  # each of their small kernels would cost 1-2 µs
        calls[module] = partial(_compiled(dynamic=True), module)
    return calls


def _compiled(**options: Any) -> Callable[..., Any]:
    """`_call`, compiled to up to MOST_VERSIONS versions, in any thread."""
    compiler: Any = torch.compile
    if "recompile_limit" in inspect.signature(compiler).parameters:
        return cast(Callable[..., Any], compiler(own_code(_call), recompile_limit=MOST_VERSIONS, **options))
    compiled = compiler(own_code(_call), **options)

    def call(*args: Any, **kwargs: Any) -> Any:
        config = torch._dynamo.config  # may be thread-local, so it is set at each call
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
    choose_by_kernel(module)
    return compile_fx(module, inputs, config_patches=options)


def _call(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return layer._call_impl(*args, **kwargs)


def _call_compiled(few: Any, many: Any, layer: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call a compiled layer with the number of rows as its only dynamic dimension."""
    num_rows = hidden_states.shape[-2]
    for tensor in tree_leaves((hidden_states, args, kwargs)):
        if isinstance(tensor, Tensor):
            # [num_rows], [1, num_rows, ...], or [num_streams, 1, num_rows, ...] for several streams of hidden states
            for dim in range(min(2, tensor.dim()) if tensor.dim() < 4 else tensor.dim() - 1):
                if tensor.shape[dim] == num_rows:
                    torch._dynamo.maybe_mark_dynamic(tensor, dim)
    return (few if num_rows <= FEW_ROWS else many)(layer, hidden_states, *args, **kwargs)


def _small_modules(model: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Leaf modules outside of the layers, such as norms and rotary embeddings, without matrix products."""
    within = {module for layer in layers for module in modules_of(layer)}
    products = (nn.Embedding, nn.Linear, nn.Dropout, nn.Identity, nn.ModuleList)
    return [
        module
        for module in modules_of(model)
        if module not in within
        and not module._modules
        and not isinstance(module, products)
        and all(parameter.dim() < 2 for parameter in module.parameters())
    ]
