"""What no CUDA graph can capture is found in a pass of a few rows, before any step; layers compile for any number."""

from functools import partial

import pytest
import torch

from nanovllm.fast.gpu.capturable import HostTransfers, why_not_captured
from nanovllm.fast.layers.compiled_layers import _call_compiled, compile_calls
from nanovllm.features.composition.binding import build_binding
from tests.support.tiny_models import tiny_model

DEVICE = torch.device("meta")  # stands for a GPU: not the host


def test_copies_from_the_host_and_to_it_are_found():
    with HostTransfers() as transfers:
        torch.maximum(torch.ones(2, device=DEVICE), torch.zeros(2, device=DEVICE) + 1e-5)
        torch.tensor(1e-5)
    assert transfers.found is None
    for copy in (lambda: torch.tensor(1e-5).to(DEVICE), lambda: torch.ones(2, device=DEVICE).copy_(torch.ones(2))):
        with HostTransfers() as transfers:
            copy()
        assert "between cpu and meta" in transfers.found


def test_a_model_that_stays_on_its_device_can_be_captured():
    binding = build_binding(tiny_model(), is_live=True)
    assert why_not_captured(binding, 16) is None
    assert not binding.caches.of_layers


def test_a_model_that_makes_a_tensor_on_the_host_is_named():
    model = tiny_model()
    norm = model.model.norm
    norm.forward = lambda states, forward=norm.forward: (torch.tensor(1e-5).to(DEVICE), forward(states))[1]
    reason = why_not_captured(build_binding(model, is_live=True), 16)
    assert reason.startswith("the forward pass of LlamaForCausalLM copies a tensor")


@pytest.mark.parametrize("streams", [(), (2,)])
def test_layers_of_several_streams_compile_once_for_any_number_of_rows(streams):
    """Gemma 3n passes [num_streams, 1, num_rows, hidden_size] from layer to layer."""
    compiled = []

    def backend(module, inputs):
        compiled.append(module)
        return module.forward

    layer, numbers = torch.nn.Linear(8, 8), torch.arange(40)
    call = torch.compile(lambda layer, states, rows: layer(states) + rows[:, None], backend=backend, dynamic=False)
    run = partial(_call_compiled, call, call, layer)
    for num_rows in range(5, 12):
        states = torch.randn(*streams, 1, num_rows, 8)
        torch.testing.assert_close(run(states, numbers[:num_rows]), layer(states) + numbers[:num_rows, None])
    assert len(compiled) == 1


class Scale(torch.nn.Module):
    """A number of the module is a constant of its code."""

    def __init__(self, number):
        super().__init__()
        self.weight, self.number = torch.nn.Parameter(torch.ones(3)), number

    def forward(self, states):
        return states * self.weight * self.number


def test_layers_of_more_kinds_than_pytorch_lets_compile_are_compiled(monkeypatch):
    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **rest: compile_with(function, backend="eager", **rest))
    layers, states = [Scale(number) for number in range(12)], torch.ones(1, 5, 3)
    with torch._dynamo.config.patch(recompile_limit=8):
        calls = compile_calls(torch.nn.ModuleList(layers), layers)
        for number, layer in enumerate(layers):
            assert torch.equal(calls[layer](states), number * states)
