"""Patterns in the graph of a layer, for graph passes before its compilation."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node


class Norm(NamedTuple):
    """Nodes of an RMS norm: its input and its weight."""

    states: Any
    weight: Any
    epsilon: float


def norm_of(node: Any) -> Norm | None:
    """The RMS norm in bfloat16 with this node as its output."""
    for weight, normed in factors_of(node):
        if not is_call(normed, "to") or dtype_of(normed) != torch.bfloat16 or dtype_of(weight) != torch.bfloat16:
            continue
        for wide, root in factors_of(normed.args[0]):
            if not is_call(wide, "to") or dtype_of(wide) != torch.float32 or not is_call(root, torch.rsqrt):
                continue
            shifted = root.args[0]
            states = wide.args[0]
            if not is_call(shifted, operator.add) or not isinstance(shifted.args[1], float):
                continue
            mean, epsilon = shifted.args
            is_mean = is_call(mean, "mean") and mean.args[1:] == (-1,) and mean.kwargs == {"keepdim": True}
            power: Any = mean.args[0] if is_mean else None
            if is_call(power, "pow") and power.args == (wide, 2) and dtype_of(states) == torch.bfloat16:
                return Norm(states, weight, epsilon) if shape_of(weight) == shape_of(states)[-1:] else None
    return None


def users_of(node: Any) -> list[Any]:
    """The user of a node, through views and roundings to bfloat16; none if it has several."""
    while len(node.users) == 1:
        (user,) = node.users
        if not is_call(user, "view", "reshape") and not (is_call(user, "to") and dtype_of(user) == torch.bfloat16):
            return [user]
        node = user
    return []


def base_of(node: Any, *targets: Any) -> Any:
    """The node before calls of these targets."""
    while is_call(node, *targets):
        node = node.args[0]
    return node


def factors_of(node: Any) -> list[tuple[Any, Any]]:
    """A product's factors in both orders; empty for another node."""
    if not is_call(node, operator.mul, torch.mul) or len(node.args) != 2:
        return []
    return [node.args, node.args[::-1]]


def is_call(node: Any, *targets: Any) -> bool:
    """Whether a node calls one of these functions, or of methods with these names."""
    return isinstance(node, Node) and node.op in ("call_function", "call_method") and node.target in targets


def example_of(node: Any) -> Any:
    """The value that a node had while it was traced."""
    return node.meta.get("example_value") if isinstance(node, Node) else None


def shape_of(node: Any) -> tuple[Any, ...]:
    return tuple(example.shape) if isinstance(example := example_of(node), Tensor) else ()


def dtype_of(node: Any) -> torch.dtype | None:
    return example.dtype if isinstance(example := example_of(node), Tensor) else None
