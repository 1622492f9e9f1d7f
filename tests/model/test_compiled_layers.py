"""Versions of a compiled layer; graph rewrites before it is compiled for few rows."""

import functools
import operator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import nanovllm.fast.kernels.skinny_linear  # noqa: F401  registers the operators
from nanovllm.fast.layers.compiled_layers import compile_calls
from nanovllm.fast.layers.joined_sums import join_last_sum

ops = torch.ops.nanovllm
ROWS, DEPTH, OUTPUTS = 20, 8, 8  # more rows than have a kernel of their own, which needs a GPU


def joined(function, *, residual=None):
    """The calls of the changed graph by name, after it was seen to compute what the function does."""
    generator = torch.Generator().manual_seed(0)
    x, w, r = (
        torch.randn(*shape, generator=generator) for shape in ((1, ROWS, DEPTH), (OUTPUTS, DEPTH), (1, ROWS, OUTPUTS))
    )
    r = r if residual is None else residual
    graphs = []

    def backend(module, inputs):
        join_last_sum(module)
        module.graph.lint()
        graphs.append(module.graph)
        return module.forward

    arguments = [x, w, r.clone()]
    result = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)(*arguments)
    expected_arguments = [x, w, r.clone()]
    expected = function(*expected_arguments)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(arguments, expected_arguments)
    [graph] = graphs
    return [node.target for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("function", [lambda x, w, r: r + ops.linear(x, w), lambda x, w, r: ops.linear(x, w) + r])
def test_a_product_that_a_residual_is_added_to_at_the_end_adds_it_itself(function):
    assert joined(function) == [ops.linear_and_add.default]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, r: (r + ops.linear(x, w)).relu(),  # no sum at the end
        lambda x, w, r: ops.linear(x, w) + 1,
        lambda x, w, r: ops.linear(x, w) + r[0, 0],  # one row for all
        lambda x, w, r: ops.linear(x, w) + r.double(),
        lambda x, w, r: operator.iadd(r, ops.linear(x, w)),  # somebody may hold the residual
    ],
)
def test_another_sum_stays(function):
    assert ops.linear_and_add.default not in joined(function)


def test_a_product_that_somebody_else_reads_stays():
    def function(x, w, r):
        product = ops.linear(x, w)
        return r + product, product * 2

    def doubled(x, w, r):
        product = ops.linear(x, w)
        return product + product

    assert ops.linear_and_add.default not in joined(function)
    assert ops.linear_and_add.default not in joined(doubled)


@pytest.mark.parametrize("residual", [torch.zeros(OUTPUTS), torch.zeros(1, ROWS, OUTPUTS, dtype=torch.bfloat16)])
def test_a_residual_unlike_the_product_is_refused(residual):
    with pytest.raises(ValueError, match="as the product is"):
        ops.linear_and_add(torch.zeros(1, ROWS, DEPTH), torch.zeros(OUTPUTS, DEPTH), residual)


class Shifted(torch.nn.Module):
    def forward(self, hidden_states, name):
        return hidden_states + len(name)


@pytest.mark.full
@pytest.mark.parametrize("takes_limit", [True, False])
def test_a_layer_has_more_versions_than_pytorch_allows_in_another_thread(monkeypatch, takes_limit):
    """Such as an engine's, which is not the one that built it."""
    compiler = functools.partial(torch.compile, backend="eager")
    if not takes_limit:  # as earlier releases
        monkeypatch.setattr(torch, "compile", lambda f, *, fullgraph=False, dynamic=None: compiler(
            f, fullgraph=fullgraph, dynamic=dynamic))  # fmt: skip
    else:
        monkeypatch.setattr(torch, "compile", compiler)
    layer = Shifted()
    model = torch.nn.ModuleList([layer, torch.nn.Linear(1, 1)])
    call, x = compile_calls(model, [layer])[layer], torch.zeros(1, 4, 8)
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(lambda: [float(call(x, "x" * number).max()) for number in range(12)]).result()
    assert found == [float(number) for number in range(12)]
