"""A graph pass over a compiled layer of few rows: a norm and the product with its output become one kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from nanovllm.device import find_kernel
from nanovllm.fast.layers.graph_nodes import example_of, is_call, norm_of
from nanovllm.fast.layers.merged_linears import MergedLinear
from nanovllm.models.experts import slots_in_step

MAX_ROWS = 8  # most rows of a launch
MAX_BYTES = 24 * 2**20  # largest weight that is prefetched into the L2 cache: half of the cache


def _run(states: Tensor, norm: Tensor, epsilon: float, weight: Tensor, following: Tensor | None) -> Tensor:
    """Product of the running step's rows [..., depth], normalised, with a weight [num_outputs, depth].

    Args:
        following: weight of a later product, to be prefetched.
    """
    from nanovllm.fast.kernels.normed_linear import normed_linear

    (num_outputs, depth), rows = weight.shape, states.reshape(-1, states.shape[-1]).contiguous()
    kernel = normed_linear(num_outputs, depth, states.device)
    weight = weight.contiguous()
    slots = slots_in_step()
    parts = []
    for begin in range(0, len(rows), MAX_ROWS):  # one launch in a step of up to MAX_ROWS rows
        some = rows[begin : begin + MAX_ROWS]
        parts.append(kernel.run(some, norm, epsilon, weight, None if slots is None else slots[begin:], following))
    product = parts[0] if len(parts) == 1 else torch.cat(parts)
    return product.view(*states.shape[:-1], num_outputs)


def _fake(states: Tensor, norm: Tensor, epsilon: float, weight: Tensor, following: Tensor | None) -> Tensor:
    return states.new_empty(*states.shape[:-1], weight.shape[0])


@cache
def _operator() -> Any:
    return find_kernel("operators", "define_operator")("nanovllm::normed_linear", _run, _fake)  # type: ignore[misc]


def product_calls(model: nn.Module) -> list[Callable[[], Any]]:
    """Calls that compile the kernel for merged products, which mostly come after a norm."""
    suits: Any = find_kernel("normed_linear", "suits")
    kernel: Any = find_kernel("normed_linear", "normed_linear")
    merged = [module.all_weights for module in model.modules() if isinstance(module, MergedLinear)]
    shapes = {(*weight.shape, weight.device) for weight in merged if suits is not None and suits(weight)}
    return [partial(kernel, *shape) for shape in shapes]


def join_norms(module: GraphModule) -> None:
    """Replace products without a bias of normalised states that nothing else reads."""
    suits = find_kernel("normed_linear", "suits")
    if suits is None:
        return
    products = [node for node in module.graph.nodes if _is_product(node)]
    for node, following in zip(products, [*products[1:], None], strict=True):
        states, weight, *added = node.args
        norm = norm_of(states)
        if norm is None or added not in ([], [None]) or not suits(example_of(weight)):
            continue
        if any(user is not node and not is_call(user, "size") for user in states.users):
            continue
        later = None if following is None else following.args[1]
        if later is not None and (later.op != "placeholder" or example_of(later).nbytes > MAX_BYTES):
            later = None
        with module.graph.inserting_before(node):
            given = norm.states, norm.weight, norm.epsilon, weight, later
            joined = module.graph.call_function(_operator(), given)
        node.replace_all_uses_with(joined)
        module.graph.erase_node(node)
    module.recompile()


def _is_product(node: Any) -> bool:
    """Whether a node is a product without a bias; a sum may be part of it."""
    operators: list[Any] = [find_kernel("skinny_linear", name) for name in ("linear", "linear_and_add")]
    packets = [getattr(operator, "overloadpacket", None) for operator in operators]
    if is_call(node, operators[1], packets[1]):
        return True
    is_plain = is_call(node, F.linear, operators[0], packets[0]) and not node.kwargs
    return is_plain and node.args[2:] in ((), (None,))
