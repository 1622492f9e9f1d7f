"""What is changed in a layer's graph before it is compiled for few rows."""

from __future__ import annotations

import torch
from torch.fx import symbolic_trace

import nanovllm.skinny_linear  # noqa: F401  registers the operators
from nanovllm.compiled_layers import join_last_sum

ops = torch.ops.nanovllm


def targets(function):
    module = symbolic_trace(function)
    join_last_sum(module)
    module.graph.lint()
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def test_a_product_that_a_residual_is_added_to_at_the_end_adds_it_itself():
    assert targets(lambda x, w, r: r + ops.linear(x, w)) == [ops.linear_and_add.default]
    assert targets(lambda x, w, r: ops.linear(x, w) + r) == [ops.linear_and_add.default]


def test_the_residual_is_the_other_summand():
    module = symbolic_trace(lambda x, w, r: r + ops.linear(x, w))
    join_last_sum(module)
    [call] = [node for node in module.graph.nodes if node.op == "call_function"]
    assert [argument.name for argument in call.args] == ["x", "w", "r"]


def test_a_product_that_somebody_else_reads_stays():
    def function(x, w, r):
        product = ops.linear(x, w)
        return r + product, product * 2

    assert ops.linear in targets(function)


def test_a_sum_before_the_end_stays():
    assert ops.linear in targets(lambda x, w, r: torch.relu(r + ops.linear(x, w)))


def test_a_sum_with_a_number_stays():
    assert ops.linear in targets(lambda x, w, r: ops.linear(x, w) + 1)
