"""Linear layers that read the same input, merged into one product."""

import gc
import weakref

import pytest
import torch
from torch import nn

from nanovllm.fast.layers.merged_linears import MergedLinear, MergedPart, merging
from tests.support.tiny_models import FAMILIES, tiny_model


def merge(model):
    with merging(model, model.model.layers), torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_merged_model_computes_the_same(family):
    model, tokens = tiny_model(family), torch.arange(40)[None]
    with torch.no_grad():
        expected = model(tokens).logits
        merge(model)
        torch.testing.assert_close(model(tokens).logits, expected, atol=1e-4, rtol=1e-4)
    layer = model.model.layers[0]
    assert isinstance(layer.self_attn.q_proj, MergedLinear) and isinstance(layer.mlp.gate_proj, MergedLinear)
    assert isinstance(layer.self_attn.v_proj, MergedPart) and isinstance(layer.mlp.up_proj, MergedPart)
    assert type(layer.self_attn.o_proj) is nn.Linear


def test_merged_layers_can_be_read_like_those_that_they_replace():
    model, untouched = tiny_model("qwen2"), tiny_model("qwen2")
    merge(model)
    for name in ("q_proj", "k_proj", "v_proj"):
        ours, theirs = (getattr(m.model.layers[1].self_attn, name) for m in (model, untouched))
        assert torch.equal(ours.weight, theirs.weight) and torch.equal(ours.bias, theirs.bias)
        assert (ours.in_features, ours.out_features) == (theirs.in_features, theirs.out_features)


@pytest.mark.full
def test_the_weights_that_were_merged_are_freed():
    model = tiny_model()
    gone = [weakref.ref(layer.mlp.up_proj.weight) for layer in model.model.layers]
    merge(model)
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_layers_with_a_weight_that_others_use_too_are_left_alone():
    model = tiny_model()
    layers = model.model.layers
    layers[0].mlp.up_proj.weight = layers[1].mlp.up_proj.weight
    with torch.no_grad():
        expected = model(torch.tensor([[1, 2, 3]])).logits
        merge(model)
        torch.testing.assert_close(model(torch.tensor([[1, 2, 3]])).logits, expected, atol=1e-4, rtol=1e-4)
    assert type(layers[0].mlp.up_proj) is nn.Linear and type(layers[0].mlp.gate_proj) is nn.Linear
