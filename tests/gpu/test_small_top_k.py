"""The largest scores of short rows on a GPU: those of a stable sort, and put into compiled layers."""

import pytest
import torch

from nanovllm.fast.layers.small_top_ks import choose_by_kernel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_scores", "count"), [(128, 8), (32, 4), (60, 6), (512, 16), (5, 5), (1, 1)])
def test_values_and_places_are_those_of_a_stable_sort(num_scores, count, dtype):
    from nanovllm.fast.kernels.small_top_k import small_top_k

    generator = torch.Generator("cuda").manual_seed(num_scores)
    scores = torch.rand(3, 7, num_scores, generator=generator, device="cuda").to(dtype)  # many equal ones in 16 bits
    scores[0, 2], scores[1, 3] = 0.5, -torch.inf
    expected = torch.sort(scores, dim=-1, descending=True, stable=True)
    values, places = small_top_k(scores, count)
    assert torch.equal(values, expected.values[..., :count])
    assert torch.equal(places, expected.indices[..., :count])


def test_nan_stays_and_places_are_within_the_row():
    from nanovllm.fast.kernels.small_top_k import small_top_k

    scores = torch.tensor([[1.0, torch.nan, 3.0], [torch.nan] * 3], device="cuda")
    values, places = small_top_k(scores, 2)
    assert values[0, 0].isnan() and values[0, 1] == 3 and values[1].isnan().all()
    assert places.tolist() == [[1, 2], [0, 1]]


def replaced(function, *inputs):
    """Whether the pass changes the function's graph; the changed graph must compute what the function does."""
    found = []

    def backend(module, _):
        choose_by_kernel(module)
        found.extend(node.target for node in module.graph.nodes)
        return module.forward

    outputs = torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    for output, expected in zip(outputs, function(*inputs), strict=True):
        assert torch.equal(output, expected)
    return torch.ops.nanovllm.small_top_k.default in found


def test_the_pass_replaces_short_rows_alone():
    torch.manual_seed(0)
    short, long = torch.rand(9, 64, device="cuda"), torch.rand(9, 4096, device="cuda")
    assert replaced(lambda x: torch.topk(x, 4, dim=-1), short)
    assert replaced(lambda x: x.topk(4), short)
    assert replaced(lambda x: torch.topk(input=x, k=4, dim=1), short)
    assert not replaced(lambda x: torch.topk(x, 4, dim=0), short)
    assert not replaced(lambda x: torch.topk(x, 4, largest=False), short)
    assert not replaced(lambda x: torch.topk(x, 20), short)
    assert not replaced(lambda x: torch.topk(x, 4), long)
    assert not replaced(lambda x: torch.topk((100 * x).long(), 4), short)
