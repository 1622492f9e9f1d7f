"""Layers of packed weights in the launches of their products: where they run, compared with layers by kernels.

References in PyTorch stand in for the kernels, which run on a GPU alone: see tests/gpu/test_tiled_on_gpu.py.
"""

import re

import pytest
import torch
import torch.nn.functional as F

from nanovllm.fast.kernels import packed_rows
from nanovllm.fast.layers import kernel_layers
from nanovllm.fast.layers.kernel_layers import KernelLayer
from nanovllm.fast.layers.packed_layers import PackedLayer
from nanovllm.fast.replaced_layers import FastLayers
from nanovllm.models.quantised.blocks import QuantisedLinear
from nanovllm.models.quantised.on_load import quantise_model
from nanovllm.models.quantised.scaled import rounded
from nanovllm.models.quantised.tiled import ScaledLinear, tiled_linear
from tests.support.decode_steps import answering_alike, binding_of, hidden_step
from tests.support.reference_parts import PARTS
from tests.support.tiny_models import tiny_model

POSITIONS = [0, 5, 20, 17, 3, 9]


def reference(states, parts, bias, outputs, form, rest):
    """What a launch computes, in float64."""
    rows = states.double()
    if rest.norm is not None:
        rows = F.rms_norm(rows, rows.shape[1:], rest.norm.double(), rest.epsilon).to(states.dtype).double()
    product = rows @ packed_rows.dequantised(*parts, outputs, rows.shape[1], form).double().T
    product = product if bias is None else product + bias
    if rest.gated:
        gate, up = product.to(states.dtype).double().chunk(2, dim=-1)
        product = F.silu(gate) * up
    if rest.residual is not None:
        product = product.to(states.dtype).double() + rest.residual
    return product.to(states.dtype) * (rest.slots > 0)[:, None]


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Numbers of rows of the launches."""
    found = []

    def recorded(states, *args):
        found.append(len(states))
        return reference(states, *args)

    monkeypatch.setattr(kernel_layers, "find_kernel", lambda file, name: PARTS[name])
    monkeypatch.setattr(packed_rows, "fused_product", recorded)
    return found


def tiny_binding(family="llama", quantization="int4", **fields):
    """A model as `tiled.place` leaves it on a GPU."""
    model = tiny_model(family, dtype=torch.bfloat16, **fields)
    quantise_model(model, quantization, "cpu")
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if type(child) is QuantisedLinear:
                bias = None if child.bias is None else child.bias.bfloat16()
                parent._modules[name] = tiled_linear(child.quantised_parts(), bias, torch.bfloat16)
    return binding_of(model, rotary=True)


def use_layers(binding, num_rows=8):
    """Compare the layers in steps of so many rows; the types of their calls."""
    FastLayers(binding).use_kernel_layers(lambda: hidden_step(binding, POSITIONS, num_rows), lambda: None)
    return {type(binding.calls.get(module)) for module in binding.layer_modules}


@pytest.mark.costly
@pytest.mark.parametrize("quantization", ["int4", "int8"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2"])
def test_layers_answer_as_their_modules_and_leave_the_same_k_and_v(family, quantization, launches):
    binding = tiny_binding(family, quantization)
    with answering_alike(binding, POSITIONS, 8):
        assert use_layers(binding) == {PackedLayer}
        launches.clear()
    assert launches == [8] * 4 * len(binding.layer_modules)


@pytest.mark.parametrize("num_rows, is_fused", [(6, True), (8, True), (9, False), (16, False)])
def test_steps_of_up_to_8_rows_run_in_these_launches(num_rows, is_fused, launches):
    binding = tiny_binding()
    assert use_layers(binding) == {PackedLayer}
    launches.clear()
    hidden_step(binding, POSITIONS, num_rows)
    assert bool(launches) == is_fused


def test_layers_that_no_step_of_few_rows_compared_run_by_kernels(launches, info_log):
    assert use_layers(tiny_binding(), 16) == {KernelLayer}
    assert "no step of few rows fits, to compare them" in info_log.text and not launches


@pytest.mark.parametrize("part", ["norm", "gated", "residual"])
def test_a_launch_that_errs_by_some_percent_in_one_part_is_not_used(part, monkeypatch, info_log):
    def wrong(states, *args):
        output = reference(states, *args)
        given = getattr(args[-1], part)
        return output * 1.02 if given is not None and given is not False else output

    monkeypatch.setattr(packed_rows, "fused_product", wrong)
    assert use_layers(tiny_binding()) == {KernelLayer}
    assert re.search("the launch of (qkv|gate|o) computes something else", info_log.text)


def test_layers_that_round_their_inputs_are_left_to_the_compiler(info_log):
    model = tiny_model("llama", dtype=torch.bfloat16)
    for parent in list(model.model.layers.modules()):
        for name, child in parent._modules.items():
            if type(child) is torch.nn.Linear:
                values, scales = rounded(child.weight.detach())
                parent._modules[name] = ScaledLinear(values, scales[:, 0].contiguous())
    binding = binding_of(model, rotary=True)
    assert binding.rotary_changes
    assert use_layers(binding) == {type(None)}
    assert "products that the compiler joins with the rounding of their inputs" in info_log.text
