"""Products of routed experts for few rows on a GPU: as in float32, the same bits beside other rows, within graphs."""

import pytest
import torch

from nanovllm.attention import AttentionStep, step_in_force
from nanovllm.fast.attention.no_attention import NoAttention
from nanovllm.models.experts import experts_function, experts_of
from tests.support.tiny_classes import routed, tiny_class_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
# Plain; transposed, interleaved and with biases; without a gate.
CLASSES = ["OlmoeForCausalLM", "GptOssForCausalLM", "NemotronHForCausalLM"]
MANY = 600  # rows with more pairs than the kernels take


def experts(class_name):
    """The first experts module in bfloat16, and the same weights in float32, both on the GPU."""
    module = experts_of(tiny_class_model(class_name).to(torch.bfloat16).cuda())[0]
    wide = experts_of(tiny_class_model(class_name).cuda())[0]
    wide.load_state_dict({name: value.float() for name, value in module.state_dict().items()})
    return module, wide


@pytest.mark.parametrize("class_name", CLASSES)
@pytest.mark.parametrize("num_rows", [1, 2, 13, 40, 512, MANY])
def test_outputs_are_those_of_float32(class_name, num_rows):
    module, wide = experts(class_name)
    states, indices, weights = routed(module, num_rows, torch.bfloat16, "cuda")
    with torch.no_grad():
        expected = wide(states.float(), indices, weights.float())
        found = experts_function(module, states, indices, weights)
    assert found.dtype == torch.bfloat16
    assert float((found.float() - expected).norm() / expected.norm()) < 1e-2


@pytest.mark.parametrize("class_name", CLASSES)
def test_a_row_has_the_same_bits_whatever_rows_are_beside(class_name):
    module, _ = experts(class_name)
    states, indices, weights = routed(module, 40, torch.bfloat16, "cuda")
    with torch.no_grad():
        together = experts_function(module, states, indices, weights)
        for rows in (slice(0, 1), slice(7, 9), slice(20, 40)):
            alone = experts_function(module, states[rows], indices[rows], weights[rows])
            assert torch.equal(alone, together[rows])


def test_all_rows_may_choose_one_expert():
    module, wide = experts("OlmoeForCausalLM")
    states, indices, weights = routed(module, 100, torch.bfloat16, "cuda")
    indices = torch.tensor([[3, 1]], device="cuda").expand(100, 2)
    with torch.no_grad():
        expected = wide(states.float(), indices, weights.float())
        found = experts_function(module, states, indices, weights).float()
    assert float((found - expected).norm() / expected.norm()) < 1e-2


@pytest.mark.parametrize("class_name", CLASSES)
def test_padding_rows_of_a_step_are_not_computed(class_name):
    module, _ = experts(class_name)
    states, indices, weights = routed(module, 12, torch.bfloat16, "cuda")
    slots = torch.tensor([70, 0, 0, 65, 0, 90, 0, 0], device="cuda")  # rows from the eighth on are padding too
    with torch.no_grad():
        expected = experts_function(module, states, indices, weights)
        with step_in_force(-7, AttentionStep(NoAttention(), 8, slots)):
            found = experts_function(module, states, indices, weights)
        with step_in_force(-7, AttentionStep(NoAttention(), 8, torch.stack([slots, slots]))):
            of_kinds = experts_function(module, states, indices, weights)
    real = slots.nonzero()[:, 0]
    assert torch.equal(found[real], expected[real]) and torch.equal(of_kinds[real], expected[real])
    assert found.isfinite().all()
    if class_name != "GptOssForCausalLM":  # whose activation of zeros is not zero
        assert not found[[1, 2, 4, 6, 7, 8, 9, 10, 11]].any()


def test_a_replay_reads_the_experts_anew():
    module, _ = experts("OlmoeForCausalLM")
    states, indices, weights = routed(module, 8, torch.bfloat16, "cuda")
    given = [tensor.clone() for tensor in (states, indices, weights)]
    with torch.no_grad():
        experts_function(module, *given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = experts_function(module, *given)
        for shift in (0, 3):
            for place, tensor in zip(given, (states, indices, weights), strict=True):
                place.copy_(tensor.roll(shift, dims=0))
            graph.replay()
            assert torch.equal(found, experts_function(module, *given))
