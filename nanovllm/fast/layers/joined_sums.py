"""A graph pass over a compiled layer: fuses its last residual sum into the product before it, saving a launch."""

from __future__ import annotations

import operator
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from nanovllm.device import find_kernel


def join_last_sum(module: GraphModule) -> None:
    """Fuse a layer's final sum into the product before it."""
    for output in module.graph.output_node().all_input_nodes:
        join_sum(module, output)
    module.recompile()


def join_sum(module: GraphModule, output: Node) -> None:
    """Fuse a sum into the product before it.

    Requires a residual of the product's shape and dtype; leaves the graph unchanged if it does not record them.
    """
    if find_kernel("skinny_linear", "linear_and_add") is None:
        return
    linear_and_add = torch.ops.nanovllm.linear_and_add.default
    if output.target not in (operator.add, torch.add) or len(output.args) != 2 or output.kwargs:
        return
    for last, residual in (output.args, output.args[::-1]):
        if _is_product(last) and residual is not last and _are_alike(last, residual, output):
            with module.graph.inserting_before(output):
                joined = module.graph.call_function(linear_and_add, (*last.args, residual))
            output.replace_all_uses_with(joined)
            module.graph.erase_node(output)
            module.graph.erase_node(last)
            return


def _is_product(value: Any) -> TypeGuard[Node]:
    """Whether a node is a `nanovllm::linear` with a single user."""
    linear = torch.ops.nanovllm.linear
    if not isinstance(value, Node) or value.target not in (linear, linear.default) or value.kwargs:
        return False
    return len(value.users) == 1


def _are_alike(*values: Any) -> bool:
    examples: list[Any] = [value.meta.get("example_value") if isinstance(value, Node) else None for value in values]
    if not all(isinstance(example, Tensor) for example in examples):
        return False
    return all(example.shape == examples[0].shape and example.dtype == examples[0].dtype for example in examples)
