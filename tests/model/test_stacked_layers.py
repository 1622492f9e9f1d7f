"""Layers as one launch: recognised, compared with their modules, and not used where a model computes anything else.

The kernel is stood in for by its reference in PyTorch, since it runs on a GPU alone: see tests/gpu/test_layer_stack.py.
"""

import re

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.llama.modeling_llama import LlamaModel

from nanovllm.errors import NotFusedError
from nanovllm.fast.kernels import layer_stack
from nanovllm.fast.layers.layer_equations import RECORDING_NAME
from nanovllm.fast.layers.stacked_layers import StackedLayers
from tests.support.decode_steps import (
    BLOCK_SIZE,
    answering_alike,
    binding_of,
    hidden_step,
    stack_layers,
    tiny_binding,
)
from tests.support.other_models import small
from tests.support.reference_stack import ReferenceStack, stand_in
from tests.support.scaled_parts import PLACES, computing, scale_part
from tests.support.tiny_models import LLAMAS_KIND, VOCAB_SIZE, tiny_model


@pytest.fixture(autouse=True)
def reference_stack(monkeypatch):
    stand_in(monkeypatch)


def stacked(binding):
    """Whether the layers run as one after they were compared; the launches of comparing are forgotten."""
    stack_layers(binding)
    ReferenceStack.launches.clear()
    hidden_step(binding, [1])
    return bool(ReferenceStack.launches)


def test_a_closed_binding_keeps_neither_way_to_call_its_layers():
    binding = tiny_binding(rotary=False)
    assert stacked(binding)
    binding.close()
    assert not binding.calls and binding.stacked is None


@LLAMAS_KIND
def test_layers_of_llamas_kind_run_as_one_and_answer_as_their_modules(family):
    binding = tiny_binding(family, rotary=False)
    with answering_alike(binding, [0, 17, 33]):
        assert stacked(binding)
        ReferenceStack.launches.clear()
    assert ReferenceStack.launches == [2]


class InItsPlace(nn.Module):
    """As `RotaryAttention` stands for an attention module while a step runs."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, *args, **kwargs):
        return self.attention(*args, **kwargs)


def test_layers_whose_attention_modules_are_replaced_in_steps_run_as_one_too():
    binding = tiny_binding("qwen3", rotary=False)
    layers = binding.model.model.layers
    binding.rotary_changes = [(layer._modules, "self_attn", InItsPlace(layer.self_attn)) for layer in layers]
    hidden_step(binding, [3])
    assert type(layers[0].self_attn) is InItsPlace
    assert stacked(binding)


@pytest.mark.parametrize("num_rows", [3, 5, 16])
def test_steps_of_other_numbers_of_rows_run_layer_by_layer(num_rows):
    binding = tiny_binding(rotary=False)
    expected = hidden_step(binding, [0, 17], num_rows)
    assert stacked(binding)
    ReferenceStack.launches.clear()
    assert torch.equal(hidden_step(binding, [0, 17], num_rows), expected)
    assert ReferenceStack.launches == []


def tiny_llama(**fields):
    return tiny_model(dtype=torch.bfloat16, **fields)


def granite(**fields):
    return small("Granite", hidden_size=128, num_attention_heads=4, num_key_value_heads=2, **fields).bfloat16()


DIFFERENT = {
    "another activation": (lambda: tiny_llama(hidden_act="gelu"), "no SiLU"),
    "biases in the MLP": (lambda: tiny_llama(mlp_bias=True), "bias"),
    "a bias behind attention": (lambda: tiny_llama(attention_bias=True), "bias"),
    "scaled scores": (
        lambda: granite(residual_multiplier=0.5, attention_multiplier=0.25), "computes something else"
    ),
    "residuals times 0.98": (lambda: granite(residual_multiplier=0.98), "between attention and its second norm"),
    "residuals times 0.995": (lambda: granite(residual_multiplier=0.995), "between attention and its second norm"),
    "GPT-2": (
        lambda: GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=VOCAB_SIZE)).bfloat16().eval(),
        "layers run|no mlp|has no|passes nothing",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_model_that_differs_runs_as_it_is(name, info_log):
    make, reason = DIFFERENT[name]
    torch.manual_seed(0)
    binding = binding_of(make())
    expected = hidden_step(binding, [0, 17])
    assert not stacked(binding)
    assert re.search(reason, info_log.text)
    assert torch.equal(hidden_step(binding, [0, 17]), expected)


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_a_factor_of_half_a_percent_anywhere_in_a_layer_keeps_the_modules(place, rotary, monkeypatch):
    model = tiny_llama()
    scale_part(monkeypatch, place, 0.995)
    binding = binding_of(model, rotary=rotary)
    expected = hidden_step(binding, [0, 17])
    assert not stacked(binding)
    assert torch.equal(hidden_step(binding, [0, 17]), expected)


class ScaledInput(nn.Module):
    """An attention module that gets its input times a factor."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, hidden_states, **kwargs):
        return self.attention(hidden_states=hidden_states * 0.995, **kwargs)


def test_a_factor_before_fused_attention_keeps_the_modules():
    binding = tiny_binding()
    assert binding.rotary_changes
    binding.rotary_changes = [(children, name, ScaledInput(fused)) for children, name, fused in binding.rotary_changes]
    assert not stacked(binding)


@pytest.mark.parametrize("name", ["keys", "values"])
def test_a_kernel_that_writes_no_k_or_v_keeps_the_modules(name, monkeypatch, info_log):
    run = ReferenceStack.run

    def forgets(stack, *args, **options):
        before = [getattr(layer, name).clone() for layer in stack._layers]
        output = run(stack, *args, **options)
        for layer, old in zip(stack._layers, before, strict=True):
            getattr(layer, name).copy_(old)
        return output

    monkeypatch.setattr(ReferenceStack, "run", forgets)
    binding = tiny_binding(rotary=False)
    expected = hidden_step(binding, [0, 17])
    assert not stacked(binding)
    assert f"its {name} differ by up to 2.0e+00" in info_log.text
    assert torch.equal(hidden_step(binding, [0, 17]), expected)


@pytest.mark.costly
@pytest.mark.parametrize("rotary", [False, True])
@LLAMAS_KIND
def test_layers_of_llamas_kind_run_as_one_whatever_their_weights(family, rotary):
    for seed in range(2):
        binding = tiny_binding(family, seed=seed, num_layers=8, rotary=rotary)
        assert bool(binding.rotary_changes) == rotary
        assert stacked(binding)


def test_what_computes_something_between_two_layers_is_found_out():
    binding = tiny_binding(rotary=False)
    stack = StackedLayers(binding.layer_modules, binding.layers, binding.caches.of_layers, {}, BLOCK_SIZE)
    binding.calls = stack.comparing_calls()
    binding.install(RECORDING_NAME)
    with stack.equations.watching():
        hidden_step(binding, [0, 17])
        first = binding.calls[binding.model.model.layers[0]]
        binding.calls[binding.model.model.layers[0]] = lambda *args, **kwargs: first(*args, **kwargs) * 1.0
        binding.install(RECORDING_NAME)
        with pytest.raises(NotFusedError, match="between the layers"):
            hidden_step(binding, [0, 17])


@pytest.mark.parametrize("num_layers", [2, 3])
def test_a_model_that_reads_an_early_layers_output_behind_the_last_runs_as_it_is(num_layers, monkeypatch, info_log):
    def unread(hidden):
        assert hidden.shape[0] == 1 and hidden.dtype == torch.bfloat16  # no element is read
        return hidden

    forward = computing(unread, after=lambda states: states[-1] + 2 * states[0])
    monkeypatch.setattr(LlamaModel, "forward", forward)
    binding = tiny_binding(rotary=False, num_layers=num_layers)
    expected = hidden_step(binding, [0, 17])
    assert not stacked(binding)
    assert "reads a layer's output" in info_log.text
    assert torch.equal(hidden_step(binding, [0, 17]), expected)


def test_what_the_kernel_does_not_serve_is_named(monkeypatch):
    monkeypatch.undo()
    sizes = layer_stack.StackSizes(1024, 3072, 16, 8, 128, 64)
    assert layer_stack.why_not(sizes, torch.bfloat16, torch.device("cpu")) is not None
    assert sizes.piece == 1024 and sizes._replace(inner=2560).piece == 512 and sizes._replace(hidden=576).piece == 0
    assert sizes.num_bytes == 2 * (4096 * 1024 + 1024 * 2048 + 6144 * 1024 + 1024 * 3072)
    available = 232_448  # bytes of an H200's multiprocessor
    for served in (sizes, sizes._replace(inner=2560), sizes._replace(hidden=2048, inner=8192)):
        num_blocks = served.num_blocks(132)
        slots = served.slots(num_blocks, available)
        assert slots >= 4 and served.shared_bytes(num_blocks, slots) <= available
    assert sizes.num_blocks(132) == 132 and sizes._replace(hidden=256).num_blocks(132) == 128
    assert sizes.slots(132, 49_152) < 4
