"""A graph pass over a compiled layer: top-k of few scores, by which routers choose experts, becomes a single kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from nanovllm.device import find_kernel


def choose_by_kernel(module: GraphModule) -> None:
    """Replace `torch.topk` over the last dimension of short rows on a GPU; leaves others as they are."""
    found = [node for node in module.graph.nodes if node.target in (torch.topk, "topk")]
    if not found or find_kernel("small_top_k", "small_top_k") is None:
        return
    for node in found:
        if (choice := _choice(node)) is not None:
            with module.graph.inserting_before(node):
                chosen = module.graph.call_function(torch.ops.nanovllm.small_top_k.default, choice)
            node.replace_all_uses_with(chosen)
            module.graph.erase_node(node)
    module.recompile()


def _choice(node: Node) -> tuple[Node, int] | None:
    """A node's scores and how many of them it chooses; None if the kernel lacks something that it asks for."""
    from nanovllm.fast.kernels.small_top_k import MAX_CHOSEN, MAX_SCORES

    given: dict[str, Any] = dict(zip(("input", "k", "dim", "largest", "sorted"), node.args, strict=False))
    given |= node.kwargs
    scores = given.get("input")
    example = scores.meta.get("example_value") if isinstance(scores, Node) else None
    if (
        not isinstance(scores, Node)
        or not isinstance(example, Tensor)
        or not example.is_cuda
        or not example.is_floating_point()
    ):
        return None
    count = given.get("k")
    dim = given.get("dim", -1)
    largest = given.get("largest", True)
    is_short = isinstance(example.shape[-1], int) and example.shape[-1] <= MAX_SCORES
    if not isinstance(count, int) or not count <= MAX_CHOSEN or not is_short or example.dtype == torch.float64:
        return None
    return (scores, count) if largest is True and dim in (-1, example.dim() - 1) else None
