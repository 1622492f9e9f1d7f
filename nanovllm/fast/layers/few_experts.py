"""A graph pass over a compiled layer of few rows: its routed experts become one kernel (`fast/kernels/few_experts.py`).

It includes the router, if this chooses the highest scores of one product, then also the norm before it and the residual
sum after the experts. Other routers stay in the compiled layer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from nanovllm.device import find_kernel
from nanovllm.fast.layers.graph_nodes import (
    Norm,
    base_of,
    dtype_of,
    example_of,
    factors_of,
    is_call,
    norm_of,
    shape_of,
    users_of,
)
from nanovllm.fast.layers.joined_sums import join_sum
from nanovllm.fast.layers.normed_linears import MAX_ROWS, join_norms, product_calls
from nanovllm.models.experts import experts_of, slots_in_step

_Call = Callable[..., Any]


def _run(
    states: Tensor,
    gate_up: Tensor,
    down: Tensor,
    top_k: int,
    choice: list[Tensor],
    normalises: bool,
    rounds: bool,
    epsilon: float,
) -> Tensor:
    """Experts of the running step's rows.

    Args:
        choice: experts' numbers and weights, as of `FewExperts.run`, or the router's weight and possibly a norm's.
        normalises, rounds, epsilon: fields of a `Router`.
    """
    from nanovllm.fast.kernels.few_experts import Router, Sizes, few_experts

    (num_experts, hidden, inner), slots = down.shape, slots_in_step()
    kernel = few_experts(Sizes(hidden, inner, num_experts, top_k), states.device)
    rows = states.reshape(-1, hidden).contiguous()
    parts = []
    gate_up = gate_up.contiguous()  # no copies of a model's own
    down = down.contiguous()
    for begin in range(0, len(rows), MAX_ROWS):  # one launch in a step of up to MAX_ROWS rows
        some = slice(begin, begin + MAX_ROWS)
        own: Any = Router(choice[0].contiguous(), normalises, rounds, None if len(choice) == 1 else choice[1], epsilon)
        if choice[0].dtype == torch.int64:
            own = choice[0][some].contiguous(), choice[1][some].contiguous()
        parts.append(kernel.run(rows[some], gate_up, down, own, None if slots is None else slots[begin:]))
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(states.shape)


def _fake(states: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(states, memory_format=torch.contiguous_format)


@cache
def _operator() -> Any:
    return find_kernel("operators", "define_operator")("nanovllm::few_experts", _run, _fake)  # type: ignore[misc]


def calls_of_few(few: _Call, layers: Sequence[nn.Module], compiled: Callable[..., _Call], backend: _Call) -> _Call:
    """`few`; with experts for the kernel, layers compiled once more for steps of up to MAX_ROWS rows.

    Args:
        few: the compiled layer.
        compiled: makes a compiled layer, for a backend.
        backend: compiles a graph for few rows.
    """
    if not any(map(handles, layers)):
        return few

    def compile_joined(module: GraphModule, inputs: Any) -> Any:
        join_experts(module)
        join_norms(module)
        return backend(module, inputs)

    fewest = compiled(fullgraph=True, dynamic=False, backend=compile_joined)

    def call(layer: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        compiled_layer = fewest if hidden_states.shape[-2] <= MAX_ROWS else few
        return compiled_layer(layer, hidden_states, *args, **kwargs)

    return call


class _Experts(NamedTuple):
    """Nodes of routed experts in a graph."""

    output: Any  # [num_rows, hidden]
    states: Any  # same shape as `output`
    ids: Any  # [num_rows, top_k]
    weights: Any  # same shape as `ids`
    gate_up: Any
    down: Any
    top_k: int


class _Router(NamedTuple):
    weight: Any
    normalises: bool
    rounds: bool


def kernel_calls(model: nn.Module) -> list[Callable[[], Any]]:
    """Calls that compile the kernels of a model's experts and of their layers' norms and products."""
    sizes, suits, kernel = _kernel()
    top_k = getattr(model.config, "num_experts_per_tok", None)
    if not isinstance(top_k, int) or not handles(model):
        return []
    found = {(*module.down_proj.shape, module.down_proj.device) for module in experts_of(model)}
    kinds = [(sizes(hidden, inner, count, top_k), device) for count, hidden, inner, device in found]
    return [partial(kernel, *kind) for kind in kinds if suits(*kind)] + product_calls(model)


def _kernel() -> tuple[Any, ...]:
    """`Sizes`, `suits` and `few_experts` of the kernel; None if it is missing."""
    return tuple(find_kernel("few_experts", name) for name in ("Sizes", "suits", "few_experts"))


def handles(layer: nn.Module) -> bool:
    """Whether the pass may find experts for its kernel in a layer."""
    sizes, suits, _ = _kernel()
    if suits is None:
        return False
    weights = [module.down_proj for module in experts_of(layer) if not module.is_transposed and module.has_gate]
    return any(
        weight.dtype == torch.bfloat16 and suits(sizes(weight.shape[1], weight.shape[2], len(weight), 1), weight.device)
        for weight in weights
    )


def join_experts(module: GraphModule) -> None:
    """Replace routed experts that the kernel suits; leaves others as they are."""
    sizes, suits, _ = _kernel()
    if suits is None:
        return
    for node in list(module.graph.nodes):
        if (experts := _experts(node)) is None:
            continue
        example = example_of(experts.down)
        if suits(sizes(example.shape[1], example.shape[2], len(example), experts.top_k), example.device):
            _replace(module, experts)
    module.recompile()


def _replace(module: GraphModule, experts: _Experts) -> None:
    router = _router(experts)
    around = None if router is None else _sum_around(experts)
    replaced = experts.output
    states = experts.states
    norm = None
    if around is not None:
        replaced, norm = around
        states = norm.states
    with module.graph.inserting_before(replaced):
        if router is None:
            choice = [experts.ids, module.graph.call_method("to", (experts.weights, torch.float32))]
        else:
            choice = [router.weight] if norm is None else [router.weight, norm.weight]
        how = (False, False) if router is None else (router.normalises, router.rounds)
        given = states, experts.gate_up, experts.down, experts.top_k, choice, *how, norm.epsilon if norm else 0.0
        joined = module.graph.call_function(_operator(), given)
    replaced.replace_all_uses_with(joined)
    module.graph.erase_node(replaced)
    if norm is not None:
        join_sum(module, states)


def _experts(node: Any) -> _Experts | None:
    """Experts with this node as their weighted sum."""
    summed: Any = base_of(node, "to")
    if not is_call(summed, "sum", torch.sum) or summed.kwargs.get("dim") != 1:
        return None
    for down, weights in factors_of(base_of(summed.args[0], "view", "reshape")):
        weights = base_of(weights, "view", "reshape")
        if not _is_product(down) or down.args[7] != 0 or not weights is not None:
            continue
        for gate, upper in factors_of(down.args[0]):
            if not is_call(gate, F.silu) or not is_call(upper, operator.getitem) or upper.args[1] != 1:
                continue
            chunks = upper.args[0]
            gate = gate.args[0]
            first = chunks.args[0] if is_call(chunks, "chunk", torch.chunk) and chunks.args[1:] == (2,) else None
            is_half = chunks.kwargs == {"dim": -1} and is_call(gate, operator.getitem) and gate.args == (chunks, 0)
            if first is None or not is_half or not _is_product(first) or first.args[3:7] != down.args[3:7]:
                continue
            ids = base_of(first.args[3], "view", "reshape")
            if first.args[2] is None and down.args[2] is None and not first.args[6] and ids is not None:
                found = _Experts(node, first.args[0], ids, weights, first.args[1], down.args[1], first.args[7])
                is_narrow = dtype_of(node) == dtype_of(found.states) == torch.bfloat16
                if is_narrow and shape_of(node) == shape_of(found.states) and shape_of(ids) == shape_of(weights):
                    return found
    return None


def _router(experts: _Experts) -> _Router | None:
    """The router that chooses these experts: softmax over a product, and the highest of it."""
    weights = experts.weights
    rounds = False
    normalises = False
    if is_call(weights, "to"):
        weights, rounds = weights.args[0], dtype_of(weights) == torch.bfloat16
    if is_call(weights, operator.itruediv, operator.truediv, torch.div):
        values, total = weights.args
        is_total = is_call(total, "sum", torch.sum) and total.args[0] is values
        if not is_total or total.kwargs != {"dim": -1, "keepdim": True}:
            return None
        weights = values
        normalises = True
    chosen = weights
    ids = experts.ids
    if not is_call(chosen, operator.getitem) or not is_call(ids, operator.getitem) or chosen.args[0] is not ids.args[0]:
        return None
    top = chosen.args[0]
    if chosen.args[1] != 0 or ids.args[1] != 1 or not is_call(top, torch.topk, "topk") or top.kwargs != {"dim": -1}:
        return None
    scores, count = top.args
    if count != experts.top_k or not is_call(scores, F.softmax, torch.softmax) or dtype_of(scores) != torch.float32:
        return None
    product = base_of(scores.args[0], "float")
    linear = find_kernel("skinny_linear", "linear")
    if (
        scores.kwargs.get("dim") != -1
        or not is_call(product, F.linear, linear, getattr(linear, "overloadpacket", None))
        or dtype_of(product) != torch.bfloat16
    ):
        return None
    states, weight, *bias = product.args
    is_own = base_of(states, "view", "reshape") is base_of(experts.states, "view", "reshape")
    is_own &= shape_of(weight)[0] == shape_of(experts.down)[0]  # one score for each expert, and no other
    return _Router(weight, normalises, rounds) if is_own and bias in ([], [None]) and not product.kwargs else None


def _sum_around(experts: _Experts) -> tuple[Any, Norm] | None:
    """The residual sum after experts, and the norm of its residual before them and their router."""
    norm = norm_of(base_of(experts.states, "view", "reshape"))
    after = users_of(experts.output)
    if norm is None or len(after) != 1 or not is_call(after[0], operator.add) or norm.states not in after[0].args:
        return None
    is_narrow = dtype_of(after[0]) == dtype_of(norm.states) == torch.bfloat16
    return (after[0], norm) if is_narrow and shape_of(after[0]) == shape_of(norm.states) else None


def _is_product(node: Any) -> bool:
    product = torch.ops.nanovllm.expert_products
    return is_call(node, product, product.default) and len(node.args) == 8
